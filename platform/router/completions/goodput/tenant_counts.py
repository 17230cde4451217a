"""Outcomes by tenant, for the busiest ones by name and for all others together.

Invariant: a series never goes backwards. A tenant that loses its label loses its series, and one that gets it back goes
on where it stood; what comes meanwhile counts under OTHER, so each request counts once. Of those that lost theirs the
latest MAX_REMEMBERED are remembered; one that was forgotten begins at 0, as after the gateway's restart, which rate()
and increase() of Prometheus know.
"""

from collections import Counter as Tally

from prometheus_client import Counter

from penstock.router.completions.goodput.busiest import OTHER, BusiestTenants
from penstock.router.completions.goodput.outcome import Outcome

NUM_NAMED = 20
"""Tenants of one gateway that have series of their own."""
MAX_REMEMBERED = 1000
"""Tenants without a label whose counts are kept for the time when they get it again."""


class TenantCounts:
    """The metric of tenants' outcomes. counter: its instrument, with labels for tenant and outcome."""

    def __init__(self, counter: Counter, num_named: int = NUM_NAMED) -> None:
        self._counter = counter
        self._busiest = BusiestTenants(num_named)
        self._named: dict[str, Tally[Outcome]] = {}
        """Counts of the tenants that have a label."""
        self._series: dict[tuple[str, Outcome], Counter] = {}
        """The counter of each label that is shown, looked up once."""
        self._lost: dict[str, Tally[Outcome]] = {}
        """Counts of tenants that had one, the latest last."""

    def record(self, tenant: str, outcome: Outcome, now: float) -> None:
        """Count a request that is over. now: monotonic, seconds."""
        label = self._busiest.count(tenant, now)
        if label != OTHER:
            if label not in self._named:
                self._follow(self._busiest.named)
            self._named[label][outcome] += 1
        series = self._series.get((label, outcome))
        if series is None:
            series = self._series[label, outcome] = self._counter.labels(label, outcome.value)
        series.inc()

    def _follow(self, named: frozenset[str]) -> None:
        """Take the series of tenants that have lost their label away, and set up those of the ones that have it."""
        for tenant in self._named.keys() - named:
            self._lost[tenant] = self._named.pop(tenant)
            for outcome in Outcome:
                self._counter.remove(tenant, outcome.value)
                self._series.pop((tenant, outcome), None)
        for tenant in named - self._named.keys():
            self._named[tenant] = self._lost.pop(tenant, Tally())
            for outcome in Outcome:
                self._counter.labels(tenant, outcome.value).inc(self._named[tenant][outcome])
        while len(self._lost) > MAX_REMEMBERED:
            del self._lost[next(iter(self._lost))]
