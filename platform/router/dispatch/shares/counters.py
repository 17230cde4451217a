"""Virtual token counters: who has had how much of the replicas, tenant by tenant (VTC, arXiv 2401.00588). Pure: no
clock, no I/O.

Each token that is computed for a tenant raises its counter by its cost divided by the tenant's weight, and whoever
waits with the smallest counter goes next. A request that is placed counts with what it is expected to cost, and as its
tokens come with what it has really cost; so a counter may fall. A tenant that begins to wait is lifted to the smallest
counter, expectations left out, of those that wait; where nobody waits, to that of the tenant that waited last. So
nobody saves up for later.

The bound. For a tenant i let U(i) be the most that its sequences under way at once can cost, expected or real,
whichever is more, divided by its weight: places x cost of a sequence / weight. Of two tenants f and g that wait at this
gateway throughout an interval, whatever its length and whatever others do:

    | W(f) - W(g) |  <=  2 * (U(f) + U(g))

where W is the cost of the tokens that they got in it, divided by their weights. (When f is placed its counter is the
smaller one, in which what g has really had may lag by U(g); until f is placed again it gets U(f) at the most. So the
difference of what they had never leaves a range of U(f) + U(g) to either side.) More replicas have more places, and so
widen U.

With several gateways a counter holds what all have given, but what the others gave is known only after an exchange
(`penstock.tenancy.service_exchange`). If L(i) is the most that the others can give to i, divided by its weight, in the
time from one exchange to the next but one, the bound for tenants that wait at the same gateways is

    | W(f) - W(g) |  <=  2 * (U(f) + L(f) + U(g) + L(g))

with the places at all replicas, of all gateways, in U. A gateway where only one of them waits gives its places to that
one, and the other is made up for it where it waits, as far as there are places.
"""

from collections.abc import Iterable, Mapping

from penstock.router.dispatch.shares.lazy_heap import LazyHeap
from penstock.tenancy.share import Service

PROMPT_COST = 1.0
"""Cost of a prompt token that has to be computed."""
CACHED_COST = 0.02
"""Cost of a prompt token whose KV is in the replica's cache: it is read, not computed."""
OUTPUT_COST = 2.0
"""Cost of an output token, as in the paper: a decode step reads all the weights for few tokens."""
_NOTHING = 1e-6
"""Expectations below it are rounding errors of those that have come."""
MAX_TENANTS = 8192
"""Tenants whose counters are kept though they don't wait."""


def cost_of(num_tokens: int, num_cached_tokens: int, num_output_tokens: float) -> float:
    """Cost of a sequence. num_tokens: those of its prompt, the cached ones included."""
    cached = min(num_cached_tokens, num_tokens)
    return (num_tokens - cached) * PROMPT_COST + cached * CACHED_COST + num_output_tokens * OUTPUT_COST


class VirtualCounters:
    """The counters of all tenants, at one gateway."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        """What each tenant has really had, divided by its weight, plus lifts."""
        self._expected: dict[str, float] = {}
        """What its sequences under way are expected to cost besides."""
        self._waiting: set[str] = set()
        """Tenants of which a request waits here."""
        self._elsewhere: frozenset[str] = frozenset()
        """Tenants of which a request waits at another gateway."""
        self._active: LazyHeap[tuple[float]] = LazyHeap(lambda tenant: (self._had[tenant],))
        """Tenants that wait, here or elsewhere."""
        self._last = 0.0
        """Counter of the last tenant that ceased to wait, where its own entry is gone."""
        self._last_tenant = ""
        self._lowered: set[str] = set()
        self._given: dict[str, float] = {}
        """What this gateway has given, for the others."""

    @property
    def num_tenants(self) -> int:
        """Tenants whose counters are kept."""
        return len(self._had)

    def counter(self, tenant: str) -> float:
        """Cost divided by weight, expectations and lifts included."""
        return self._had.get(tenant, 0.0) + self._expected.get(tenant, 0.0)

    @property
    def floor(self) -> float:
        """The counter to which a tenant is lifted that begins to wait now."""
        smallest = self._active.peek()
        return self._had.get(self._last_tenant, self._last) if smallest is None else smallest[0][0]

    def enter(self, tenant: str) -> None:
        """The first request of a tenant begins to wait."""
        self._lift(tenant)
        self._waiting.add(tenant)

    def leave(self, tenant: str) -> None:
        """No request of a tenant waits any more."""
        self._waiting.discard(tenant)
        self._retire(tenant)
        if not self._waiting:
            self._lowered.clear()  # nobody's place in the queue hangs on it

    def charge(self, tenant: str, cost: float, rate: float) -> None:
        """Charge a real cost, or give back a negative one. rate: the tenant's weight."""
        self._add(tenant, cost / rate)
        self._given[tenant] = self._given.get(tenant, 0.0) + cost / rate

    def expect(self, tenant: str, cost: float, rate: float) -> None:
        """Count a cost that is still to come, or a negative one: it has come, or will not."""
        self._expected[tenant] = self._expected.get(tenant, 0.0) + cost / rate
        if cost < 0:
            self._lowered.add(tenant)
            if self._expected[tenant] <= _NOTHING:
                del self._expected[tenant]

    def take_lowered(self) -> Iterable[str]:
        """Tenants whose counters have fallen since the last call, as far as anybody waited since."""
        lowered, self._lowered = self._lowered, set()
        return lowered

    # other gateways

    @property
    def waiting_elsewhere(self) -> frozenset[str]:
        """Tenants of which a request waits at another gateway, as far as is known."""
        return self._elsewhere

    def given(self) -> dict[str, Service]:
        """What this gateway has given, by tenant; those that wait with nothing given included."""
        return {
            tenant: Service(self._given.get(tenant, 0.0), tenant in self._waiting)
            for tenant in self._given.keys() | self._waiting
        }

    def forget_given(self, tenants: Iterable[str]) -> None:
        """Begin anew with what was given to these tenants."""
        for tenant in tenants:
            self._given.pop(tenant, None)

    def take_elsewhere(self, costs: Mapping[str, float], waiting: Iterable[str]) -> None:
        """Take what other gateways have given since the last call, divided by weight, and who waits there now."""
        before, self._elsewhere = self._elsewhere, frozenset()
        now = frozenset(waiting)
        for tenant in before - now:
            self._retire(tenant)
        self._elsewhere = before & now
        for tenant, cost in costs.items():
            self._add(tenant, cost)
        for tenant in now - before:
            self._lift(tenant)
        self._elsewhere = now
        self._forget()

    def _add(self, tenant: str, share: float) -> None:
        self._had[tenant] = self._had.get(tenant, 0.0) + share
        if share < 0:
            self._lowered.add(tenant)
            if tenant in self._active:
                self._active.update(tenant)

    def _lift(self, tenant: str) -> None:
        if tenant not in self._active:
            self._had[tenant] = max(self._had.get(tenant, 0.0), self.floor)
            self._active.update(tenant)

    def _retire(self, tenant: str) -> None:
        if tenant in self._active and tenant not in self._waiting and tenant not in self._elsewhere:
            self._active.remove(tenant)
            self._last_tenant = tenant

    def _forget(self) -> None:
        """Drop counters of tenants that don't wait, the smallest first: those would be lifted anyway."""
        excess = len(self._had) - len(self._active) - MAX_TENANTS
        if excess <= 0:
            return
        self._last = self._had.get(self._last_tenant, self._last)
        idle = sorted((had, tenant) for tenant, had in self._had.items() if self._is_idle(tenant))
        for _, tenant in idle[:excess]:
            del self._had[tenant]

    def _is_idle(self, tenant: str) -> bool:
        return tenant not in self._active and tenant not in self._expected
