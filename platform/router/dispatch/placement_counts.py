"""Metrics of placements: attempts by pool and kind, decisions by tier and reason."""

from prometheus_client import Counter

from penstock.base.metrics import Metrics
from penstock.router.routing.request import Receipt
from penstock.router.routing.tiers import TierReason


class PlacementCounts:
    """The counters, kept by their labels: looking a label up costs more than counting."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._attempts: dict[tuple[str, str], Counter] = {}
        self._tier_decisions: dict[tuple[str, str, str], Counter] = {}

    def count(self, receipt: Receipt, reason: TierReason, *, is_resumed: bool) -> None:
        """Count the receipt's latest attempt."""
        kind = "first" if receipt.attempts == 1 else "resume" if is_resumed else "retry"
        attempts = self._attempts.get((receipt.pool, kind))
        if attempts is None:
            attempts = self._attempts[receipt.pool, kind] = self._metrics.route_attempts.labels(receipt.pool, kind)
        self._metrics.notes.count(attempts)
        labels = receipt.pool, receipt.tier, reason.value
        decisions = self._tier_decisions.get(labels)
        if decisions is None:
            decisions = self._tier_decisions[labels] = self._metrics.tier_decisions.labels(*labels)
        self._metrics.notes.count(decisions)
