"""Intended times of the open loop: a unit process (mean gap 1) whose time is stretched so that its rate is the
scenario's, exactly, at every moment.

Time-rescaling: the k-th arrival is where the integral of the rate reaches the k-th time of the unit process. The rate
is piecewise linear, so its integral is inverted in closed form; no thinning, no time steps. Lazy, and without an end
unless the rate falls to 0 for good.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock_loadtest.scenario import Arrivals


class Segment(NamedTuple):
    """A part of the rate's profile: a straight line from `rate` to `end_rate` (requests per second) within `length_s`;
    in the last part, which has no end, both are equal."""

    start_s: float
    length_s: float
    rate: float
    end_rate: float

    @property
    def requests(self) -> float:
        """Expected number of arrivals in it."""
        mean = (self.rate + self.end_rate) / 2
        return mean * self.length_s if mean > 0 else 0.0

    def time_of(self, requests: float) -> float:
        """Time at which `requests` (fewer than all) have arrived, in expectation: the root of rate x t + slope x t^2 /
        2 = requests."""
        slope = (self.end_rate - self.rate) / self.length_s
        end_rate = math.sqrt(max(0.0, self.rate**2 + 2 * slope * requests))
        passed_s = 2 * requests / (self.rate + end_rate) if requests > 0 else 0.0
        return self.start_s + min(passed_s, self.length_s)


def draw_arrival_times(arrivals: Arrivals, duration_s: float | None, rng: np.random.Generator) -> Iterator[float]:
    """Seconds after the run's start, ascending, not ended by the duration: that only places step, ramp and spike
    where the scenario does not."""
    return _rescale(draw_unit_times(arrivals, rng), make_rate_profile(arrivals, duration_s))


def draw_unit_times(arrivals: Arrivals, rng: np.random.Generator) -> Iterator[float]:
    """Arrivals at rate 1 from the first moment on: random processes begin in equilibrium, not with an arrival at 0;
    `constant` is 0, 1, 2, ..."""
    if arrivals.process == "constant":
        count = 0
        while True:
            yield float(count)
            count += 1
    if arrivals.process == "gamma":
        yield from _gamma_times(arrivals.cv, rng)
    time = 0.0
    while True:
        time += rng.standard_exponential()
        yield time


def make_rate_profile(arrivals: Arrivals, duration_s: float | None) -> list[Segment]:
    """The rate over time, from 0 without end."""
    rate, to_rate = arrivals.rate, arrivals.to_rate
    if arrivals.process == "ramp":
        length_s = _given(arrivals.length_s, duration_s)
        return _segments((length_s, rate, _given(to_rate)), (math.inf, _given(to_rate), _given(to_rate)))
    if arrivals.process == "step":
        at_s = _given(arrivals.at_s, duration_s, 3)
        return _segments((at_s, rate, rate), (math.inf, _given(to_rate), _given(to_rate)))
    if arrivals.process == "spike":
        at_s, length_s = _given(arrivals.at_s, duration_s, 3), _given(arrivals.length_s, duration_s, 6)
        return _segments((at_s, rate, rate), (length_s, _given(to_rate), _given(to_rate)), (math.inf, rate, rate))
    return _segments((math.inf, rate, rate))


def _gamma_times(cv: float, rng: np.random.Generator) -> Iterator[float]:
    """A renewal process with Gamma gaps of mean 1. The first gap is what an observer who comes at any moment has still
    to wait: a uniform part of a gap drawn in proportion to its length."""
    shape, scale = cv**-2, cv**2
    time = rng.random() * rng.gamma(shape + 1, scale)
    while True:
        yield time
        time += rng.gamma(shape, scale)


def _rescale(times: Iterator[float], profile: list[Segment]) -> Iterator[float]:
    segments = iter(profile)
    segment, passed = next(segments), 0.0  # arrivals expected before the segment
    for time in times:
        while time - passed >= segment.requests:
            passed += segment.requests
            following = next(segments, None)
            if following is None:
                return
            segment = following
        yield segment.time_of(time - passed)


def _segments(*parts: tuple[float, float, float]) -> list[Segment]:
    """Segments from (length_s, rate, end_rate), one after the other; empty ones are left out."""
    segments, start_s = [], 0.0
    for length_s, rate, end_rate in parts:
        if length_s > 0:
            segments.append(Segment(start_s, length_s, rate, end_rate))
        start_s += length_s
    return segments


def _given(value: float | None, duration_s: float | None = None, part: int = 1) -> float:
    """The setting, or its default: a part of the duration. Scenario refuses to be made with neither."""
    if value is not None:
        return value
    assert duration_s is not None, "step, ramp and spike need their times or a duration"
    return duration_s / part
