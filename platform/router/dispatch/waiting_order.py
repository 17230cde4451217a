"""The order of the requests that wait for a replica: lanes, turns, shares, bounds and refusals. Pure; time and
randomness come in as parameters.

A lane is the set of replicas that its requests may go to. Not the waiting itself (`waiting`, on an event loop; the
simulator, on its own clock), not the order within a lane (`lane`), not the counting of who got how much (`counters`),
and not a holder of credits: whether there is room now is found out by each waiter's own `attempt`, which is made again,
in the lane's order, whenever something changed (`wake`); so a waiting request can still choose another replica. Lanes
never block one another. A request that is held for a first replica counts apart: it takes no place of the queue, and of
no tenant's share of it. Invariants: a head that must wait is overtaken by none that waits in its lane; a waiter that
leaves, however it does, leaves no trace.

Decisions: docs/decisions/fairness.md
"""

import heapq
from collections.abc import Callable, Iterable
from random import Random

from penstock.router.dispatch.attempt import Attempt, AttemptResult, MayHelp, always
from penstock.router.dispatch.lane import Claim, Lane, LaneKey, Turn, Waiter, Waiters, WaitingLane
from penstock.router.dispatch.pace import Pace
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.routing.retry import spread_s
from penstock.tenancy.share import SERVICE_CLASSES
from penstock.wire.errors import DeadlineExceeded, Overloaded, RateLimited

CERTAINTY = 0.5
"""Part of its average that the pace may fall to before a request that is refused for it would have been placed."""
MAX_MOVED_BACK = 32
"""Most waiters that are found to be overdue at once: each costs a decision, and nothing else runs meanwhile."""
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class WaitingOrder:
    """The requests that wait for a replica or provider, in lanes. max_waiting: most that wait at once; further ones are
    refused. timeout_s: longest wait. counters: what each tenant has had, which others charge. max_share: part of
    `max_waiting` for one tenant. clock: monotonic seconds, for the drain rate and `oldest_s` only. random: spreads the
    times after which refused requests may come back."""

    def __init__(
        self,
        max_waiting: int,
        timeout_s: float,
        counters: VirtualCounters,
        *,
        max_share: float,
        clock: Callable[[], float],
        random: Random,
    ) -> None:
        self._max_waiting = max_waiting
        self._max_of_tenant = max(1, int(max_share * max_waiting))
        self._random = random
        self._timeout_s = timeout_s
        self._counters = counters
        self._clock = clock
        self._lanes: dict[Lane, WaitingLane] = {}
        self._paces: dict[tuple[str, ...], Pace] = {}
        self._num_waiting = 0
        """Waiters that are not held for a first replica; the bounds and the other counts are of them alone."""
        self._num_held = 0
        self._num_of_tenant: dict[str, int] = {}
        self._rates = 0.0
        """Weights of the tenants that wait, summed."""
        self._newest = [Waiters(newest_first=True) for _ in SERVICE_CLASSES]
        """Waiters whose answers have not begun, by the rank of their class."""
        self._num_entered: dict[str, int] = {}
        """Requests by tenant between `enter` and `leave`."""

    def __len__(self) -> int:
        return self._num_waiting + self._num_held

    @property
    def num_unheld(self) -> int:
        """Waiters that are not held for a first replica."""
        return self._num_waiting

    def num_waiting(self, pool: str) -> int:
        """Waiters that the pool could serve."""
        return sum(waiting.num_waiting for lane, waiting in self._lanes.items() if pool in lane.pools)

    def oldest_s(self, pool: str) -> float:
        """The longest wait so far among them; 0 where none waits."""
        since = (waiting.oldest_since_s for lane, waiting in self._lanes.items() if pool in lane.pools)
        since_s = min((each for each in since if each is not None), default=None)
        return 0.0 if since_s is None else self._clock() - since_s

    def enter(self, tenant: str) -> None:
        """A request of the tenant is to be placed; `leave` follows, whatever becomes of it."""
        count = self._num_entered.get(tenant, 0)
        self._num_entered[tenant] = count + 1
        if not count:
            self._counters.enter(tenant)

    def leave(self, tenant: str) -> None:
        """A request that had entered is placed, or has given up."""
        count = self._num_entered[tenant] - 1
        if count:
            self._num_entered[tenant] = count
        else:
            del self._num_entered[tenant]
            self._counters.leave(tenant)

    def try_first(self, lane: Lane, attempt: Attempt, claim: Claim) -> AttemptResult | None:
        """The result of a newcomer's attempt, if it goes before all that wait in its lane. Returns None if it has to
        wait, OVERDUE if it has to wait behind others that may be in time. Raises what `attempt` raises."""
        waiting = self._lanes.get(lane)
        result = attempt() if waiting is None or waiting.comes_first(claim) else None
        if result is AttemptResult.OVERDUE:
            again = attempt() if waiting is None else result  # there is nobody to let go first
            if not again.ends_wait:
                return result
            result = again
        if result is None or not result.ends_wait:
            return None
        self._pace(lane).count(self._clock())
        return result

    def begin(
        self,
        lane: Lane,
        attempt: Attempt,
        claim: Claim,
        turn: Turn,
        *,
        deadline_in_s: float,
        may_help: MayHelp = always,
        timeout_s: float | None = None,
        is_held: bool = False,
        is_overdue: bool = False,
    ) -> Waiter:
        """Let a newcomer wait whose turn it is not; `turn` gets the result of its attempt when that comes. may_help:
        tells after an attempt that had to wait for which changes the next one is worth its time. timeout_s: its longest
        wait; None: the queue's. is_held: the wait is for a first replica, and `holds` bounds the number of such.
        is_overdue: `try_first` returned OVERDUE. The turn may also be told Overloaded, where a place of the queue is
        needed that it has.

        Raises, with retry_after_s set, RateLimited when the tenant has its share of the queue or certainly too many
        before this one, and Overloaded when the queue is full.
        """
        if not claim.has_begun:
            self._check_pace(lane, claim, self.patience_s(deadline_in_s, timeout_s))
            if not is_held:
                self._check_share(lane, claim, is_overdue=is_overdue)
        if self._num_waiting >= self._max_waiting and not is_held:
            self._displace(lane, claim, is_overdue=is_overdue)
        waiter = Waiter(lane, claim, attempt, turn, self._clock(), may_help, is_held, is_overdue)
        waiting = self._lanes.get(lane)
        if waiting is None:
            waiting = self._lanes[lane] = WaitingLane(self._counters.counter)
            self._pace(lane).begin_busy()
        waiting.add(waiter)
        self._count_in(waiter)
        return waiter

    def patience_s(self, deadline_in_s: float, timeout_s: float | None = None) -> float:
        """The longest wait of a request whose deadline is that far away, seconds. timeout_s: as in `begin`."""
        return max(0.0, min(self._timeout_s if timeout_s is None else timeout_s, deadline_in_s))

    def explain_late(
        self, waiter: Waiter, deadline_in_s: float, timeout_s: float | None = None
    ) -> DeadlineExceeded | Overloaded:
        """Why a waiter's turn has not come within its patience. timeout_s: as in `begin`."""
        most_s = self._timeout_s if timeout_s is None else timeout_s
        if deadline_in_s <= most_s:
            return DeadlineExceeded("the request's deadline passed while it waited for a replica")
        return Overloaded(
            f"no replica took the request within {most_s:g} s",
            retry_after_s=self.retry_after_s(waiter.lane, waiter.claim),
        )

    def give_up(self, waiter: Waiter) -> None:
        """Take out a waiter that gave up; one that was admitted is out already. If it was the head, the next one may
        fit where it did not."""
        if waiter.has_left:
            return
        lane = waiter.lane
        head = self._lanes[lane].head()
        self._remove(waiter)
        if head is not None and head[1] is waiter:
            self._try_lanes([lane])

    def wake(self, pool: str, changed: str | None = None) -> bool:
        """Something changed in the pool, at the replica `changed` only, if one is named: try the waiters of its lanes
        again, in their order, each lane until its head must wait. A head that has had to wait already is not tried for
        a change that can't help it. Returns True where it broke off, because it has cost enough for once, and should be
        called again soon."""
        return bool(self._lanes) and self._try_lanes([lane for lane in self._lanes if pool in lane.pools], changed)

    def retry_after_s(self, lane: Lane, claim: Claim) -> float:
        """Seconds until it should be a newcomer's turn, at the pace of the latest admissions, and a random part more;
        bounded, since clients take the number literally."""
        pace_s = self._pace(lane).latest_s(self._clock())
        if pace_s is None:
            wait_s = self._timeout_s
        else:
            ahead = sum(each.num_waiting for other, each in self._lanes.items() if other.pools == lane.pools)
            own = self._num_of_tenant.get(claim.tenant, 0) * max(1.0, self._rates / claim.share.rate)
            wait_s = (min(ahead, own) + 1) * pace_s
        return spread_s(min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S), self._random)

    def _check_share(self, lane: Lane, claim: Claim, *, is_overdue: bool) -> None:
        """Raises RateLimited when the tenant has its share of the queue, and no overdue waiter makes way."""
        is_full = self._num_of_tenant.get(claim.tenant, 0) >= self._max_of_tenant < self._max_waiting
        if is_full and (is_overdue or not self._make_way(claim)):
            raise RateLimited(
                f"{self._max_of_tenant} requests of this tenant wait for a replica already, which is its share of the"
                " queue",
                retry_after_s=self.retry_after_s(lane, claim),
            )

    def _check_pace(self, lane: Lane, claim: Claim, patience_s: float) -> None:
        """Raises RateLimited when the tenant has so many requests before this one that it can't be placed in time even
        if the tenant got every place."""
        pace_s = self._pace(lane).busy_s(self._clock())
        if pace_s is not None and lane in self._lanes:
            num_before = self._lanes[lane].num_of(claim.tenant)
            if num_before * pace_s * CERTAINTY > patience_s:
                raise RateLimited(
                    f"{num_before} requests of this tenant are before this one; it would not be placed in time",
                    retry_after_s=self.retry_after_s(lane, claim),
                )

    def _displace(self, lane: Lane, claim: Claim, *, is_overdue: bool) -> None:
        """Refuse an overdue waiter of the tenant of a newcomer that is not, or one of a later class than the
        newcomer's, the newest of the latest class; raises Overloaded where there is none."""
        if not is_overdue and self._make_way(claim):
            return
        rank = -1 if claim.has_begun else claim.share.rank
        victims = (waiters.first() for waiters in reversed(self._newest[rank + 1 :]))
        victim = next((each for each in victims if each is not None), None)
        if victim is None:
            raise Overloaded(
                f"{self._num_waiting} requests are waiting for a replica already",
                retry_after_s=self.retry_after_s(lane, claim),
            )
        self._refuse(
            victim,
            f"the queue is full, and requests of the class {victim.claim.share.service_class!r} are refused before"
            " others",
        )

    def _make_way(self, claim: Claim) -> bool:
        """Refuse an overdue waiter of a newcomer's tenant. Returns False if there is none, or each has a lower priority
        number."""
        if claim.has_begun:
            return False
        overdue = [waiting.find_last_overdue(claim.tenant) for waiting in self._lanes.values()]
        found = (each for each in overdue if each is not None)
        victim = max(found, key=lambda each: (each.claim.priority, each.claim.arrival), default=None)
        if victim is None or victim.claim.priority < claim.priority:
            return False
        self._refuse(victim, "its first token would come too late, and requests that may be in time need its place")
        return True

    def _refuse(self, victim: Waiter, why: str) -> None:
        if not victim.turn.done():
            victim.turn.set_exception(Overloaded(why, retry_after_s=self.retry_after_s(victim.lane, victim.claim)))
        self.give_up(victim)

    def _pace(self, lane: Lane) -> Pace:
        pace = self._paces.get(lane.pools)
        if pace is None:
            pace = self._paces[lane.pools] = Pace()
        return pace

    def _count_in(self, waiter: Waiter) -> None:
        if waiter.is_held:
            self._num_held += 1
            return
        claim = waiter.claim
        self._num_waiting += 1
        count = self._num_of_tenant[claim.tenant] = self._num_of_tenant.get(claim.tenant, 0) + 1
        if count == 1:
            self._rates += claim.share.rate
        if not claim.has_begun:
            self._newest[claim.share.rank].add(waiter)

    def _count_out(self, waiter: Waiter) -> None:
        """Count a waiter that has left its lane."""
        if waiter.is_held:
            self._num_held -= 1
            return
        claim = waiter.claim
        self._num_waiting -= 1
        count = self._num_of_tenant.pop(claim.tenant) - 1
        if count:
            self._num_of_tenant[claim.tenant] = count
        else:
            self._rates = self._rates - claim.share.rate if self._num_of_tenant else 0.0
        if not claim.has_begun:
            self._newest[claim.share.rank].count_out()

    def _try_lanes(self, lanes: Iterable[Lane], changed: str | None = None) -> bool:
        """Whether it broke off at MAX_MOVED_BACK."""
        for tenant in self._counters.take_lowered():
            for waiting in self._lanes.values():
                waiting.reorder(tenant)
        heads: list[tuple[LaneKey, Lane]] = []
        for lane in lanes:
            self._push_head(heads, lane)
        num_moved_back = 0
        while heads and num_moved_back < MAX_MOVED_BACK:
            key, lane = heapq.heappop(heads)
            head = self._lanes[lane].head() if lane in self._lanes else None
            if head is None:
                continue
            was_overdue = head[1].is_overdue
            if head[0] > key or self._try_head(lane, head[1], changed):
                self._push_head(heads, lane)
                num_moved_back += head[1].is_overdue and not was_overdue
        return bool(heads)

    def _push_head(self, heads: list[tuple[LaneKey, Lane]], lane: Lane) -> None:
        head = self._lanes[lane].head() if lane in self._lanes else None
        if head is not None:
            heapq.heappush(heads, (head[0], lane))

    def _try_head(self, lane: Lane, waiter: Waiter, changed: str | None) -> bool:
        """Whether the lane's head is out of the way: admitted, failed, cancelled already, or behind others now."""
        if waiter.turn.done():
            self._remove(waiter)
            return True
        waiting = self._lanes[lane]
        try:
            if changed is not None and waiting.stuck is waiter and not waiter.may_help(changed):
                return False
            waiting.stuck = waiter
            result = waiter.attempt()
        except Exception as error:  # noqa: BLE001 (raised where the waiter waits, not at the caller, a replica's link)
            waiter.turn.set_exception(error)
        else:
            if result is AttemptResult.OVERDUE:
                waiting.move_back(waiter)
                waiting.stuck = None
                return True
            if not result.ends_wait:
                return False
            waiter.turn.set_result(result)
            self._pace(lane).count(self._clock())
        self._remove(waiter)
        return True

    def _remove(self, waiter: Waiter) -> None:
        waiting = self._lanes[waiter.lane]
        waiting.remove(waiter)
        self._count_out(waiter)
        if not waiting.num_waiting:
            del self._lanes[waiter.lane]
