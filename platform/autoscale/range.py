"""The numbers of replicas that a pool may have now, where something beside its load has a say in them. Pure.

The policy decides within two bounds; what else counts (whether anybody uses the pool, the clock, what others may have)
narrows them before it does, and names itself where the decision is its own. Invariant: a range is never empty; where
two disagree, the one that allows less wins.
"""

from typing import NamedTuple

import msgspec

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.policy import Decision, Reason


class Range(NamedTuple):
    """The bounds of a pool's replicas for now, and why they are what they are."""

    least: int
    most: int
    least_reason: Reason = Reason.BOUNDS
    most_reason: Reason = Reason.BOUNDS

    def at_least(self, least: int, reason: Reason) -> "Range":
        """The range with that lower bound, as far as the upper one lets it."""
        least = min(least, self.most)
        return self if least <= self.least else self._replace(least=least, least_reason=reason)

    def at_most(self, most: int, reason: Reason) -> "Range":
        """The range with that upper bound; the lower one gives way."""
        if most >= self.most:
            return self
        return self._replace(most=most, most_reason=reason, least=min(self.least, most))

    def explain(self, decision: Decision, before: int) -> Decision:
        """The decision with the reason of the bound that made it. before: the target that there was."""
        if decision.reason is Reason.BOUNDS:
            return decision._replace(reason=self.least_reason if decision.target > before else self.most_reason)
        if decision.reason is Reason.FULL:
            return decision._replace(reason=self.most_reason if self.most_reason is not Reason.BOUNDS else Reason.FULL)
        return decision


def limit(settings: AutoscaleConfig, allowed: Range) -> AutoscaleConfig:
    """The settings with the range's bounds in place of their own."""
    if (settings.min_replicas, settings.max_replicas) == (allowed.least, allowed.most):
        return settings
    return msgspec.structs.replace(settings, min_replicas=allowed.least, max_replicas=allowed.most)
