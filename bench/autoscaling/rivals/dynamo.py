"""A planner like NVIDIA Dynamo's, throughput mode of an aggregated deployment.

Source: docs/design_docs/planner_design.md of ai-dynamo/dynamo. Every interval the number of requests and their mean
lengths of the next one are predicted, from the last one ("constant") or along their trend (Holt's, in the place of
Kalman's local trend), and divided by what one replica was profiled to take within the targets. Here the profile is the
performance model of the simulated replicas, exact; `headroom` multiplies what is predicted. What Dynamo plans apart for
prefill and decode is one pool here.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench.autoscaling.replicas import ENGINE, MAX_ROWS, TPOT_S
from penstock.autoscale.observation import Observation
from penstock.perf.capacity import Bounds, Shape, capacity_rps
from penstock.wire.scaling import PoolFlow

LEVEL_GAIN, TREND_GAIN = 0.5, 0.3
"""Holt's smoothing of the level and of the trend, an interval each."""
BOUNDS = Bounds(MAX_ROWS, ENGINE.timed.num_blocks * ENGINE.block_size, TPOT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    interval_s: float = 180.0
    """Dynamo's default adjustment interval."""
    predictor: Literal["constant", "trend"] = "constant"
    headroom: float = 1.0


class Load(NamedTuple):
    """An interval's load."""

    rate: float
    """Requests a second."""
    prompt_tokens: float
    output_tokens: float


class Holt:
    """A series' next value by its level and trend."""

    def __init__(self) -> None:
        self._level: float | None = None
        self._trend = 0.0

    def predict(self, value: float) -> float:
        """The value after this one; never below 0."""
        if self._level is None:
            self._level = value
            return value
        level = LEVEL_GAIN * value + (1 - LEVEL_GAIN) * (self._level + self._trend)
        self._trend += TREND_GAIN * (level - self._level - self._trend)
        self._level = level
        return max(0.0, level + self._trend)


class Planner:
    """The rule, with what it remembers."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._begun_s: float | None = None
        self._before = PoolFlow()
        self._queued = 0
        self._rate = Holt()

    def __call__(self, observation: Observation, now: float) -> int:
        current = observation.serve_state.target
        if self._begun_s is None:
            self._begin(observation, now)
        assert self._begun_s is not None
        if now - self._begun_s < self._settings.interval_s:
            return current
        load = self._measure(observation, now - self._begun_s)
        self._begin(observation, now)
        if load is None:
            return current
        if self._settings.predictor == "trend":
            load = load._replace(rate=self._rate.predict(load.rate))
        return plan_replicas(load, self._settings.headroom)

    def _begin(self, observation: Observation, now: float) -> None:
        self._begun_s = now
        self._before = _sum(observation)
        self._queued = observation.num_queued

    def _measure(self, observation: Observation, span_s: float) -> Load | None:
        """The load of the interval; None where nothing came."""
        flow, before = _sum(observation), self._before
        started = flow.num_started - before.num_started
        ended = flow.num_ended - before.num_ended
        arrived = started + observation.num_queued - self._queued
        if started <= 0 or arrived <= 0:
            return None
        prompt = (flow.prefill_tokens - before.prefill_tokens) / started
        output = (flow.output_tokens - before.output_tokens) / max(1.0, (started + ended) / 2)
        return Load(arrived / span_s, prompt, output)


def plan_replicas(load: Load, headroom: float) -> int:
    """Number of replicas for a load, at least 1."""
    shape = Shape(load.prompt_tokens, 0.0, load.output_tokens)
    return max(1, math.ceil(headroom * load.rate / capacity_rps(ENGINE.timed.costs, shape, BOUNDS)))


def _sum(observation: Observation) -> PoolFlow:
    flows = list(observation.flows.values())
    return PoolFlow(
        sum(flow.num_started for flow in flows),
        sum(flow.num_ended for flow in flows),
        sum(flow.prefill_tokens for flow in flows),
        sum(flow.cached_tokens for flow in flows),
        sum(flow.output_tokens for flow in flows),
    )
