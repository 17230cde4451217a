"""Kubernetes' horizontal pod autoscaler, by itself on requests in flight or fed by KEDA with the length of a queue.

Sources: Kubernetes' documentation "Horizontal Pod Autoscaling", v1.33 (algorithm details, default behaviour), and
KEDA's "Scaling Deployments" (v2.17): an external metric of the type AverageValue. `ceil(total / target)`, unless the
ratio to what is there is within the tolerance; down to the highest recommendation of the stabilisation window; up at
most by 100 % or 4 replicas in 15 s, whichever is more. A quirk that is theirs: an empty queue says nothing about how
many replicas keep it empty.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from penstock.autoscale.observation import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAutoscalerSettings:
    """Settings of the pod autoscaler, with Kubernetes' defaults but for the metric."""

    metric: Literal["queue", "in_flight"]
    """queue: requests that wait, in gateways and on replicas. in_flight: those that run, too."""
    target: float
    """Value of the metric for each replica."""
    sync_s: float = 15.0
    """Seconds between two decisions; KEDA's own polling, every 30 s, is for the way from and to zero."""
    tolerance: float = 0.1
    stabilisation_s: float = 300.0
    up_percent: float = 100.0
    up_pods: int = 4


class PodAutoscaler:
    """The rule, with what it remembers."""

    def __init__(self, settings: PodAutoscalerSettings) -> None:
        self._settings = settings
        self._recommended: deque[tuple[float, int]] = deque()
        self._next_s = -math.inf
        self._target = 0

    def __call__(self, observation: Observation, now: float) -> int:
        current = observation.serve_state.target
        if now < self._next_s:
            return current
        self._next_s = now + self._settings.sync_s
        total = observation.num_waiting
        if self._settings.metric == "in_flight":
            total = observation.num_queued + observation.num_present
        return self._limit(recommend(self._settings, total, current), current, now)

    def _limit(self, recommended: int, current: int, now: float) -> int:
        """The recommendation within the default behaviour of both directions."""
        settings = self._settings
        self._recommended.append((now, recommended))
        while now - self._recommended[0][0] > settings.stabilisation_s:
            self._recommended.popleft()
        if recommended >= current:
            most = max(current + settings.up_pods, math.ceil(current * (1 + settings.up_percent / 100)))
            return min(recommended, most)
        return min(current, max(count for _, count in self._recommended))


def recommend(settings: PodAutoscalerSettings, total: float, current: int) -> int:
    """Number of replicas for a metric's total, at least 1. current: replicas that were asked for."""
    ratio = total / (settings.target * max(1, current))
    if abs(ratio - 1) <= settings.tolerance:
        return current
    return max(1, math.ceil(total / settings.target))
