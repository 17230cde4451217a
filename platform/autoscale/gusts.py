"""How unevenly prompts come, in times too short for a replica to start. Pure.

What comes within the target for the first token has to be begun within it, by the replicas that are there. So a pool
needs, beside its mean demand, room for the spread of the prompt tokens of so short a time, whatever its cause: few
requests a second, prompts of unequal length, or arrivals that come together. The mean of the whole window is taken off
first, so that a load that grows or falls is no gust.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

from penstock.autoscale.demand import Sample, extend_window

REMEMBER_S = 600.0
"""Seconds in which what a gust weighs falls to 1/e."""
NUM_DEVIATIONS = 1.64
"""Standard deviations of a gust for which there is room: 95 % of a normal distribution."""


class Gusts(NamedTuple):
    """The mean square of the prompt tokens that came above or below the mean."""

    square: float = 0.0
    weight_s: float = 0.0
    """Seconds on which it rests, older ones counted less."""
    gateways: frozenset[str] = frozenset()
    """Ids of the gateways that reported last."""
    same_since_s: float = -math.inf
    """Time since which it has been the same ones: what came while one goes or comes is not known."""


def note_gust(
    known: Gusts, gateways: Collection[str], samples: tuple[Sample, ...], prefill_tokens: float, reach_s: float
) -> Gusts:
    """What is known after the newest sample. gateways: those that report. prefill_tokens: of the average request, for
    those that still wait. reach_s: length of a gust, seconds."""
    if known.gateways != frozenset(gateways):
        known = known._replace(gateways=frozenset(gateways), same_since_s=samples[-1].at_s)
    if samples[0].at_s < known.same_since_s:
        return known
    recent = extend_window(samples[:-1], samples[-1], reach_s)
    span_s, whole_s = (part[-1].at_s - part[0].at_s for part in (recent, samples))
    step_s = samples[-1].at_s - samples[-2].at_s if len(samples) > 1 else 0.0
    if whole_s <= span_s or span_s <= 0:
        return known
    mean = _count_tokens(samples, prefill_tokens) * span_s / whole_s
    excess = (_count_tokens(recent, prefill_tokens) - mean) * min(1.0, reach_s / span_s)
    weight_s = known.weight_s * math.exp(-step_s / REMEMBER_S)
    total = known.square * weight_s + excess**2 * step_s
    return known._replace(square=total / (weight_s + step_s), weight_s=weight_s + step_s)


def gust_tokens(known: Gusts) -> float:
    """Prompt tokens beyond the mean for which there should be room within one gust's length."""
    return NUM_DEVIATIONS * math.sqrt(known.square)


def _count_tokens(samples: tuple[Sample, ...], prefill_tokens: float) -> float:
    begun = sum(sample.flow.prefill_tokens for sample in samples[1:])
    return begun + prefill_tokens * (samples[-1].num_queued - samples[0].num_queued)
