"""Where requests wait for a replica, bounded in number and time: whose turn it is, is the order's to say.

Not the order (`waiting_order`, which is pure): this module waits, on the event loop, for the turn that the order gives.
Invariant: a waiter that leaves, however it does, leaves no trace.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from random import Random

from penstock.router.dispatch.attempt import Attempt, AttemptResult, MayHelp, always
from penstock.router.dispatch.holds import Hold
from penstock.router.dispatch.lane import Claim, Lane
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.dispatch.waiting_order import WaitingOrder


class WaitQueue:
    """The queue of requests that wait for a replica or provider, in lanes. max_waiting: most that wait at once; further
    ones are refused. timeout_s: longest wait. counters: what each tenant has had, which others charge. max_share: part
    of `max_waiting` for one tenant. clock: monotonic seconds, for the drain rate and `oldest_s` only. random: spreads
    the times after which refused requests may come back."""

    def __init__(
        self,
        max_waiting: int,
        timeout_s: float,
        counters: VirtualCounters,
        max_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        self._order = WaitingOrder(
            max_waiting, timeout_s, counters, max_share=max_share, clock=clock, random=random or Random()
        )

    def __len__(self) -> int:
        return len(self._order)

    @property
    def num_unheld(self) -> int:
        """Waiters that are not held for a first replica."""
        return self._order.num_unheld

    def num_waiting(self, pool: str) -> int:
        """Waiters that the pool could serve."""
        return self._order.num_waiting(pool)

    def oldest_s(self, pool: str) -> float:
        """The longest wait so far among them; 0 where none waits."""
        return self._order.oldest_s(pool)

    async def admit(
        self,
        lane: Lane,
        attempt: Attempt,
        claim: Claim,
        *,
        deadline_in_s: float,
        may_help: MayHelp = always,
        hold: Hold | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> AttemptResult:
        """Wait until `attempt` need not wait any more; its result. may_help: tells after an attempt that had to wait
        for which changes the next one is worth its time. hold: set where the wait is for a first replica. on_wait:
        called when a wait begins.

        Raises, with retry_after_s set, RateLimited when the tenant has its share of the queue or certainly too many
        before this one, and Overloaded when the queue is full, the wait too long, or the request overdue and its place
        needed; DeadlineExceeded when the deadline passes first, and what `attempt` raises. An attempt may have
        succeeded just when the caller is cancelled: the caller releases what it made.
        """
        self._order.enter(claim.tenant)
        try:
            result = self._order.try_first(lane, attempt, claim)
            if result is not None and result.ends_wait:
                return result
            if on_wait is not None:
                on_wait()
            is_overdue = result is AttemptResult.OVERDUE
            return await self._wait(lane, attempt, claim, deadline_in_s, may_help, hold, is_overdue)
        finally:
            self._order.leave(claim.tenant)

    def wake(self, pool: str, changed: str | None = None) -> None:
        """Something changed in the pool, at the replica `changed` only, if one is named: try the waiters of its lanes
        again, in their order, each lane until its head must wait."""
        if self._order.wake(pool, changed):
            asyncio.get_running_loop().call_soon(self.wake, pool, changed)

    def retry_after_s(self, lane: Lane, claim: Claim) -> float:
        """Seconds until it should be a newcomer's turn, at the pace of the latest admissions, and a random part more;
        bounded, since clients take the number literally."""
        return self._order.retry_after_s(lane, claim)

    async def _wait(
        self,
        lane: Lane,
        attempt: Attempt,
        claim: Claim,
        deadline_in_s: float,
        may_help: MayHelp,
        hold: Hold | None,
        is_overdue: bool,
    ) -> AttemptResult:
        with hold or nullcontext():
            timeout_s = None if hold is None else hold.timeout_s
            return await self._take_turn(lane, attempt, claim, deadline_in_s, may_help, timeout_s, is_overdue)

    async def _take_turn(
        self,
        lane: Lane,
        attempt: Attempt,
        claim: Claim,
        deadline_in_s: float,
        may_help: MayHelp,
        timeout_s: float | None,
        is_overdue: bool,
    ) -> AttemptResult:
        turn: asyncio.Future[AttemptResult] = asyncio.get_running_loop().create_future()
        waiter = self._order.begin(
            lane,
            attempt,
            claim,
            turn,
            deadline_in_s=deadline_in_s,
            may_help=may_help,
            timeout_s=timeout_s,
            is_held=timeout_s is not None,
            is_overdue=is_overdue,
        )
        try:
            async with asyncio.timeout(self._order.patience_s(deadline_in_s, timeout_s)):
                return await turn
        except TimeoutError:
            raise self._order.explain_late(waiter, deadline_in_s, timeout_s) from None
        finally:
            self._order.give_up(waiter)
            if turn.done() and not turn.cancelled():
                turn.exception()  # retrieved, also where a cancellation came first
