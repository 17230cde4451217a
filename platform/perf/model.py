"""The performance model: how long a step, a first token and a further token take. Pure arithmetic on `StepCosts`.

    t_step = max(knee, a + b*rows + c*prefill_tokens + f*query_context + d*kv_tokens + e*draft_tokens + g*draft_rounds
                       + h*sampled_rows + the cliffs below its number of tokens)

Cliffs are those of a device that replays recorded steps (`Stairs`); there the knee of a step that is not recorded is
the time that its launches take.

Not a scheduler: it predicts what the engine's one-phase scheduler does (a row of every running sequence, the rest of
the token budget for prefill, first come first served). Invariant: every prediction is finite, not negative, and never
falls when work is added. All times are seconds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import astuple, replace

from penstock.wire.frames import Stairs, StepCosts

MAX_SCORED_TOKENS = 128
"""Most tokens of prompts whose log probabilities a step computes: so many rows of logits are held at once."""


class Work(NamedTuple):
    """What a replica has to do already."""

    num_running: int = 0
    """Sequences that decode: a row each in every step."""
    num_waiting: int = 0
    """Sequences submitted, not yet running."""
    prefill_tokens: int = 0
    """Prompt tokens not computed yet, all sequences together."""
    kv_tokens: int = 0
    """Context tokens of the running sequences."""
    num_sampled: int = 0
    """Running sequences whose tokens take more than the largest logit."""


def step_time_s(
    costs: StepCosts,
    *,
    rows: int,
    prefill_tokens: int,
    query_context: float,
    kv_tokens: int,
    draft_tokens: int = 0,
    draft_rounds: int = 0,
    sampled_rows: int = 0,
) -> float:
    """Seconds of one step.

    rows: sequences in it. prefill_tokens: prompt tokens computed in it. query_context: sum over those of the context
    each attends to. kv_tokens: context tokens that the decode rows read. draft_tokens: drafted tokens verified in it.
    draft_rounds: passes of the drafter, as many as the longest draft in the step has tokens. sampled_rows: rows, of
    drafted tokens too, from which a token is chosen by more than the largest logit.
    """
    linear = (
        costs.base_s
        + costs.row_s * rows
        + costs.prefill_token_s * prefill_tokens
        + costs.attention_s * query_context
        + costs.kv_token_s * kv_tokens
        + costs.draft_token_s * draft_tokens
        + costs.draft_round_s * draft_rounds
        + costs.sampled_row_s * sampled_rows
    )
    if costs.stairs is None:
        return max(costs.knee_s, linear)
    num_tokens = count_tokens(rows, prefill_tokens, draft_tokens)
    return max(floor_s(costs, rows, num_tokens), linear + cliffs_s(costs, num_tokens))


def count_tokens(rows: int, prefill_tokens: int, draft_tokens: int) -> int:
    """Tokens that a step computes, if those of the prompts are of one sequence among its `rows`."""
    return rows + max(0, prefill_tokens - 1) + draft_tokens


def is_recorded(stairs: Stairs, rows: int, num_tokens: int) -> bool:
    """Whether a step of `rows` sequences and `num_tokens` tokens in all is replayed."""
    return rows <= stairs.recorded_rows and (num_tokens <= rows or num_tokens <= stairs.recorded_tokens)


def floor_s(costs: StepCosts, rows: int, num_tokens: int) -> float:
    """Shortest time of a step of `rows` sequences and `num_tokens` tokens in all, seconds."""
    stairs = costs.stairs
    if stairs is None or is_recorded(stairs, rows, num_tokens):
        return costs.knee_s
    return max(costs.knee_s, stairs.eager_knee_s)


def cliffs_s(costs: StepCosts, num_tokens: float) -> float:
    """Seconds of the cliffs that a step of so many tokens is beyond."""
    if costs.stairs is None:
        return 0.0
    return sum(seconds for place, seconds in costs.stairs.cliffs if num_tokens > place)


def scale_costs(costs: StepCosts, factor: float) -> StepCosts:
    """Every coefficient times `factor`."""
    if factor == 1.0:
        return costs
    *seconds, stairs = astuple(costs)
    scaled = StepCosts(*(value * factor for value in seconds))
    return scaled if stairs is None else replace(scaled, stairs=_scale_stairs(stairs, factor))


def _scale_stairs(stairs: Stairs, factor: float) -> Stairs:
    cliffs = tuple((place, seconds * factor) for place, seconds in stairs.cliffs)
    return Stairs(stairs.recorded_rows, stairs.recorded_tokens, stairs.eager_knee_s * factor, cliffs)


def mean_costs(costs: Sequence[StepCosts]) -> StepCosts:
    """The mean of one or more step costs, coefficient by coefficient."""
    *columns, all_stairs = zip(*map(astuple, costs), strict=True)
    mean = StepCosts(*(sum(column) / len(costs) for column in columns))
    found = [stairs for stairs in all_stairs if stairs is not None]  # the others are of an earlier version
    return replace(mean, stairs=_mean_stairs(found)) if found else mean


def _mean_stairs(all_stairs: Sequence[Stairs]) -> Stairs:
    count = len(all_stairs)
    cliffs: dict[int, float] = {}
    for stairs in all_stairs:
        for place, seconds in stairs.cliffs:
            cliffs[place] = cliffs.get(place, 0.0) + seconds / count
    return Stairs(
        max(stairs.recorded_rows for stairs in all_stairs),
        max(stairs.recorded_tokens for stairs in all_stairs),
        sum(stairs.eager_knee_s for stairs in all_stairs) / count,
        tuple(sorted(cliffs.items())),
    )


def predict_prefill_s(
    costs: StepCosts,
    work: Work,
    uncached_tokens: int,
    cached_tokens: int,
    max_batched_tokens: int,
    scored_tokens: int = 0,
) -> float:
    """Seconds from the beginning of the next step until a new prompt is computed, behind the prefill outstanding and
    beside the running rows.

    The budget of a step, less a row of each running sequence, goes to prefill. The prompts ahead are taken as equally
    long, half done on average, so that each of their tokens attends to half of one.

    scored_tokens: tokens of the new prompt whose log probabilities are wanted. Each is a row of its own, from which
    more than the largest logit is taken, and a step has MAX_SCORED_TOKENS at most.
    """
    own = max(1, uncached_tokens)  # the last token is always computed: it makes the first logits
    ahead = work.prefill_tokens
    budget = max(1, max_batched_tokens - work.num_running)
    query_context = own * (cached_tokens + own / 2) + ahead * (ahead / max(1, work.num_waiting)) / 2
    total = own + ahead
    full_steps, rest = divmod(total, budget)
    context = query_context / total
    rows = work.num_running + 1

    seconds = 0.0
    if full_steps:
        seconds = full_steps * step_time_s(
            costs,
            rows=rows,
            prefill_tokens=budget,
            query_context=context * budget,
            kv_tokens=work.kv_tokens,
            sampled_rows=work.num_sampled,
        )
    if rest:
        seconds += step_time_s(
            costs,
            rows=rows,
            prefill_tokens=rest,
            query_context=context * rest,
            kv_tokens=work.kv_tokens,
            sampled_rows=work.num_sampled,
        )
    if scored_tokens:
        seconds += _scoring_s(costs, work, scored_tokens, full_steps + bool(rest))
    return seconds


def predict_ttft_s(
    costs: StepCosts,
    work: Work,
    uncached_tokens: int,
    cached_tokens: int,
    max_batched_tokens: int,
    scored_tokens: int = 0,
) -> float:
    """Seconds from submission to first token: half of the step that is under way, then `predict_prefill_s`."""
    prefill_s = predict_prefill_s(costs, work, uncached_tokens, cached_tokens, max_batched_tokens, scored_tokens)
    if not work.num_running and not work.prefill_tokens:
        return prefill_s
    under_way = min(work.prefill_tokens, max(1, max_batched_tokens - work.num_running))
    return (
        prefill_s
        + step_time_s(
            costs,
            rows=work.num_running,
            prefill_tokens=under_way,
            query_context=0.0,
            kv_tokens=work.kv_tokens,
            sampled_rows=work.num_sampled,
        )
        / 2
    )


def predict_row_wait_s(work: Work, max_running: int, row_hold_s: float) -> float:
    """Seconds until one more sequence is among the running ones: as many must end before as are too many, and by
    Little's law `max_running / row_hold_s` of them do in a second. row_hold_s: mean seconds for which a sequence runs.
    """
    num_before = work.num_running + work.num_waiting + 1 - max_running
    return num_before * row_hold_s / max_running if max_running and num_before > 0 else 0.0


def _scoring_s(costs: StepCosts, work: Work, scored_tokens: int, num_steps: int) -> float:
    """Seconds that a prompt takes longer because log probabilities of its tokens are wanted: their rows, and steps
    beyond the `num_steps` that its tokens alone would take."""
    more_steps = max(0, -(-scored_tokens // MAX_SCORED_TOKENS) - num_steps)
    beside_s = step_time_s(
        costs,
        rows=work.num_running,
        prefill_tokens=0,
        query_context=0.0,
        kv_tokens=work.kv_tokens,
        sampled_rows=work.num_sampled,
    )
    return scored_tokens * (costs.row_s + costs.sampled_row_s) + more_steps * beside_s


def predict_tpot_s(costs: StepCosts, work: Work, context_tokens: int = 0) -> float:
    """Seconds per output token of a sequence of `context_tokens` that joins `work`, after the prefill outstanding.

    Sequences that wait now decode by then: they count as rows.
    """
    rows = work.num_running + work.num_waiting + 1
    kv_tokens = work.kv_tokens + work.prefill_tokens + context_tokens
    return step_time_s(
        costs, rows=rows, prefill_tokens=0, query_context=0.0, kv_tokens=kv_tokens, sampled_rows=work.num_sampled
    )
