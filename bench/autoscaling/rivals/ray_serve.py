"""Ray Serve's autoscaler: `replica_queue_length_autoscaling_policy` with its factors and delays, from
ray/serve/autoscaling_policy.py of Ray 2.60 (Apache-2.0); a test holds it against the installed Ray.

Requests under way, queued ones included, are averaged over `look_back_s`; replicas send them every `push_s`. Delays
begin when the desired number first differs in one direction without a break.
"""

import math
from collections import deque
from dataclasses import dataclass

from penstock.autoscale.observation import Observation

_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RayServeSettings:
    """Ray Serve's `AutoscalingConfig`, with its defaults."""

    target_ongoing: float = 2.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0
    look_back_s: float = 30.0
    push_s: float = 10.0


class RayServe:
    """The rule, with what it remembers."""

    def __init__(self, settings: RayServeSettings) -> None:
        self._settings = settings
        self._delay = Delay(settings)
        self._samples: deque[tuple[float, int]] = deque()
        self._pushed: tuple[float, float] | None = None
        """Time and average of the last push."""

    def __call__(self, observation: Observation, now: float) -> int:
        settings, state = self._settings, observation.serve_state
        self._samples.append((now, observation.num_queued + observation.num_present))
        while now - self._samples[0][0] > settings.look_back_s:
            self._samples.popleft()
        if self._pushed is None or now - self._pushed[0] >= settings.push_s:
            self._pushed = now, sum(count for _, count in self._samples) / len(self._samples)
        desired = scale(settings, self._pushed[1] / settings.target_ongoing, len(state.running))
        return self._delay.apply(desired, state.target, now)


class Delay:
    """Holds a change back until it was wanted for the whole delay of its direction."""

    def __init__(self, settings: RayServeSettings) -> None:
        self._settings = settings
        self._is_up = False
        self._since_s: float | None = None

    def apply(self, desired: int, target: int, now: float) -> int:
        """The target from now on."""
        if desired == target:
            self._since_s = None
            return target
        is_up = desired > target
        if self._since_s is None or is_up != self._is_up:
            self._is_up, self._since_s = is_up, now
        delay_s = self._settings.upscale_delay_s if is_up else self._settings.downscale_delay_s
        if now - self._since_s + _ROUNDING_S < delay_s:
            return target
        self._since_s = None
        return max(1, desired)


def scale(settings: RayServeSettings, desired: float, current: int) -> int:
    """The desired number of replicas behind the factors. current: replicas that run."""
    if current == 0:
        return math.ceil(desired)
    factor = settings.upscaling_factor if desired > current else settings.downscaling_factor
    scaled = math.ceil(current + factor * (desired - current))
    return scaled - 1 if scaled == current and math.ceil(desired) < current else scaled
