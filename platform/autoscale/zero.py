"""Scale to zero: whether a pool is in use, and so whether it may have no replica. Pure.

A pool is in use while requests wait for it, run on it, came for it, or went elsewhere because it had no replica. The
first sign of use starts a replica at once; without one for `idle_s` all go. Invariants: a pool whose lower bound is
above 0 is never touched by this; without news from gateways nothing counts as unused.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.observation import Observation
from penstock.autoscale.policy import STALE_S, Reason
from penstock.autoscale.range import Range
from penstock.wire.scaling import PoolFlow


class Usage(NamedTuple):
    """What is remembered of a pool's use between two decisions. Times are monotonic seconds."""

    totals: Mapping[str, int] = MappingProxyType({})
    """Requests that came for the pool since each gateway's start."""
    used_s: float = -math.inf
    """Time of the last sign of use, or of the first look."""
    is_wanted: bool = False
    """Whether the latest look showed a request that came or waits, or one before, and there is still no replica."""
    empty_s: float | None = None
    """Time since which replicas are asked for and none serves; None: one does, or none is asked for."""


def note_use(usage: Usage, observation: Observation, now: float) -> Usage:
    """What is known after another look at the pool."""
    totals = {gateway: _num_came(flow) for gateway, flow in observation.flows.items()}
    has_come = any(total > usage.totals.get(gateway, total) for gateway, total in totals.items())
    has_none = not observation.serve_state.target
    is_wanted = has_come or observation.num_queued > 0 or (usage.is_wanted and has_none)
    is_used = is_wanted or observation.num_present > 0 or observation.age_s > STALE_S
    is_empty = observation.serve_state.target > 0 and not observation.num_serving
    return Usage(
        totals={**usage.totals, **totals} if observation.age_s > STALE_S else totals,
        used_s=now if is_used or math.isinf(usage.used_s) else usage.used_s,
        is_wanted=is_wanted,
        empty_s=None if not is_empty else now if usage.empty_s is None else usage.empty_s,
    )


def find_range(settings: AutoscaleConfig, whole: Range, usage: Usage, observation: Observation, now: float) -> Range:
    """The replicas that the pool may have by its use: at least one, at any use, and none once it is unused. whole: what
    it may have anyway, which stays as it is where it allows no zero."""
    if whole.least:
        return whole
    if not observation.serve_state.target:
        return whole.at_least(1, Reason.ARRIVAL) if usage.is_wanted else whole.at_most(0, Reason.UNUSED)
    if now - usage.used_s >= settings.idle_s:
        return whole.at_most(0, Reason.UNUSED)
    return whole.at_least(1, Reason.BOUNDS)


def ready_in_s(start_s: float, usage: Usage, now: float) -> float:
    """Seconds until the pool's first replica should be there, at least 0; of a pool that has replicas, or asked for
    none yet, as many as a start takes: whoever finds none hears the time before the autoscaler knows that they are
    gone. start_s: seconds that a start takes."""
    return start_s if usage.empty_s is None else max(0.0, start_s - (now - usage.empty_s))


def _num_came(flow: PoolFlow) -> int:
    return flow.num_started + flow.num_passed
