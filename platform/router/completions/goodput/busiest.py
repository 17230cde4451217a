"""The tenants that have a label of their own in metrics: the busiest of the latest time. Pure.

All others count under OTHER. Counts by name are kept for a bounded number of names by the Space-Saving rule (Metwally,
Agrawal, El Abbadi, "Efficient computation of frequent and top-k elements in data streams", 2005) and halved at each
review, so that yesterday's load fades. Invariants: at most `num_named` tenants have a label at a time; one loses it
only at a review, to one that is twice as busy; memory is bounded whatever ids come.
"""

OTHER = "other"
"""Label of all tenants without one; a tenant of that id has none of its own."""
REVIEW_S = 300.0
"""Time between two reviews of who has a label, seconds."""
WATCHED_PER_NAME = 8
"""Tenants whose requests are counted for each label there is."""
MARGIN = 2.0
"""Factor by which a tenant must be busier than the one whose label it gets."""


class BusiestTenants:
    """Labels of tenants. num_named: labels there are, beside OTHER."""

    def __init__(self, num_named: int) -> None:
        self._num_named = num_named
        self._named: set[str] = set()
        self._counts: dict[str, float] = {}
        self._reviewed_s: float | None = None

    def count(self, tenant: str, now: float) -> str:
        """Count a request; returns its tenant's label. now: monotonic, seconds. Labels change in here only, so `named`
        differs after a call at most."""
        self._watch(tenant)
        if self._reviewed_s is None:
            self._reviewed_s = now
        if now - self._reviewed_s >= REVIEW_S:
            self._review()
            self._reviewed_s = now
        if tenant not in self._named and tenant != OTHER and len(self._named) < self._num_named:
            self._named.add(tenant)
        return tenant if tenant in self._named else OTHER

    @property
    def named(self) -> frozenset[str]:
        """Tenants that have a label now."""
        return frozenset(self._named)

    def _watch(self, tenant: str) -> None:
        if tenant in self._counts or len(self._counts) < WATCHED_PER_NAME * self._num_named:
            self._counts[tenant] = self._counts.get(tenant, 0.0) + 1.0
            return
        least = min(self._counts, key=lambda name: self._counts[name])
        self._counts[tenant] = self._counts.pop(least) + 1.0

    def _review(self) -> None:
        others = sorted(
            (name for name in self._counts if name not in self._named and name != OTHER),
            key=lambda name: self._counts[name],
            reverse=True,
        )
        quietest = sorted(self._named, key=lambda name: self._counts.get(name, 0.0))
        for busy, quiet in zip(others, quietest, strict=False):
            if self._counts[busy] <= MARGIN * self._counts.get(quiet, 0.0):
                break
            self._named.remove(quiet)
            self._named.add(busy)
        self._counts = {name: count / 2 for name, count in self._counts.items()}
