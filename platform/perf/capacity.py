"""How much load one replica can carry permanently: requests a second of a given shape, and the rows it then has. Pure;
all times are seconds.

In a steady state a request is a row for as many steps as it has output tokens, and a step carries its share of the
prefill that arrives while it runs. With `rate` requests a second, `work_s` of token work each and a fixed part `a` of
every step that is

    t_step = a + rate * work_s * t_step = a / (1 - rate * work_s)        never below the knee
    rows   = rate * output_tokens * t_step                               (Little's law)

so token work is what a replica's time is filled with, and `rate * work_s` is how full it is. Three things bound the
rate: rows (or the KV that they need) at once, the time per output token, and time itself. `a` holds the cliffs of a
device that replays recorded steps, by the rows: between two cliffs it is constant, and each such part has a rate of its
own, the best of which counts. There, a step that begins a request is not recorded. Invariant: capacity never rises when
a request is made longer.
"""

import math
from typing import NamedTuple

from penstock.perf.model import cliffs_s
from penstock.wire.frames import StepCosts


class Shape(NamedTuple):
    """A request of average size."""

    prefill_tokens: float
    """Prompt tokens that are computed."""
    cached_tokens: float
    """Prompt tokens whose KV is found."""
    output_tokens: float
    sampled_share: float = 0.0
    """Part of the requests whose tokens take more than the largest logit, 0 to 1."""

    @property
    def context_tokens(self) -> float:
        """Tokens that a row attends to, half way through its output."""
        return self.prefill_tokens + self.cached_tokens + self.output_tokens / 2


class Bounds(NamedTuple):
    """What limits a replica."""

    max_rows: float
    """Sequences that decode at once."""
    kv_tokens: float
    """Tokens that the KV cache holds."""
    tpot_s: float
    """Target for the time per output token. Where even a row alone takes longer, one row at a time is what is left."""


def work_s(costs: StepCosts, shape: Shape) -> float:
    """Seconds of steps that one request adds: its prefill, and its rows with what they read and the choice of their
    tokens."""
    prefill, cached = shape.prefill_tokens, shape.cached_tokens
    reading_s = costs.attention_s * prefill * (cached + prefill / 2)
    row_s = costs.row_s + costs.sampled_row_s * shape.sampled_share + costs.kv_token_s * shape.context_tokens
    return costs.prefill_token_s * prefill + reading_s + _steps(shape) * row_s


def capacity_rps(costs: StepCosts, shape: Shape, bounds: Bounds) -> float:
    """Requests a second that one replica can carry; infinite where all costs are zero."""
    rows = max(1.0, min(bounds.max_rows, bounds.kv_tokens / max(1.0, shape.context_tokens)))
    return max(_part_rps(costs, shape, bounds.tpot_s, end) for end in _part_ends(costs, rows))


def _part_rps(costs: StepCosts, shape: Shape, tpot_s: float, rows: float) -> float:
    """Requests a second at `rows` or less, if all of them make a step pass the cliffs that `rows` pass."""
    fixed_s, added_s, steps = _fixed_s(costs, rows), work_s(costs, shape), _steps(shape)
    by_rows = rows / max(1e-12, steps * fixed_s + rows * added_s)
    eager_s = 0.0 if costs.stairs is None else max(0.0, costs.stairs.eager_knee_s - costs.knee_s)
    by_knee = rows / max(1e-12, steps * costs.knee_s + min(steps, rows) * eager_s)
    alone = 1 / max(1e-12, steps * max(fixed_s, costs.knee_s) + added_s)
    by_tpot = (1 - max(fixed_s, costs.knee_s) / tpot_s) / added_s if added_s else math.inf
    rate = min(by_rows, by_knee, max(by_tpot, alone))
    return rate if rate < 1e11 else math.inf


def rows_at(costs: StepCosts, shape: Shape, rate: float) -> float:
    """Sequences under way on a replica that gets `rate` requests a second, less than its capacity."""
    left = max(1e-12, 1 - rate * work_s(costs, shape))
    least = 0.0
    for end in _part_ends(costs, math.inf):
        rows = rate * _steps(shape) * max(costs.knee_s, _fixed_s(costs, end) / left)
        if rows <= end:
            break
        least = end
    return max(least, rows)


def _part_ends(costs: StepCosts, rows: float) -> list[float]:
    """Most rows of each part between cliffs, up to `rows`, ascending."""
    places = () if costs.stairs is None else costs.stairs.cliffs
    return [*(float(place) for place, _ in places if place < rows), rows]


def _fixed_s(costs: StepCosts, rows: float) -> float:
    """The part of a decode step that does not grow from one cliff to the next, seconds."""
    return costs.base_s + cliffs_s(costs, rows)


def _steps(shape: Shape) -> float:
    """Number of steps in which a request has a row."""
    return max(1.0, shape.output_tokens)
