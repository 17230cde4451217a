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
from penstock.perf.work_table import WorkTable
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
    """Seconds of a step that computes a prompt, less those that hang on the prompt; [2 * replicas], the same twice."""
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
    size, stairs = works.num_rows, None if costs.stairs is None else _read_stairs(costs.stairs)
    coefficients = costs.base_s, costs.row_s, costs.kv_token_s, costs.sampled_row_s, costs.prefill_token_s
    fixed = np.dot(coefficients, works.terms)
    decode, under_way = fixed[2 * size : 3 * size], fixed[3 * size :]
    rows, running = works.rows, works.running
    if stairs is None:
        tpot_s, half_s = np.maximum(decode, costs.knee_s), np.maximum(under_way, costs.knee_s)
        before_s = np.maximum(decode - costs.row_s, costs.knee_s)
    else:
        tpot_s = _step_s(costs, stairs, decode, rows + 1, rows + 1)
        before_s = _step_s(costs, stairs, decode - costs.row_s, rows, rows)
        num_tokens = running + np.maximum(works.terms[4, 3 * size :] - 1, 0)
        half_s = _step_s(costs, stairs, under_way, running, num_tokens)
    return Paces(
        costs, stairs, fixed[: 2 * size], decode, before_s, half_s * works.half_step, _excess(works.own_tpot_s, tpot_s)
    )


def _excess(own_s: Floats, common_s: Floats) -> Floats | None:
    """The part of own / common beyond NOISE, either way, as `blend_costs` has it. Returns None where it is 1."""
    if not common_s[common_s.argmin()]:
        return None  # costs that are all nothing
    ratios = own_s / common_s
    if ratios[ratios.argmax()] <= NOISE and ratios[ratios.argmin()] * NOISE >= 1:
        return None
    return ratios / np.minimum(np.maximum(ratios, 1 / NOISE), NOISE)


def predict_many(works: WorkTable, paces: Paces, request: Request, cached_tokens: Floats) -> Prediction:
    """Time to first token, own prefill and time per output token of a request at each replica, which holds so many
    cached tokens of it, less than all."""
    costs, size = paces.costs, works.num_rows
    # with the prefill outstanding before it, and alone: two predictions in one row of arrays
    cached = np.concatenate((cached_tokens, cached_tokens))
    own = max(1, request.num_tokens) - cached
    context = own * (cached + own * 0.5) + works.ahead_context
    prefill_s = _prefill_s(works, paces, own + works.prefill_tokens, context, request.scored_tokens)
    tpot_s = paces.decode_fixed_s + costs.kv_token_s * request.num_tokens
    if paces.stairs is None:
        tpot_s = np.maximum(tpot_s, costs.knee_s)
    else:
        tpot_s = _step_s(costs, paces.stairs, tpot_s, works.rows + 1, works.rows + 1)
    return Prediction(prefill_s[:size] + paces.under_way_s, prefill_s[size:], tpot_s)


class Others(NamedTuple):
    """How others' delays count in a cost, as `penstock.router.routing.policy` has it."""

    mean_backlog_s: float
    """Seconds of prefill outstanding at a candidate, the mean of all of them."""
    full_backlog_s: float
    """Geometric mean of that and of a replica's own seconds from which on the delays of its sequences count in full."""
    least_weight: float
    """Weight of those delays where nothing is outstanding."""
    num_following: float
    """Requests to come that a prefill holds up."""


def cost_many(
    works: WorkTable, paces: Paces, request: Request, cached_tokens: Floats, others: Others
) -> tuple[Floats, Floats]:
    """Cost of a request at each replica, as `penstock.router.routing.policy` defines it, and its time to first token,
    where nothing has to be loaded before."""
    expected = request.expected_output_tokens
    ttft_s, own_prefill_s, tpot_s = predict_many(works, paces, request, cached_tokens)
    held_up_s = works.rows * (own_prefill_s + expected / 2 * (tpot_s - paces.tpot_before_s))
    weight = _weigh_others(works, paces, others)
    cost_s = ttft_s + expected * tpot_s + others.num_following * own_prefill_s + weight * held_up_s
    return (cost_s, ttft_s) if paces.factors is None else (cost_s * paces.factors, ttft_s * paces.factors)


def sum_backlogs_s(works: WorkTable, paces: Paces, is_counted: NDArray[np.bool_]) -> float:
    """Seconds of prefill outstanding at some of the replicas, summed up."""
    return float(np.dot(_backlogs_s(works, paces), is_counted))


def _weigh_others(works: WorkTable, paces: Paces, others: Others) -> Floats:
    weights: Floats = np.sqrt(_backlogs_s(works, paces) * others.mean_backlog_s) / others.full_backlog_s
    return np.minimum(np.maximum(weights, others.least_weight), 1.0)


def _backlogs_s(works: WorkTable, paces: Paces) -> Floats:
    """Seconds of prefill outstanding at each replica."""
    backlogs_s: Floats = works.prefill_tokens[: works.num_rows] * paces.costs.prefill_token_s
    return backlogs_s if paces.factors is None else backlogs_s * paces.factors


def _prefill_s(works: WorkTable, paces: Paces, total: Floats, context: Floats, scored_tokens: int) -> Floats:
    """Array [2 * replicas], as `penstock.perf.model.predict_prefill_s`. total: tokens of the prompt and of those before
    it. context: that all of them attend to."""
    costs, budget = paces.costs, works.budget
    full_steps = np.floor(total / budget)
    rest = total - full_steps * budget
    token_s = context / total * costs.attention_s + costs.prefill_token_s
    has_rest = np.minimum(rest, 1.0)
    seconds: Floats = full_steps * _prefill_step_s(works, paces, budget, token_s)
    seconds += has_rest * _prefill_step_s(works, paces, rest, token_s)
    if scored_tokens:
        running = np.concatenate((works.running, works.running))
        beside_s = _step_s(costs, paces.stairs, paces.prefill_fixed_s - costs.row_s, running, running)
        more_steps = np.maximum(-(-scored_tokens // MAX_SCORED_TOKENS) - (full_steps + has_rest), 0)
        seconds += scored_tokens * (costs.row_s + costs.sampled_row_s) + more_steps * beside_s
    return seconds


def _prefill_step_s(works: WorkTable, paces: Paces, tokens: Floats, token_s: Floats) -> Floats:
    """Seconds of a step with `tokens` of prompts, each of which takes `token_s`."""
    line_s = paces.prefill_fixed_s + tokens * token_s
    if paces.stairs is None:
        return np.maximum(line_s, paces.costs.knee_s)
    rows = works.terms[1, : 2 * works.num_rows]
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
