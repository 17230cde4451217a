"""What a decision rested on, gathered from what the policy remembers. Pure; decides nothing.

A pool's explanation has the numbers of the decision itself, never ones that were worked out in another way; where the
policy did not know something, neither does the explanation.
"""

import math
from collections.abc import Sequence

import msgspec

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.demand import measure_rates
from penstock.autoscale.limits.schedules import Coming
from penstock.autoscale.limits.shortage import Retreat, Shortage
from penstock.autoscale.observation import Observation
from penstock.autoscale.peaks import highest
from penstock.autoscale.policy import ROUNDING, Decision, Reason, State, planned_utilisation
from penstock.autoscale.range import Range
from penstock.autoscale.starts import PodTimes, expected_start_s
from penstock.wire.explanation import (
    KEPT_WINDOWS,
    Change,
    PoolExplanation,
    ScheduledWindow,
    ShortageExplanation,
    StartPhases,
)

_BLIND = (Reason.STALE, Reason.BOUNDS)
"""Reasons of decisions that looked at no load."""


def explain(
    pool: str,
    settings: AutoscaleConfig,
    allowed: Range,
    state: State,
    observation: Observation,
    decision: Decision,
    now: float,
) -> PoolExplanation:
    """Explains the decision that was just made. settings: the pool's own, without the range's bounds. state: as of
    after the decision. now: monotonic seconds. What became of it, and what came before, is left open."""
    serve_state, shape = observation.serve_state, state.known.shape
    is_known = len(state.samples) > 1 and decision.capacity_rps > 0 and decision.reason not in _BLIND
    utilisation = planned_utilisation(settings, decision.demand, decision.gust)
    peak = max(
        (peak for peak in state.enough if now - peak.at_s <= settings.scale_down_delay_s),
        key=lambda peak: peak.replicas,
        default=None,
    )
    return PoolExplanation(
        pool=pool,
        target=decision.target,
        was=serve_state.target,
        reason=decision.reason.value,
        outcome="kept",
        is_dry_run=settings.dry_run,
        num_running=len(serve_state.running),
        num_serving=observation.num_serving,
        num_starting=serve_state.num_starting,
        num_stopping=serve_state.num_stopping,
        num_gateways=len(observation.flows),
        age_s=_finite(observation.age_s),
        num_queued=observation.num_queued,
        num_present=observation.num_present,
        rate_rps=measure_rates(state.samples).rate if len(state.samples) > 1 else None,
        prefill_tokens=shape.prefill_tokens,
        cached_tokens=shape.cached_tokens,
        output_tokens=shape.output_tokens,
        capacity_rps=_finite(decision.capacity_rps) if is_known else None,
        decoding=sum(sample.used for sample in state.samples) / len(state.samples) if state.samples else 0.0,
        demand=decision.demand if is_known else None,
        needed=math.ceil(decision.demand / utilisation - ROUNDING) if is_known else None,
        standby=settings.standby,
        target_utilisation=utilisation,
        predicted_wait_s=_finite(decision.predicted_wait_s) if is_known else None,
        ttft_target_s=settings.ttft_target_s,
        least=allowed.least,
        least_reason=allowed.least_reason.value,
        most=allowed.most,
        most_reason=allowed.most_reason.value,
        burst_floor=highest(state.bursts, now, settings.burst_floor_s) if settings.burst_floor_s else 0,
        enough=None if peak is None else peak.replicas,
        enough_ago_s=None if peak is None else now - peak.at_s,
        scale_down_delay_s=settings.scale_down_delay_s,
        start_s=expected_start_s(state.starts.took_s, settings.start_s),
        num_starts=len(state.starts.took_s),
        idle_s=None if settings.min_replicas else settings.idle_s,
    )


def with_schedule(found: PoolExplanation, windows: Sequence[Coming], ahead_s: float) -> PoolExplanation:
    """The explanation with the windows of schedules, the first ones. ahead_s: seconds by which floors begin earlier."""
    told = [
        ScheduledWindow(
            window.begin_s, window.end_s, window.begin_s - ahead_s, schedule.min_replicas, schedule.max_replicas
        )
        for schedule, window in windows[:KEPT_WINDOWS]
    ]
    return msgspec.structs.replace(found, windows=tuple(told))


def with_phases(found: PoolExplanation, observation: Observation, pod: PodTimes | None) -> PoolExplanation:
    """The explanation with the phases of the latest start that is known. pod: the newest pod's, None where there are no
    pods."""
    running = observation.serve_state.running
    known = {each.replica_id: each.start for each in observation.replicas if each.start is not None}
    own = next((known[name] for name in reversed(running) if name in known), None)
    phases = StartPhases(
        schedule_s=None if pod is None else pod.schedule_s,
        image_s=None if pod is None else pod.image_s,
        weights_s=None if own is None else own.weights_s,
        warm_up_s=None if own is None else own.warm_up_s,
    )
    return msgspec.structs.replace(found, start_phases=phases)


def with_shortage(found: PoolExplanation, shortage: Shortage | None, retreat: Retreat, now: float) -> PoolExplanation:
    """The explanation with what has no place. now: monotonic seconds."""
    told = None if shortage is None else ShortageExplanation(shortage.kind, shortage.num_unplaced, shortage.message)
    retry_s = None if retreat.most is None else max(0.0, retreat.retry_s - now)
    return msgspec.structs.replace(found, shortage=told, retry_s=retry_s)


def change_of(explanation: PoolExplanation, unix_s: float) -> Change:
    """The decision, as a change of the target at that time."""
    return Change(round(unix_s, 3), explanation.was, explanation.target, explanation.reason, explanation.outcome)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
