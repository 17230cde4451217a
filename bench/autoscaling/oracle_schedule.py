"""Targets over time that were known beforehand."""

from collections.abc import Sequence

from penstock.autoscale.observation import Observation


class Schedule:
    """The rule that follows them. targets: one for each slot of `slot_s` from the beginning; the last one stays."""

    def __init__(self, targets: Sequence[int], slot_s: float) -> None:
        self._targets = targets
        self._slot_s = slot_s

    def __call__(self, observation: Observation, now: float) -> int:  # noqa: ARG002 (as of Rule)
        return self._targets[min(int(now / self._slot_s), len(self._targets) - 1)]
