"""Number of replicas that a pool should have. Pure: `decide(settings, state, observation, now) -> (state, Decision)`.

Not the way there (the actuator), not which one goes (victim), not how much is needed (need). Demand, in replicas at
full use, is divided by the target utilisation, or has room for gusts where that takes more (gusts). Beside it, first
tokens that are predicted to come too late ask at once for what would have the backlog served by the time a new replica
is there, and for one more each start-up time in which that did not halve the backlog, since a model can be wrong.

Up in one go, and down in one go: to the most that was enough within the delay, with a margin, and never below what the
worst burst within `burst_floor` needed. What only a rush asked for, beyond its demand, goes three start-up times later.
Invariants: the target is within the bounds; without news from gateways it is held, and on less than a window of it only
a deadline changes it; the same load never moves it both ways; more demand never means fewer replicas.

Decisions: docs/decisions/autoscaling.md
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.demand import (
    RECENT_S,
    SHAPE_REQUESTS,
    AverageRequest,
    Sample,
    Total,
    extend_window,
    learn,
    remember_totals,
    sum_flows,
    take_sample,
)
from penstock.autoscale.gusts import Gusts, gust_rate, note_gust
from penstock.autoscale.need import Need, count_used, estimate_need, measure_capacity, prompt_token_s
from penstock.autoscale.observation import Observation, mean_costs
from penstock.autoscale.peaks import Peak, highest, note_peak
from penstock.autoscale.starts import Starts, expected_start_s, note_starts
from penstock.wire.frames import StepCosts

STALE_S = 5.0
"""Seconds after which what gateways report is not acted on any more."""
ROUNDING = 1e-6
"""Demand that exceeds a whole number of replicas by so little does not ask for another."""
RECENT_PART, MOST_RECENT_S = 1 / 8, 10.0
"""The latest arrivals are those of a part of a start-up time, and of so many seconds at the most. In fewer, requests
that come together look like a step of the load; more would cost more of the time that a start takes anyway."""
HELPED = 0.5
"""Part of a backlog that may be left after a start-up time, or else one replica more is asked for."""
RUSH_STARTS = 3.0
"""Start-up times behind the last danger to a deadline for which replicas stay that only the rush asked for."""
LATE_SHARE = 0.2
"""Late replicas, as a part of those that serve, beyond which what waits is put down to them."""


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
    """Fewer would be enough, but not for long enough yet: for the delay, or behind a rush for RUSH_STARTS."""
    FLOOR = "floor"
    """Fewer would be enough, but not for a burst like the worst one that is remembered."""
    BOUNDS = "bounds"
    """The target lay outside of the bounds."""
    ARRIVAL = "arrival"
    """A request came for a pool that had no replica."""
    UNUSED = "unused"
    """No request came for `idle_s`: the pool goes to zero."""
    SCHEDULE = "schedule"
    """A window of `schedules` has bounds of its own."""
    BUDGET = "budget"
    """Pools that come first take the GPUs of the budget."""
    SHORTAGE = "shortage"
    """There is no room for more: no node, or a quota is used up."""
    RESTORED = "restored"
    """Serve has less than an autoscaler before this one had decided on."""
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
    gust: float = 0.0
    """Replicas for what comes beyond the mean, so much as the target for the first token asks for (`gusts`)."""


class State(NamedTuple):
    """What the policy remembers of a pool between two decisions."""

    samples: tuple[Sample, ...] = ()
    totals: Mapping[str, Total] = MappingProxyType({})
    """Each gateway's totals since its start."""
    known: AverageRequest = AverageRequest()
    costs: StepCosts | None = None
    enough: tuple[Peak, ...] = ()
    """Replicas that were enough, within the delay."""
    known_s: float | None = None
    """Time since which what is enough has been known without a gap."""
    bursts: tuple[Peak, ...] = ()
    """Replicas that bursts needed, within the time for which they are remembered."""
    starts: Starts = Starts()
    gusts: Gusts = Gusts()
    pressed_s: float = -math.inf
    """Time at which a deadline was last in danger, or would have been without the floor for bursts."""
    raised_s: float = -math.inf
    """Time at which a deadline in danger last raised the target, or what was there was last found to help."""
    raised_backlog_s: float = 0.0
    """The backlog at that time: seconds for which it would keep one replica busy."""
    rush_s: float | None = None
    """Time since which a deadline has been in danger; None while none is."""


def decide(
    settings: AutoscaleConfig, state: State, observation: Observation, max_rows: int, now: float
) -> tuple[State, Decision]:
    """The state to decide with next time, and what to do now. max_rows: sequences that a replica runs at once. now:
    monotonic seconds."""
    if state.starts.seen is None and observation.serve_state.num_starting:
        # somebody raised the target just before: what is on its way gets time to help
        state = state._replace(raised_s=max(state.raised_s, now))
    state = state._replace(starts=note_starts(state.starts, observation.serve_state, now))
    bounded = min(max(observation.serve_state.target, settings.min_replicas), settings.max_replicas)
    if bounded != observation.serve_state.target:
        return state._replace(rush_s=None), Decision(bounded, Reason.BOUNDS)
    if observation.age_s > STALE_S:
        return state._replace(samples=(), rush_s=None), Decision(bounded, Reason.STALE)
    state, need = _estimate(settings, state, observation, max_rows, now)
    if need is None:
        return state._replace(rush_s=None), Decision(bounded, Reason.UNKNOWN)
    pressed = _protect_deadline(settings, state, observation, need, now)
    if pressed is not None:
        return pressed
    state = state._replace(rush_s=None)
    if now - state.samples[0].at_s < settings.window_s:
        return state, _make_decision(bounded, Reason.UNKNOWN, need)
    return _plan(settings, state, observation, need, now)


def _estimate(
    settings: AutoscaleConfig, state: State, observation: Observation, max_rows: int, now: float
) -> tuple[State, Need | None]:
    """The state with the newest sample, and the need by it; None where no replica has measured its costs."""
    newest = take_sample(state.totals, observation, now)
    if state.totals:
        span_s = now - state.samples[-1].at_s if state.samples else 0.0
        known = learn(state.known, newest.flow, newest.num_running, newest.num_sampled, span_s)
    else:  # a policy that has just begun learns from all that has ever come, as if it were little
        known = learn(state.known, sum_flows(observation.flows.values()), newest.num_running, newest.num_sampled)
        known = known._replace(weight=min(known.weight, SHAPE_REQUESTS))
    costs = mean_costs(observation.replicas) or state.costs
    totals = remember_totals(state.totals, observation.flows, now, observation.queues)
    state = state._replace(totals=totals, known=known, costs=costs)
    if costs is None:
        return state._replace(samples=extend_window(state.samples, newest, settings.window_s)), None
    capacity = measure_capacity(settings, costs, known.shape, observation, max_rows)
    newest = newest._replace(used=count_used(observation, known.shape, capacity))
    samples = extend_window(state.samples, newest, settings.window_s)
    gusts = note_gust(state.gusts, observation.flows, samples, known.shape.prefill_tokens, settings.window_s)
    gust = gust_rate(gusts, settings.window_s, settings.ttft_target_s) * prompt_token_s(costs, known.shape)
    state = state._replace(samples=samples, gusts=gusts)
    recent_s = _count_recent_s(settings, state)
    if state.rush_s is not None:  # the longer it lasts, the better its own arrivals tell the rate
        recent_s = max(recent_s, now - state.rush_s)
    return state, estimate_need(costs, known.shape, capacity, samples, observation, gust, recent_s)


def _count_recent_s(settings: AutoscaleConfig, state: State) -> float:
    """Seconds of the latest arrivals."""
    start_s = expected_start_s(state.starts.took_s, settings.start_s)
    return min(MOST_RECENT_S, max(RECENT_S, RECENT_PART * start_s))


def _protect_deadline(
    settings: AutoscaleConfig, state: State, observation: Observation, need: Need, now: float
) -> tuple[State, Decision] | None:
    """The fast path, for first tokens that would come too late. Returns None if no deadline is in danger."""
    current = observation.serve_state.target
    if need.wait_s <= settings.ttft_target_s or not need.backlog_s:
        return None
    start_s = expected_start_s(state.starts.took_s, settings.start_s)
    backlog = need.backlog_s / (start_s + settings.ttft_target_s)
    if state.starts.num_late(start_s, now) > LATE_SHARE * observation.num_serving:
        backlog = 0.0  # it grows because those are missing, and more that are asked for would be missing too
    wanted = max(
        _count_wanted(settings, need),
        _count_replicas(need.latest_demand + backlog, 1.0),
    )
    is_one_more = False
    if observation.num_serving >= current and now - state.raised_s >= start_s and wanted <= current:
        if need.backlog_s > HELPED * state.raised_backlog_s:
            wanted, is_one_more = current + 1, True
        else:
            state = state._replace(raised_s=now, raised_backlog_s=need.backlog_s)
    target = min(max(wanted, current), settings.max_replicas)
    rush_s = now if state.rush_s is None else state.rush_s
    state = _note_burst(settings, state._replace(pressed_s=now, rush_s=rush_s), need, now)
    # what is asked for only to have the backlog gone by then is not kept for the delay too; one more, because the model
    # is wrong, is
    floor = highest(state.bursts, now, settings.burst_floor_s)
    enough = target if is_one_more else min(target, max(floor, _add_standby(settings, _count_enough(settings, need))))
    state = _note_enough(settings, state, enough, now)
    if target > current:
        state = state._replace(raised_s=now, raised_backlog_s=need.backlog_s)
        return state, _make_decision(target, Reason.DEADLINE, need)
    return state, _make_decision(target, Reason.FULL if wanted > current else Reason.STARTING, need)


def _plan(
    settings: AutoscaleConfig, state: State, observation: Observation, need: Need, now: float
) -> tuple[State, Decision]:
    current = observation.serve_state.target
    wanted = _add_standby(settings, _count_wanted(settings, need))
    if settings.burst_floor_s and _is_burst(settings, state, need, now):
        state = state._replace(pressed_s=now)
    state = _note_burst(settings, state, need, now)
    state = _note_enough(settings, state, max(wanted, _add_standby(settings, _count_enough(settings, need))), now)
    floor = highest(state.bursts, now, settings.burst_floor_s)
    if max(wanted, floor) > current:
        target = min(max(wanted, floor), settings.max_replicas)
        reason = Reason.FULL if target == current else Reason.DEMAND if wanted > current else Reason.FLOOR
        return state, _make_decision(target, reason, need)
    least = max(settings.min_replicas, floor)
    if max(state.enough[-1].replicas, settings.min_replicas) >= current:
        return state, _make_decision(current, Reason.STEADY, need)
    if least >= current:
        return state, _make_decision(current, Reason.FLOOR, need)
    enough = max(highest(state.enough, now, settings.scale_down_delay_s), least)
    is_known = state.known_s is not None and now - state.known_s >= settings.scale_down_delay_s
    if enough >= current or not is_known or _is_rush_held(settings, state, now):
        return state, _make_decision(current, Reason.COOLING, need)
    return state, _make_decision(enough, Reason.IDLE, need)


def _note_enough(settings: AutoscaleConfig, state: State, enough: int, now: float) -> State:
    # behind a look that brought no news a window passes until the load is known again
    is_gap = not state.enough or now - state.enough[-1].at_s > 2 * settings.window_s
    return state._replace(
        enough=note_peak(state.enough, Peak(now, enough), settings.scale_down_delay_s),
        known_s=now if is_gap or state.known_s is None else state.known_s,
    )


def _is_in_burst(settings: AutoscaleConfig, state: State, now: float) -> bool:
    """Whether a floor is kept for bursts, and a deadline was in danger within a start-up time."""
    start_s = expected_start_s(state.starts.took_s, settings.start_s)
    return settings.burst_floor_s > 0 and now - state.pressed_s <= start_s


def _is_rush_held(settings: AutoscaleConfig, state: State, now: float) -> bool:
    """Whether what only a rush asked for still stays: at least until the window holds nothing from before the rush, and
    no longer than the delay."""
    start_s = expected_start_s(state.starts.took_s, settings.start_s)
    hold_s = max(settings.window_s, min(RUSH_STARTS * start_s, settings.scale_down_delay_s))
    return now - state.pressed_s <= hold_s


def _note_burst(settings: AutoscaleConfig, state: State, need: Need, now: float) -> State:
    """The state, in which what the load fills so soon after a deadline was in danger is a burst's need. The demand is
    already the highest of the burst's, and so has no room beside it; of a burst shorter than the window the rush's own
    rate tells it."""
    if not _is_in_burst(settings, state, now):
        return state
    is_known = state.rush_s is not None and now - state.rush_s >= 2 * _count_recent_s(settings, state)
    needed = min(_count_replicas(need.latest_demand if is_known else need.demand, 1.0), settings.max_replicas)
    return state._replace(bursts=note_peak(state.bursts, Peak(now, needed), settings.burst_floor_s))


def _is_burst(settings: AutoscaleConfig, state: State, need: Need, now: float) -> bool:
    """Whether the arrivals of the last moments would fill more replicas than there would be without a floor: a burst
    that the floor carries puts no deadline in danger."""
    there = max(highest(state.enough, now, settings.scale_down_delay_s), settings.min_replicas)
    return bool(state.bursts) and _count_replicas(need.latest_demand, 1.0) > there


def _count_enough(settings: AutoscaleConfig, need: Need) -> int:
    """Replicas that would be enough with a margin."""
    return _count_wanted(settings, need, 1 - settings.scale_down_margin)


def planned_utilisation(settings: AutoscaleConfig, demand: float, gust: float) -> float:
    """Share of the replicas that a demand is planned to fill: less than `target_utilisation` where gusts take room."""
    return min(settings.target_utilisation, demand / (demand + gust)) if demand else settings.target_utilisation


def _count_wanted(settings: AutoscaleConfig, need: Need, share: float = 1.0) -> int:
    """Replicas for the load at `share` of what is planned for: the target utilisation, or where that takes more, full
    use with room for gusts."""
    return _count_replicas(need.demand, share * planned_utilisation(settings, need.demand, need.gust))


def _add_standby(settings: AutoscaleConfig, needed: int) -> int:
    """The replicas with those on standby, as far as the bounds allow them."""
    return min(max(needed, settings.min_replicas) + settings.standby, max(needed, settings.max_replicas))


def _count_replicas(demand: float, utilisation: float) -> int:
    return math.ceil(demand / utilisation - ROUNDING)


def _make_decision(target: int, reason: Reason, need: Need) -> Decision:
    return Decision(target, reason, need.demand, need.capacity_rps, need.wait_s, need.gust)
