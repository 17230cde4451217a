"""The seconds of a replica that a request takes: what it will cost, before anything of it has run. Pure.

Not the division of steps that have run (the engine has their rows), but the same rule on predicted ones: each row has
its own coefficients, and what does not depend on rows (the base, a floor, cliffs) is divided evenly among the rows.
Invariants: finite, not negative; rows that are all alike divide a step's whole time.
"""

from penstock.perf.model import Work, step_time_s
from penstock.wire.frames import StepCosts


def predict_share_s(
    costs: StepCosts,
    work: Work,
    uncached_tokens: int,
    cached_tokens: int,
    output_tokens: float,
    max_batched_tokens: int,
) -> float:
    """Seconds of steps that are a new request's share at a replica that has `work`: its prompt beside the rows that
    run, then its further tokens beside those and what waits.

    What is outstanding before it costs it nothing: that is time, and in steps of others. Its context is taken as it is
    in the middle of its answer; its batch, as it is now.
    """
    own = max(1, uncached_tokens)
    budget = max(1, max_batched_tokens - work.num_running)
    full_steps, rest = divmod(own, budget)
    # of each token of the prompt, whatever step it is in
    context = cached_tokens + own / 2
    seconds = full_steps * _prefill_share_s(costs, work, budget, context)
    if rest:
        seconds += _prefill_share_s(costs, work, rest, context)
    further = max(0.0, output_tokens - 1)
    return seconds + further * _decode_share_s(costs, work, cached_tokens + own + output_tokens / 2)


def _prefill_share_s(costs: StepCosts, work: Work, num_tokens: int, context: float) -> float:
    """Share of a step that computes so many tokens of the prompt beside what runs."""
    rows = work.num_running + 1
    own_s = costs.row_s + num_tokens * (costs.prefill_token_s + costs.attention_s * context)
    others_s = _rows_s(costs, work, work.num_running, work.kv_tokens)
    step_s = step_time_s(
        costs,
        rows=rows,
        prefill_tokens=num_tokens,
        query_context=num_tokens * context,
        kv_tokens=work.kv_tokens,
        sampled_rows=work.num_sampled,
    )
    return own_s + (step_s - own_s - others_s) / rows


def _decode_share_s(costs: StepCosts, work: Work, context: float) -> float:
    """Share of a step that computes one token of the answer beside what runs and what waits now."""
    num_others = work.num_running + work.num_waiting
    kv_tokens = work.kv_tokens + work.prefill_tokens
    own_s = costs.row_s + costs.kv_token_s * context
    others_s = _rows_s(costs, work, num_others, kv_tokens)
    step_s = step_time_s(
        costs,
        rows=num_others + 1,
        prefill_tokens=0,
        query_context=0.0,
        kv_tokens=kv_tokens + int(context),
        sampled_rows=work.num_sampled,
    )
    return own_s + (step_s - own_s - others_s) / (num_others + 1)


def _rows_s(costs: StepCosts, work: Work, rows: int, kv_tokens: int) -> float:
    """What so many decoding rows take by their own coefficients."""
    return costs.row_s * rows + costs.kv_token_s * kv_tokens + costs.sampled_row_s * work.num_sampled
