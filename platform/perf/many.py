"""The performance model over many replicas at once: `penstock.perf.model` in arrays, for a choice among hundreds.

The replicas of a pool are predicted with one mean of costs, times what each one's pace differs beyond noise (`blend`).
Not a second model: each prediction equals that of `model` but for rounding, and tests hold them against each other.
All times are seconds, all arrays float64 with an entry for each replica.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.perf.blend import NOISE
from penstock.perf.model import MAX_SCORED_TOKENS
from penstock.perf.work_table import DECODE, PREFILL, UNDER_WAY, WorkTable
from penstock.wire.frames import Stairs, StepCosts

Floats = NDArray[np.float64]


class _Stairs(NamedTuple):
    """Stairs of a pool, as arrays: the seconds of the cliffs below `places[i]` tokens are `seconds[i]`."""

    places: Floats
    seconds: Floats
    recorded_rows: int
    recorded_tokens: int
    eager_knee_s: float


class Paces(NamedTuple):
    """What predictions for any request begin with, for the replicas of a pool as they are now."""

    costs: StepCosts
    stairs: _Stairs | None
    prefill_fixed_s: Floats
    """Seconds of a step that computes a prompt, less those that hang on the prompt."""
    decode_fixed_s: Floats
    """Seconds of a step that decodes the new sequence too, less those of its context."""
    tpot_before_s: Floats
    """Seconds per output token without the new sequence."""
    under_way_s: Floats
    """Half of the step under way."""
    factors: Floats | None
    """How much slower each replica is than the pool, beyond noise; None: all are alike."""


class Request(NamedTuple):
    """What is predicted: a request of `num_tokens` from which about `expected_output_tokens` come, and log
    probabilities of `scored_tokens` of its prompt."""

    num_tokens: int
    expected_output_tokens: float
    scored_tokens: int = 0


class Prediction(NamedTuple):
    ttft_s: Floats
    own_prefill_s: Floats
    """Seconds of the request's own prefill, beside what runs and with nothing before it."""
    tpot_s: Floats


def read_paces(works: WorkTable, costs: StepCosts) -> Paces:
    """costs: the mean of the pool."""
    stairs = None if costs.stairs is None else _read_stairs(costs.stairs)
    coefficients = np.array((costs.base_s, costs.row_s, costs.kv_token_s, costs.sampled_row_s, costs.prefill_token_s))
    fixed = (coefficients @ works.terms.reshape(len(coefficients), -1)).reshape(3, -1)
    rows, running = works.rows + 1, works.terms[1, UNDER_WAY]
    tpot_s = _step_s(costs, stairs, fixed[DECODE], rows, rows)
    under_way = running + np.maximum(works.terms[4, UNDER_WAY] - 1, 0) if stairs is not None else running
    ratios = works.own_tpot_s / tpot_s if tpot_s.all() else np.ones_like(tpot_s)
    factors = ratios / np.minimum(np.maximum(ratios, 1 / NOISE), NOISE)
    return Paces(
        costs,
        stairs,
        fixed[PREFILL],
        fixed[DECODE],
        _step_s(costs, stairs, fixed[DECODE] - costs.row_s, works.rows, works.rows),
        _step_s(costs, stairs, fixed[UNDER_WAY], running, under_way) * works.half_step,
        None if (factors == 1.0).all() else factors,
    )


def predict_many(works: WorkTable, paces: Paces, request: Request, cached_tokens: Floats) -> Prediction:
    """Time to first token, own prefill and time per output token of a request at each replica, which holds so many
    cached tokens of it."""
    costs, num_tokens = paces.costs, request.num_tokens
    own = np.maximum(num_tokens - cached_tokens, 1.0)
    own_context = own * (cached_tokens + own / 2)
    behind, alone = (
        _prefill_s(works, paces, total, context, request.scored_tokens)
        for total, context in ((own + works.prefill_tokens, own_context + works.ahead_context), (own, own_context))
    )
    tpot_s = paces.decode_fixed_s + costs.kv_token_s * num_tokens
    rows = works.rows + 1 if paces.stairs is not None else works.rows
    tpot_s = _step_s(costs, paces.stairs, tpot_s, rows, rows)
    return Prediction(behind + paces.under_way_s, alone, tpot_s)


def cost_many(works: WorkTable, paces: Paces, request: Request, cached_tokens: Floats) -> tuple[Floats, Floats]:
    """Cost of a request at each replica, as `penstock.router.routing.policy` defines it, and its time to first token,
    where nothing has to be loaded before."""
    expected = request.expected_output_tokens
    ttft_s, own_prefill_s, tpot_s = predict_many(works, paces, request, cached_tokens)
    held_up_s = works.rows * (own_prefill_s + expected / 2 * (tpot_s - paces.tpot_before_s))
    cost_s = ttft_s + expected * tpot_s + held_up_s
    return (cost_s, ttft_s) if paces.factors is None else (cost_s * paces.factors, ttft_s * paces.factors)


def _prefill_s(works: WorkTable, paces: Paces, total: Floats, context: Floats, scored_tokens: int) -> Floats:
    """As `penstock.perf.model.predict_prefill_s`. total: tokens of the prompt and of those before it. context: that
    all of them attend to."""
    costs, budget = paces.costs, works.budget
    full_steps = np.floor(total / budget)
    rest = total - full_steps * budget
    token_s = costs.prefill_token_s + costs.attention_s * (context / total)
    full_s, rest_s = (_prefill_step_s(works, paces, tokens, token_s) for tokens in (budget, rest))
    has_rest = rest > 0
    seconds: Floats = full_steps * full_s + has_rest * rest_s
    if scored_tokens:
        running = works.terms[1, UNDER_WAY]
        beside_s = _step_s(costs, paces.stairs, paces.prefill_fixed_s - costs.row_s, running, running)
        more_steps = np.maximum(-(-scored_tokens // MAX_SCORED_TOKENS) - (full_steps + has_rest), 0)
        seconds = seconds + scored_tokens * (costs.row_s + costs.sampled_row_s) + more_steps * beside_s
    return seconds


def _prefill_step_s(works: WorkTable, paces: Paces, tokens: Floats, token_s: Floats) -> Floats:
    """Seconds of a step with `tokens` of prompts, each of which takes `token_s`."""
    line_s = paces.prefill_fixed_s + tokens * token_s
    if paces.stairs is None:
        return np.maximum(line_s, paces.costs.knee_s)
    rows = works.terms[1, PREFILL]
    return _step_s(paces.costs, paces.stairs, line_s, rows, rows + np.maximum(tokens - 1, 0))


def _step_s(costs: StepCosts, stairs: _Stairs | None, line_s: Floats, rows: Floats, num_tokens: Floats) -> Floats:
    """Seconds of a step: its line, with the cliffs below its number of tokens, and not shorter than its floor."""
    if stairs is None:
        return np.maximum(line_s, costs.knee_s)
    is_recorded = (rows <= stairs.recorded_rows) & ((num_tokens <= rows) | (num_tokens <= stairs.recorded_tokens))
    floor_s = np.where(is_recorded, costs.knee_s, max(costs.knee_s, stairs.eager_knee_s))
    return np.maximum(line_s + stairs.seconds[np.searchsorted(stairs.places, num_tokens)], floor_s)


def _read_stairs(stairs: Stairs) -> _Stairs:
    places = np.array([float(place) for place, _ in stairs.cliffs])
    seconds = np.cumsum([0.0, *(seconds for _, seconds in stairs.cliffs)])
    return _Stairs(places, seconds, stairs.recorded_rows, stairs.recorded_tokens, stairs.eager_knee_s)
