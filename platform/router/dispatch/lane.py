"""One lane of the queue: the waiters for the same replicas, tenant by tenant.

Says who is next: first what had begun and lost its place, in the order of arrival; then the first request of the tenant
that has had least (`counters`), at equal counters the earlier class, then the earlier arrival. A tenant's first request
is that with the lowest priority number, then the earliest. In the same order behind all of these: those that are
overdue. Not the waiting itself, nor the attempts (`waiting`). Invariants: priorities order a tenant's own requests and
nobody else's; a waiter that left is never the head.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

from penstock.router.dispatch.attempt import Attempt, AttemptResult, MayHelp, always
from penstock.router.dispatch.shares.lazy_heap import LazyHeap
from penstock.tenancy.share import DEFAULT_SHARE, Share

_SLACK = 16
"""Waiters that left and are kept in a heap, whatever the number of the others."""


class Lane(NamedTuple):
    """The replicas that a request may go to; those that wait for the same ones are in one lane."""

    pools: tuple[str, ...]
    excluded: frozenset[str] = frozenset()
    """Replicas that have refused the request."""
    adapter_tenant: str = ""
    """The tenant, of requests with adapters: those may have to wait for a slot while others have room."""
    goes_alone: bool = False
    """Whether its requests are tried again one at a time (`trials`), which may take longer than a place does."""


class Claim(NamedTuple):
    """What decides on the place of a request in the queue."""

    arrival: int
    """Number of the request in the order of arrival; one that comes back keeps it, and its place."""
    tenant: str = ""
    share: Share = DEFAULT_SHARE
    has_begun: bool = False
    """Whether a part of its answer has been delivered."""
    priority: int = 0
    """Place among the tenant's own requests that have not begun, by the request's wish: lower goes first."""


class Turn(Protocol):
    """What a waiter learns of its turn, once; a future of an event loop is one."""

    def done(self) -> bool:
        """Whether it has been told, or whoever waited has given up."""

    def set_result(self, result: AttemptResult, /) -> None: ...
    def set_exception(self, error: Exception, /) -> None: ...


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits. since_s: beginning of its wait, on the queue's clock."""

    lane: Lane
    claim: Claim
    attempt: Attempt
    turn: Turn
    since_s: float
    may_help: MayHelp = always
    is_held: bool = False
    """Whether it waits for a first replica."""
    is_overdue: bool = False
    """Whether its first token would come too late."""
    has_left: bool = False

    def __lt__(self, other: "Waiter") -> bool:
        return self.claim.arrival < other.claim.arrival


class Waiters:
    """Waiters in the order of their arrival, or the other way round; by priority first, where that counts. overdue:
    whether they are overdue; None: that does not matter. All operations but `present` are O(log n), amortized."""

    def __init__(
        self, *, newest_first: bool = False, has_priorities: bool = False, overdue: bool | None = None
    ) -> None:
        self._sign = -1 if newest_first else 1
        self._has_priorities = has_priorities
        self._overdue = overdue
        self._heap: list[tuple[int, int, Waiter]] = []
        self.num_present = 0

    def add(self, waiter: Waiter) -> None:
        self.num_present += 1
        priority = waiter.claim.priority if self._has_priorities else 0
        heapq.heappush(self._heap, (priority, self._sign * waiter.claim.arrival, waiter))

    def count_out(self) -> None:
        """Take out one waiter, whose `has_left` has been set, or that is overdue now; it is dropped when it is in the
        way."""
        self.num_present -= 1
        if len(self._heap) > 2 * self.num_present + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_here(entry[-1])]
            heapq.heapify(self._heap)

    def first(self) -> Waiter | None:
        while self._heap and not self._is_here(self._heap[0][-1]):
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def present(self) -> Iterator[Waiter]:
        """All of them, in no order. O(n)."""
        return (entry[-1] for entry in self._heap if self._is_here(entry[-1]))

    def _is_here(self, waiter: Waiter) -> bool:
        return not waiter.has_left and self._overdue in (None, waiter.is_overdue)


class _Line:
    """A tenant's waiters: those that may be in time, and those that are overdue."""

    def __init__(self) -> None:
        self.in_time = Waiters(has_priorities=True, overdue=False)
        self.overdue = Waiters(has_priorities=True, overdue=True)

    @property
    def num_present(self) -> int:
        return self.in_time.num_present + self.overdue.num_present

    def of(self, waiter: Waiter) -> Waiters:
        """The waiters that this one is among."""
        return self.overdue if waiter.is_overdue else self.in_time

    def first(self) -> Waiter:
        """The next one; there must be one."""
        waiter = self.in_time.first() or self.overdue.first()
        assert waiter is not None
        return waiter


LaneKey = tuple[bool, float, float, int]
"""Order of tenants: whether the first waiter is overdue, counter, class, arrival of the first waiter."""


class WaitingLane:
    """The waiters of a lane. counter: what a tenant has had, divided by its weight."""

    def __init__(self, counter: Callable[[str], float]) -> None:
        self._counter = counter
        self.num_waiting = 0
        self.stuck: Waiter | None = None
        """The waiter that was the head when the lane was tried last, and had to wait; every change since was shown to
        it."""
        self._begun = Waiters()
        self._tenants: dict[str, _Line] = {}
        self._order: LazyHeap[LaneKey] = LazyHeap(self._key)

    @property
    def oldest_since_s(self) -> float | None:
        """Beginning of the longest wait, those of the overdue left out, on the queue's clock."""
        every = chain.from_iterable(
            waiters.present() for waiters in (self._begun, *(line.in_time for line in self._tenants.values()))
        )
        return min((waiter.since_s for waiter in every), default=None)

    def num_of(self, tenant: str) -> int:
        """Waiters of a tenant that have not begun and are not overdue."""
        line = self._tenants.get(tenant)
        return 0 if line is None else line.in_time.num_present

    def find_last_overdue(self, tenant: str) -> Waiter | None:
        """The overdue waiter of a tenant whose turn would come last. O(n)."""
        line = self._tenants.get(tenant)
        if line is None or not line.overdue.num_present:
            return None
        return max(line.overdue.present(), key=lambda waiter: (waiter.claim.priority, waiter.claim.arrival))

    def add(self, waiter: Waiter) -> None:
        self.num_waiting += 1
        if waiter.claim.has_begun:
            self._begun.add(waiter)
            return
        tenant = waiter.claim.tenant
        line = self._tenants.setdefault(tenant, _Line())
        line.of(waiter).add(waiter)
        if line.first() is waiter:
            self._order.update(tenant)

    def move_back(self, waiter: Waiter) -> None:
        """A waiter that has not begun is overdue: all that are not go before it."""
        assert not waiter.is_overdue, "it was moved back before"
        line = self._tenants[waiter.claim.tenant]
        waiter.is_overdue = True
        line.in_time.count_out()
        line.overdue.add(waiter)
        self._order.update(waiter.claim.tenant)

    def remove(self, waiter: Waiter) -> None:
        """Take out a waiter that is in the lane."""
        waiter.has_left = True
        self.num_waiting -= 1
        if waiter.claim.has_begun:
            self._begun.count_out()
            return
        tenant = waiter.claim.tenant
        line = self._tenants[tenant]
        line.of(waiter).count_out()
        if not line.num_present:
            del self._tenants[tenant]
            self._order.remove(tenant)
        else:
            self._order.update(tenant)  # the next one may have come before it, with a later priority

    def reorder(self, tenant: str) -> None:
        """Take note that a tenant's counter has fallen."""
        if tenant in self._order:
            self._order.update(tenant)

    def head(self) -> tuple[LaneKey, Waiter] | None:
        """The next waiter and its place among the heads of all lanes. Returns None if there is none."""
        begun = self._begun.first()
        if begun is not None:
            return _begun_key(begun.claim), begun
        smallest = self._order.peek()
        if smallest is None:
            return None
        key, tenant = smallest
        return key, self._tenants[tenant].first()

    def comes_first(self, claim: Claim) -> bool:
        """Whether a newcomer goes before all that wait here."""
        head = self.head()
        if head is None:
            return True
        if claim.has_begun:
            return _begun_key(claim) < head[0]
        if self.num_of(claim.tenant):
            return False
        return (False, self._counter(claim.tenant), claim.share.rank, claim.arrival) < head[0]

    def _key(self, tenant: str) -> LaneKey:
        waiter = self._tenants[tenant].first()
        return waiter.is_overdue, self._counter(tenant), waiter.claim.share.rank, waiter.claim.arrival


def _begun_key(claim: Claim) -> LaneKey:
    return False, float("-inf"), 0, claim.arrival
