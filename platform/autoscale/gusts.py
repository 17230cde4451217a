"""How unevenly prompts come, in times too short for a replica to start. Pure.

A prompt is in time when it is begun within the target for the first token, T. So of the prompt tokens that come within
any span w a pool must get through all in w + T: what comes above the mean needs room, and what the mean brings within T
is the slack that it has (a delay bound of the network calculus; Le Boudec and Thiran 2001, 1.4). Short spans vary much
and have much slack for it, long ones little of both; the span that needs most counts. A span's spread is what it is,
whatever the cause: few requests a second, prompts of unequal length, arrivals that come together. The mean of the whole
window is taken off first, so that a load that grows or falls is no gust.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

from penstock.autoscale.demand import Sample, extend_window

REMEMBER_S = 600.0
"""Seconds in which what a gust weighs falls to 1/e."""
NUM_DEVIATIONS = 3.0
"""Standard deviations of a gust for which there is room."""
SPANS = (1 / 15, 2 / 15, 4 / 15, 8 / 15)
"""Spans in which tokens are counted, as parts of the window whose mean is taken off: 2 to 16 s of 30. Not of the
target, which changes with the classes that come."""
MOST_OF_WINDOW = 0.6
"""A longer part of what the samples span tells nothing: the mean is made of it."""


class Mean(NamedTuple):
    """A mean over time."""

    value: float = 0.0
    weight_s: float = 0.0
    """Seconds on which it rests, older ones counted less."""


class Gusts(NamedTuple):
    """What is known of the prompt tokens that come."""

    rate: Mean = Mean()
    """Tokens a second."""
    squares: tuple[Mean, ...] = (Mean(),) * len(SPANS)
    """Square of the tokens beyond the mean, of each span."""
    gateways: frozenset[str] = frozenset()
    """Ids of the gateways that reported last."""
    same_since_s: float = -math.inf
    """Time since which it has been the same ones: what came while one goes or comes is not known."""


def note_gust(
    known: Gusts, gateways: Collection[str], samples: tuple[Sample, ...], prefill_tokens: float, window_s: float
) -> Gusts:
    """What is known after the newest sample. gateways: those that report. prefill_tokens: of the average request, for
    those that still wait. window_s: what the samples span, but at the beginning."""
    if known.gateways != frozenset(gateways):
        known = known._replace(gateways=frozenset(gateways), same_since_s=samples[-1].at_s)
    step_s = samples[-1].at_s - samples[-2].at_s if len(samples) > 1 else 0.0
    if samples[0].at_s < known.same_since_s or step_s <= 0:
        return known
    whole_s = samples[-1].at_s - samples[0].at_s
    excesses = (_count_excess(samples, prefill_tokens, window_s * span) for span in SPANS)
    return known._replace(
        rate=_note(known.rate, _count_tokens(samples, prefill_tokens) / whole_s, step_s),
        squares=tuple(
            square if excess is None else _note(square, excess**2, step_s)
            for square, excess in zip(known.squares, excesses, strict=True)
        ),
    )


def gust_rate(known: Gusts, window_s: float, target_s: float) -> float:
    """Prompt tokens a second beyond the mean for which there should be room. target_s: for the first token."""
    slack = known.rate.value * target_s
    needed = (
        (NUM_DEVIATIONS * math.sqrt(square.value) - slack) / (window_s * span + target_s)
        for square, span in zip(known.squares, SPANS, strict=True)
    )
    return max(0.0, *needed)


def _note(mean: Mean, value: float, step_s: float) -> Mean:
    weight_s = mean.weight_s * math.exp(-step_s / REMEMBER_S)
    return Mean((mean.value * weight_s + value * step_s) / (weight_s + step_s), weight_s + step_s)


def _count_excess(samples: tuple[Sample, ...], prefill_tokens: float, span_s: float) -> float | None:
    """Tokens of the newest span beyond those of the mean; None where the samples do not reach far enough."""
    recent = extend_window(samples[:-1], samples[-1], span_s)
    counted_s, whole_s = (part[-1].at_s - part[0].at_s for part in (recent, samples))
    if counted_s <= 0 or counted_s > MOST_OF_WINDOW * whole_s:
        return None
    mean = _count_tokens(samples, prefill_tokens) * counted_s / whole_s
    excess = (_count_tokens(recent, prefill_tokens) - mean) * min(1.0, span_s / counted_s)
    return excess / math.sqrt(1 - counted_s / whole_s)  # the mean has the span itself in it


def _count_tokens(samples: tuple[Sample, ...], prefill_tokens: float) -> float:
    begun = sum(sample.flow.prefill_tokens for sample in samples[1:])
    return begun + prefill_tokens * (samples[-1].num_queued - samples[0].num_queued)
