"""Number of replicas that a pool should have. Pure: `decide(settings, state, observation, now) -> (state, Decision)`.

Not the way there (the actuator), not which one goes (victim). Demand is token work: arrivals a second of the average
request over what one replica takes for good by the performance model, and the sequences that are there over the rows a
full replica has, whichever is more; divided by the target utilisation. Beside it, a queue whose first tokens are
predicted to come too late asks at once for what would have it served by the time a new replica is there, and for one
more each start-up time while that does not help, since a model can be wrong.

Up in one go, down one at a time: only after fewer were enough, with a margin, for the whole delay. Invariants: the
target is within the bounds; without news from gateways nothing changes, and on less than a window of it only for a
deadline; the same load never moves it both ways; more demand never means fewer replicas.

Decisions: docs/decisions/autoscaling.md
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.demand import (
    SHAPE_REQUESTS,
    AverageRequest,
    Demand,
    Sample,
    Total,
    extend_window,
    learn,
    measure_demand,
    remember_totals,
    sum_flows,
    take_sample,
)
from penstock.autoscale.observation import Observation, mean_costs
from penstock.perf.capacity import Bounds, Shape, capacity_rps, rows_at
from penstock.perf.model import Work, predict_ttft_s
from penstock.wire.frames import StepCosts

STALE_S = 5.0
"""Seconds after which what gateways report is not acted on any more."""
ROUNDING = 1e-6
"""Demand that exceeds a whole number of replicas by so little does not ask for another."""


class Reason(StrEnum):
    STEADY = "steady"
    """What there is, is right."""
    DEMAND = "demand"
    """More token work than the replicas should carry."""
    DEADLINE = "deadline"
    """What waits would get its first token too late."""
    STARTING = "starting"
    """More are needed, and on their way: the replicas asked for are not ready yet, or have had no time to help."""
    FULL = "full"
    """More are needed than the bounds allow."""
    IDLE = "idle"
    """Fewer have been enough for the whole delay."""
    COOLING = "cooling"
    """Fewer would be enough, but not for long enough yet."""
    DRAINING = "draining"
    """Fewer would be enough; the one before is still on its way out."""
    BOUNDS = "bounds"
    """The target lay outside of the bounds."""
    ARRIVAL = "arrival"
    """A request came for a pool that had no replica."""
    UNUSED = "unused"
    """No request came for `idle_s`: the pool goes to zero."""
    STALE = "stale"
    """No gateway has reported lately: nothing changes."""
    UNKNOWN = "unknown"
    """The load is not known for a window yet, or not how quick replicas are: only a deadline in danger changes
    anything."""


class Decision(NamedTuple):
    target: int
    reason: Reason
    demand: float = 0.0
    """Demand in replicas at full use."""
    capacity_rps: float = 0.0
    """Requests a second that one replica takes."""
    predicted_wait_s: float = 0.0
    """Seconds to the first token of a request that comes now."""


class State(NamedTuple):
    """What the policy remembers of a pool between two decisions."""

    samples: tuple[Sample, ...] = ()
    totals: Mapping[str, Total] = MappingProxyType({})
    """Each gateway's totals since its start."""
    known: AverageRequest = AverageRequest()
    costs: StepCosts | None = None
    low_since_s: float | None = None
    """Time since which fewer replicas would have been enough; None: they would not."""
    pressed_s: float = -math.inf
    """Time at which a queue last asked for more than the model did."""


class _Need(NamedTuple):
    demand: float
    latest_demand: float
    """Demand by the arrivals of the last moments, which is less sure."""
    capacity_rps: float
    wait_s: float


def decide(
    settings: AutoscaleConfig, state: State, observation: Observation, max_rows: int, now: float
) -> tuple[State, Decision]:
    """The state to decide with next time, and what to do now. max_rows: sequences that a replica runs at once. now:
    monotonic seconds."""
    bounded = min(max(observation.serve_state.target, settings.min_replicas), settings.max_replicas)
    if bounded != observation.serve_state.target:
        return state, Decision(bounded, Reason.BOUNDS)
    if observation.age_s > STALE_S:
        return state._replace(samples=(), low_since_s=None), Decision(bounded, Reason.STALE)
    state = _note_sample(settings, state, observation, now)
    if state.costs is None:
        return state, Decision(bounded, Reason.UNKNOWN)
    need = _estimate_need(
        settings, state.costs, measure_demand(state.samples, state.known.shape), observation, max_rows
    )
    pressed = _protect_deadline(settings, state, observation, need, now)
    if pressed is not None:
        return pressed
    if now - state.samples[0].at_s < settings.window_s:
        return state, _make_decision(bounded, Reason.UNKNOWN, need)
    return _plan(settings, state, observation, need, now)


def _note_sample(settings: AutoscaleConfig, state: State, observation: Observation, now: float) -> State:
    newest = take_sample(state.totals, observation, now)
    if state.totals:
        span_s = now - state.samples[-1].at_s if state.samples else 0.0
        known = learn(state.known, newest.flow, newest.num_running, newest.num_sampled, span_s)
    else:  # a policy that has just begun learns from all that has ever come, as if it were little
        known = learn(state.known, sum_flows(observation.flows.values()), newest.num_running, newest.num_sampled)
        known = known._replace(weight=min(known.weight, SHAPE_REQUESTS))
    return state._replace(
        samples=extend_window(state.samples, newest, settings.window_s),
        totals=remember_totals(state.totals, observation.flows, now),
        known=known,
        costs=mean_costs(observation.replicas) or state.costs,
    )


def _estimate_need(
    settings: AutoscaleConfig, costs: StepCosts, demand: Demand, observation: Observation, max_rows: int
) -> _Need:
    kv_tokens = min(
        (replica.load.total_blocks * replica.block_size for replica in observation.replicas), default=math.inf
    )
    capacity = capacity_rps(costs, demand.shape, Bounds(max_rows, kv_tokens, settings.tpot_target_s))
    if math.isinf(capacity):
        return _Need(0.0, 0.0, capacity, 0.0)
    rows = max(1.0, rows_at(costs, demand.shape, capacity))
    known = max(demand.rate / capacity, demand.num_present / rows)
    return _Need(
        known,
        max(known, demand.latest_rate / capacity),
        capacity,
        _predict_wait_s(costs, demand.shape, observation, capacity),
    )


def _predict_wait_s(costs: StepCosts, shape: Shape, observation: Observation, capacity: float) -> float:
    """Seconds to the first token of a request that comes now: behind the queue at the pace of full replicas, then on
    the least busy one."""
    if not observation.num_serving:
        return math.inf if observation.num_queued else 0.0
    loads = [replica.load for replica in observation.replicas if not replica.load.is_draining]
    works = [
        (
            Work(load.num_running, 0, load.prefill_tokens_outstanding, load.kv_tokens, load.num_sampled),
            load.max_batched_tokens,
        )
        for load in loads
    ]
    ttft_s = min(
        predict_ttft_s(costs, work, round(shape.prefill_tokens), round(shape.cached_tokens), budget)
        for work, budget in works
    )
    return max(observation.oldest_wait_s, observation.num_waiting / (observation.num_serving * capacity)) + (
        ttft_s if observation.num_waiting else 0.0
    )


def _protect_deadline(
    settings: AutoscaleConfig, state: State, observation: Observation, need: _Need, now: float
) -> tuple[State, Decision] | None:
    """The fast path, for a queue whose first tokens would come too late. Returns None if no deadline is in danger."""
    current = observation.serve_state.target
    if need.wait_s <= settings.ttft_target_s or not observation.num_waiting:
        return None
    backlog = observation.num_waiting / (need.capacity_rps * (settings.start_s + settings.ttft_target_s))
    wanted = max(
        _count_replicas(need.latest_demand, settings.target_utilisation),
        _count_replicas(need.latest_demand + backlog, 1.0),
    )
    is_settled = observation.num_serving >= current and now - state.pressed_s >= settings.start_s
    if is_settled and wanted <= current:
        wanted = current + 1
    target = min(max(wanted, current), settings.max_replicas)
    state = state._replace(low_since_s=None, pressed_s=now if target > current else state.pressed_s)
    if target > current:
        return state, _make_decision(target, Reason.DEADLINE, need)
    return state, _make_decision(target, Reason.FULL if wanted > current else Reason.STARTING, need)


def _plan(
    settings: AutoscaleConfig, state: State, observation: Observation, need: _Need, now: float
) -> tuple[State, Decision]:
    current = observation.serve_state.target
    wanted = _count_replicas(need.demand, settings.target_utilisation)
    if wanted > current:
        target = min(wanted, settings.max_replicas)
        return state._replace(low_since_s=None), _make_decision(
            target, Reason.DEMAND if target > current else Reason.FULL, need
        )
    enough = max(
        _count_replicas(need.demand, settings.target_utilisation * (1 - settings.scale_down_margin)),
        settings.min_replicas,
    )
    if enough >= current:
        return state._replace(low_since_s=None), _make_decision(current, Reason.STEADY, need)
    since_s = now if state.low_since_s is None else state.low_since_s
    if now - since_s < settings.scale_down_delay_s:
        return state._replace(low_since_s=since_s), _make_decision(current, Reason.COOLING, need)
    if observation.serve_state.num_stopping:
        return state._replace(low_since_s=since_s), _make_decision(current, Reason.DRAINING, need)
    return state._replace(low_since_s=now), _make_decision(current - 1, Reason.IDLE, need)


def _count_replicas(demand: float, utilisation: float) -> int:
    return math.ceil(demand / utilisation - ROUNDING)


def _make_decision(target: int, reason: Reason, need: _Need) -> Decision:
    return Decision(target, reason, need.demand, need.capacity_rps, need.wait_s)
