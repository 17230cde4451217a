"""Where requests wait for a replica: first come, first served within a lane, bounded in number and time.

A lane is the set of replicas that its requests may go to. Not a scheduler of tenants, and not a holder of credits:
whether there is room now is found out by each waiter's own `attempt`, which is made again, oldest first, whenever
something changed (`wake`); so a waiting request can still choose another replica. Lanes never block one another.
Invariants: nobody overtakes in a lane; a waiter that leaves, however it does, leaves no trace.
"""

import asyncio
import heapq
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from penstock.wire.errors import DeadlineExceeded, Overloaded


class AttemptResult(Enum):
    """What came of an attempt to place a request; each one but MUST_WAIT ends the wait."""

    PLACED = auto()
    MUST_WAIT = auto()
    """No place is free now; to be tried again."""
    NEEDS_TOKENIZATION = auto()
    """A route that may be taken needs the prompt in another model's tokens first."""
    CLOSED = auto()
    """The request was given up meanwhile."""


Attempt = Callable[[], AttemptResult]
"""Tries to place a request now. What it raises ends the wait."""

DRAIN_SAMPLES = 64
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class Lane(NamedTuple):
    pools: tuple[str, ...]
    excluded: frozenset[str] = frozenset()
    """Replicas that have refused the request."""


@dataclass(slots=True, order=True)
class _Waiter:
    arrival: int
    attempt: Attempt = field(compare=False)
    admitted: asyncio.Future[AttemptResult] = field(compare=False)
    since_s: float = field(compare=False)


class WaitQueue:
    """The queue of requests that wait for a replica or provider, in lanes. max_waiting: most that wait at once; further
    ones are refused. timeout_s: longest wait. clock: monotonic seconds, for the drain rate and `oldest_s` only."""

    def __init__(self, max_waiting: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._clock = clock
        self._lanes: dict[Lane, list[_Waiter]] = {}
        self._drained: dict[tuple[str, ...], deque[float]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def num_waiting(self, pool: str) -> int:
        """Waiters that the pool could serve."""
        return sum(len(waiters) for lane, waiters in self._lanes.items() if pool in lane.pools)

    def oldest_s(self, pool: str) -> float:
        """How long the first of them has waited; 0 where none waits."""
        since_s = min((waiters[0].since_s for lane, waiters in self._lanes.items() if pool in lane.pools), default=None)
        return 0.0 if since_s is None else self._clock() - since_s

    async def admit(self, lane: Lane, attempt: Attempt, *, arrival: int, deadline_in_s: float) -> AttemptResult:
        """Wait until `attempt` need not wait any more; its result. `arrival` orders a lane: a request that comes back
        keeps its old number, and its place.

        Raises Overloaded (retry_after_s set) when the queue is full or the wait too long, DeadlineExceeded when the
        deadline passes first, and what `attempt` raises. An attempt may have succeeded just when the caller is
        cancelled: the caller releases what it made.
        """
        if lane not in self._lanes:
            result = attempt()
            if result is not AttemptResult.MUST_WAIT:
                self._count_drained(lane)
                return result
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(
                f"{self._num_waiting} requests are waiting for a replica already",
                retry_after_s=self.retry_after_s(lane.pools),
            )
        waiter = _Waiter(arrival, attempt, asyncio.get_running_loop().create_future(), self._clock())
        return await self._wait(lane, waiter, deadline_in_s)

    def wake(self, pool: str) -> None:
        """Something changed in the pool: try the waiters of its lanes again, oldest first, each lane until its head
        must wait."""
        if self._num_waiting:
            self._try_lanes([lane for lane in self._lanes if pool in lane.pools])

    def retry_after_s(self, pools: tuple[str, ...]) -> float:
        """Seconds until a place should be free for a newcomer, at the pace of the latest admissions; bounded, since
        clients take the number literally."""
        drained = self._drained.get(pools)
        if not drained:
            return min(max(self._timeout_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
        ahead = sum(len(waiters) for lane, waiters in self._lanes.items() if lane.pools == pools)
        pace_s = (self._clock() - drained[0]) / len(drained)
        return min(max((ahead + 1) * pace_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    async def _wait(self, lane: Lane, waiter: _Waiter, deadline_in_s: float) -> AttemptResult:
        insort(self._lanes.setdefault(lane, []), waiter)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(max(0.0, min(self._timeout_s, deadline_in_s))):
                return await waiter.admitted
        except TimeoutError:
            if deadline_in_s <= self._timeout_s:
                raise DeadlineExceeded("the request's deadline passed while it waited for a replica") from None
            raise Overloaded(
                f"no replica took the request within {self._timeout_s:g} s",
                retry_after_s=self.retry_after_s(lane.pools),
            ) from None
        finally:
            self._leave(lane, waiter)
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                waiter.admitted.exception()  # retrieved, also where a cancellation came first

    def _leave(self, lane: Lane, waiter: _Waiter) -> None:
        """Take out a waiter that gave up; one that was admitted is out already. If it was the head, the next one may
        fit where it did not."""
        waiters = self._lanes.get(lane, [])
        place = next((place for place, other in enumerate(waiters) if other is waiter), None)
        if place is None:
            return
        self._remove(lane, place)
        if place == 0:
            self._try_lanes([lane])

    def _try_lanes(self, lanes: list[Lane]) -> None:
        heads = [(self._lanes[lane][0].arrival, lane) for lane in lanes if lane in self._lanes]
        heapq.heapify(heads)
        while heads:
            _, lane = heapq.heappop(heads)
            if lane in self._lanes and self._try_head(lane) and lane in self._lanes:
                heapq.heappush(heads, (self._lanes[lane][0].arrival, lane))

    def _try_head(self, lane: Lane) -> bool:
        """Whether the lane's head is gone: admitted, failed, or cancelled already."""
        waiter = self._lanes[lane][0]
        if waiter.admitted.done():
            self._remove(lane, 0)
            return True
        try:
            result = waiter.attempt()
        except Exception as error:  # noqa: BLE001 (raised where the waiter waits, not at the caller, a replica's link)
            waiter.admitted.set_exception(error)
        else:
            if result is AttemptResult.MUST_WAIT:
                return False
            waiter.admitted.set_result(result)
            self._count_drained(lane)
        self._remove(lane, 0)
        return True

    def _remove(self, lane: Lane, place: int) -> None:
        waiters = self._lanes[lane]
        del waiters[place]
        self._num_waiting -= 1
        if not waiters:
            del self._lanes[lane]

    def _count_drained(self, lane: Lane) -> None:
        drained = self._drained.get(lane.pools)
        if drained is None:
            drained = self._drained[lane.pools] = deque(maxlen=DRAIN_SAMPLES)
        drained.append(self._clock())
