"""What is asked of a pool: arrivals a second, the average request, and the token work that is there already. Pure.

Gateways report totals since their start; what they gained from one sample to the next is what counts, gateway by
gateway, so that one that comes, goes, starts again or is not heard for a moment is no burst. Sequences that are under
way at both ends of a span would make its answers look too long or too short: an answer's length is output over the mean
of starts and ends, which is exact while the load is steady and half right about what began in between.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from penstock.autoscale.observation import Observation
from penstock.perf.capacity import Shape
from penstock.wire.scaling import PoolFlow

FIRST_SHAPE = Shape(prefill_tokens=256.0, cached_tokens=0.0, output_tokens=128.0)
"""Taken for the average request until some have been seen."""
FIRST_REQUESTS = 2.0
"""So many requests weigh as much as that guess."""
SHAPE_REQUESTS = 20.0
"""And so many as all that was known before, once that much is known."""
RECENT_S = 2.0
REMEMBER_S = 60.0
"""The totals of a gateway that is not heard any more are kept so long."""


class Total(NamedTuple):
    flow: PoolFlow
    at_s: float
    """When it was heard last."""


class Sample(NamedTuple):
    at_s: float
    flow: PoolFlow
    """What all gateways gained since the sample before."""
    num_queued: int
    num_present: int


class Learned(NamedTuple):
    """What is known of the average request."""

    shape: Shape = FIRST_SHAPE
    num_seen: float = 0.0
    """Requests that it rests on."""


class Demand(NamedTuple):
    rate: float
    """Requests a second over the window, those that still wait included."""
    latest_rate: float
    """The same over the last RECENT_S."""
    shape: Shape
    num_present: float
    """Sequences on replicas, averaged over the window."""


def sample(totals: Mapping[str, Total], seen: Observation, now: float) -> Sample:
    """totals: as of the samples before. A gateway that is not in them gained nothing yet."""
    gains = [_gain(totals[gateway].flow, flow) for gateway, flow in seen.flows.items() if gateway in totals]
    return Sample(now, summed(gains), seen.num_queued, seen.num_present)


def remembered(totals: Mapping[str, Total], flows: Mapping[str, PoolFlow], now: float) -> dict[str, Total]:
    kept = {gateway: total for gateway, total in totals.items() if now - total.at_s < REMEMBER_S}
    return kept | {gateway: Total(flow, now) for gateway, flow in flows.items()}


def extended(samples: tuple[Sample, ...], newest: Sample, window_s: float) -> tuple[Sample, ...]:
    """With the newest, and without what the window no longer needs: one sample at its far end stays."""
    samples = (*samples, newest)
    first = max((place for place, kept in enumerate(samples) if kept.at_s <= newest.at_s - window_s), default=0)
    return samples[first:]


def learned(known: Learned, flow: PoolFlow) -> Learned:
    """The average request, after what has come since."""
    shape, weight = known.shape, min(SHAPE_REQUESTS, FIRST_REQUESTS + known.num_seen)
    num_answered = (flow.num_started + flow.num_ended) / 2
    mixed = Shape(
        prefill_tokens=_mixed(shape.prefill_tokens, weight, flow.prefill_tokens, flow.num_started),
        cached_tokens=_mixed(shape.cached_tokens, weight, flow.cached_tokens, flow.num_started),
        output_tokens=max(1.0, _mixed(shape.output_tokens, weight, flow.output_tokens, num_answered)),
    )
    return Learned(mixed, known.num_seen + flow.num_started)


def measured(samples: tuple[Sample, ...], shape: Shape) -> Demand:
    """Over the window that the samples span. Of a single one only what is present is known."""
    num_present = sum(kept.num_present for kept in samples) / len(samples)
    return Demand(_rate(samples), _rate(extended(samples[:-1], samples[-1], RECENT_S)), shape, num_present)


def _rate(samples: tuple[Sample, ...]) -> float:
    first, last = samples[0], samples[-1]
    span_s = last.at_s - first.at_s
    num_arrived = sum(kept.flow.num_started for kept in samples[1:]) + last.num_queued - first.num_queued
    return max(0, num_arrived) / span_s if span_s > 0 else 0.0


def _gain(before: PoolFlow, after: PoolFlow) -> PoolFlow:
    return PoolFlow(
        num_started=after.num_started - before.num_started,
        num_ended=after.num_ended - before.num_ended,
        prefill_tokens=after.prefill_tokens - before.prefill_tokens,
        cached_tokens=after.cached_tokens - before.cached_tokens,
        output_tokens=after.output_tokens - before.output_tokens,
    )


def summed(flows: Collection[PoolFlow]) -> PoolFlow:
    return PoolFlow(
        num_started=sum(flow.num_started for flow in flows),
        num_ended=sum(flow.num_ended for flow in flows),
        prefill_tokens=sum(flow.prefill_tokens for flow in flows),
        cached_tokens=sum(flow.cached_tokens for flow in flows),
        output_tokens=sum(flow.output_tokens for flow in flows),
    )


def _mixed(mean: float, weight: float, total: float, count: float) -> float:
    """The mean, which weighs as much as `weight` requests, moved towards total / count."""
    return (mean * weight + total) / (weight + count) if count > 0 else mean
