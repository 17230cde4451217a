"""The demand on a pool: arrivals a second and the average request. Pure.

Gateways report totals since their start; what they gained from one sample to the next is what counts, gateway by
gateway, so that one that comes, goes, starts again or skips a report is no burst. Sequences that are under
way at both ends of a span would make its answers look too long or too short: an answer's length is output over the mean
of starts and ends, which is exact while the load is steady and half right about what began in between.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from penstock.autoscale.observation import Observation
from penstock.perf.capacity import Shape
from penstock.wire.scaling import PoolFlow

FIRST_SHAPE = Shape(prefill_tokens=256.0, cached_tokens=0.0, output_tokens=128.0, sampled_share=1.0)
"""The average request as it is assumed until some have been counted; the API's default temperature is not 0."""
FIRST_REQUESTS = 2.0
"""Number of requests that weigh as much as that assumption."""
SHAPE_S = 60.0
"""Seconds in which what a request weighs falls to 1/e."""
SHAPE_REQUESTS = 20.0
"""Number of requests that are remembered however slowly they come, and of those before the first report."""
RECENT_S = 2.0
"""Seconds of the latest arrivals, at the least."""
SKIPPED_S = 2.0
"""Seconds by which a gateway's report may be late before its gains count as those of a gateway that was silent."""
REMEMBER_S = 60.0
"""Seconds for which the totals of a gateway that reports no more are kept."""


class Total(NamedTuple):
    """A gateway's totals since its start, as it last reported them."""

    flow: PoolFlow
    at_s: float
    """Time of that report."""
    num_queued: int = 0
    """Requests that waited in it."""


class Sample(NamedTuple):
    """The pool's load at one moment."""

    at_s: float
    flow: PoolFlow
    """Gains of all gateways since the sample before."""
    num_queued: int
    num_running: int = 0
    """Sequences that replicas compute."""
    num_sampled: int = 0
    """Running sequences whose tokens take more than the largest logit."""
    used: float = 0.0
    """Replicas' worth of sequences that decode."""
    num_found: int = 0
    """Queued requests of gateways which report again, less those of gateways that fell silent: they did not come, or
    go, since the sample before."""


class AverageRequest(NamedTuple):
    """The average request, as far as it is known."""

    shape: Shape = FIRST_SHAPE
    weight: float = FIRST_REQUESTS
    """Number of requests that the shape rests on, older ones counted less."""


class Rates(NamedTuple):
    """Requests a second, those that still wait included."""

    rate: float
    """Requests a second over the window."""
    latest_rate: float
    """Requests a second over the last moments."""


def take_sample(totals: Mapping[str, Total], observation: Observation, now: float) -> Sample:
    """The newest sample. totals: as of the samples before; a gateway that is not in them gained nothing yet, and one
    that was silent what it would have in the time since the other samples."""
    latest_s = max((total.at_s for total in totals.values()), default=now)
    before = {gateway: total for gateway, total in totals.items() if total.at_s == latest_s}
    gains = [
        _scale(_subtract(totals[gateway].flow, flow), now - latest_s, now - totals[gateway].at_s)
        for gateway, flow in observation.flows.items()
        if gateway in totals
    ]
    loads = [replica.load for replica in observation.replicas]
    return Sample(
        now,
        sum_flows(gains),
        observation.num_queued,
        sum(load.num_running for load in loads),
        sum(min(load.num_sampled, load.num_running) for load in loads),
        num_found=sum(
            queued for gateway, queued in observation.queues.items() if gateway in totals and gateway not in before
        )
        - sum(total.num_queued for gateway, total in before.items() if gateway not in observation.flows),
    )


def remember_totals(
    totals: Mapping[str, Total], flows: Mapping[str, PoolFlow], now: float, queues: Mapping[str, int] | None = None
) -> dict[str, Total]:
    """The totals with those of the newest reports. queues: requests that wait in each gateway; None: nobody waits."""
    recent = {gateway: total for gateway, total in totals.items() if now - total.at_s < REMEMBER_S}
    return recent | {gateway: Total(flow, now, (queues or {}).get(gateway, 0)) for gateway, flow in flows.items()}


def extend_window(samples: tuple[Sample, ...], newest: Sample, window_s: float) -> tuple[Sample, ...]:
    """The samples with the newest, and without those that the window no longer needs: one at its far end stays."""
    samples = (*samples, newest)
    first = max((place for place, earlier in enumerate(samples) if earlier.at_s <= newest.at_s - window_s), default=0)
    return samples[first:]


def learn(
    known: AverageRequest, flow: PoolFlow, num_running: int = 0, num_sampled: int = 0, span_s: float = 0.0
) -> AverageRequest:
    """The average request, after the requests of `flow` have been counted, and the sequences that run, `num_sampled` of
    which take more than the largest logit. span_s: seconds in which they came.

    What was known weighs less with time, not with each request: where a second brings twenty, the last twenty are
    noise, and a target that goes up at once and down slowly follows the largest of it.
    """
    shape = known.shape
    weight = max(min(known.weight, SHAPE_REQUESTS), known.weight * math.exp(-span_s / SHAPE_S))
    num_answered = (flow.num_started + flow.num_ended) / 2
    mixed = Shape(
        prefill_tokens=_mix(shape.prefill_tokens, weight, flow.prefill_tokens, flow.num_started),
        cached_tokens=_mix(shape.cached_tokens, weight, flow.cached_tokens, flow.num_started),
        output_tokens=max(1.0, _mix(shape.output_tokens, weight, flow.output_tokens, num_answered)),
        sampled_share=_mix(shape.sampled_share, min(weight, SHAPE_REQUESTS), num_sampled, num_running),
    )
    return AverageRequest(mixed, weight + max(0, flow.num_started))


def measure_rates(samples: tuple[Sample, ...], recent_s: float = RECENT_S) -> Rates:
    """The rates over the window that the samples span. recent_s: seconds of the last moments. A single sample tells
    none."""
    return Rates(_rate(samples), _rate(extend_window(samples[:-1], samples[-1], recent_s)))


def _rate(samples: tuple[Sample, ...]) -> float:
    first, last = samples[0], samples[-1]
    span_s = last.at_s - first.at_s
    num_queued = last.num_queued - first.num_queued - sum(sample.num_found for sample in samples[1:])
    num_arrived = sum(sample.flow.num_started for sample in samples[1:]) + num_queued
    return max(0, num_arrived) / span_s if span_s > 0 else 0.0


def _subtract(before: PoolFlow, after: PoolFlow) -> PoolFlow:
    return PoolFlow(
        num_started=after.num_started - before.num_started,
        num_ended=after.num_ended - before.num_ended,
        prefill_tokens=after.prefill_tokens - before.prefill_tokens,
        cached_tokens=after.cached_tokens - before.cached_tokens,
        output_tokens=after.output_tokens - before.output_tokens,
        num_interactive=after.num_interactive - before.num_interactive,
        num_batch=after.num_batch - before.num_batch,
    )


def _scale(flow: PoolFlow, span_s: float, within_s: float) -> PoolFlow:
    """The part of a flow of `within_s` seconds that came in `span_s` of them; all of it where that is little more."""
    if within_s <= span_s + SKIPPED_S:
        return flow
    return PoolFlow(*(round(getattr(flow, name) * span_s / within_s) for name in PoolFlow.__struct_fields__))


def sum_flows(flows: Collection[PoolFlow]) -> PoolFlow:
    return PoolFlow(
        num_started=sum(flow.num_started for flow in flows),
        num_ended=sum(flow.num_ended for flow in flows),
        prefill_tokens=sum(flow.prefill_tokens for flow in flows),
        cached_tokens=sum(flow.cached_tokens for flow in flows),
        output_tokens=sum(flow.output_tokens for flow in flows),
        num_interactive=sum(flow.num_interactive for flow in flows),
        num_batch=sum(flow.num_batch for flow in flows),
    )


def _mix(mean: float, weight: float, total: float, count: float) -> float:
    """The mean, which weighs as much as `weight` requests, moved towards total / count."""
    return (mean * weight + total) / (weight + count) if count > 0 else mean
