"""How long a replica's step may be, and how much it may hold, so that answers under way keep their seconds per output
token (TPOT). Pure arithmetic on the step model.

TPOT is a mean over an answer, so a step is judged by the answers' clocks: an answer whose tokens came quicker than its
pace has a credit, from which a longer step is paid; one that is late has a debt, and shorter steps pay it back. The
pace is the target less SLACK, for what comes on the way to the client and for steps that are longer than predicted.
Invariants: an answer that was not late when a step began, and whose step took no longer than `allowed_s`, is not late
when it ends, whatever its length will be; prompts always get `least_tokens` of a step.

Not who is held back for it: that is the scheduler's affair (`penstock.workers.engine.paced_steps`).

Decisions: docs/decisions/engine.md
"""

from bisect import bisect_right
from math import ceil
from typing import NamedTuple

from penstock.perf.model import step_time_s
from penstock.wire.frames import StepCosts

SLACK = 0.1
"""Part of a target that steps do not use."""
MAX_CREDIT = 1.0
"""Most of its credit that one step may use, as a part of the pace: an answer stops for at most so much longer."""
LEAST_STEP = 0.5
"""Shortest step that a debt asks for, as a part of the pace: others' prompts go on meanwhile."""
ROW_SHARE = 0.8
"""Most of the pace that rows may take by themselves, for one more to be admitted: prompts need the rest."""
SPARE_SHARE = 0.5
"""Part that they may take of what the dearest row leaves of the pace, where that is more: if one row takes nearly all
of it, others come in the same step as long as they fit."""
LEAST_TOKENS, LEAST_SHARE = 16, 0.1
"""Tokens of prompts that every step computes, and time for them as a part of the pace; the larger of both holds."""

LEAST_LOOKAHEAD, ROWS_AHEAD = 2, 8
"""Sequences that wait at a replica with batch rows for the next place: so many, and one more for so many running
ones."""


def pace_s(tpot_s: float) -> float:
    """Seconds per token that steps keep to for a target."""
    return tpot_s * (1 - SLACK)


class Clock(NamedTuple):
    """An answer's progress since its first token."""

    since_s: float
    """Time of its first token, in the same clock as `now`."""
    num_tokens: int
    """Tokens that came behind it."""
    num_left: int
    """Most that can still come."""

    def credit_s(self, pace_s: float, now: float) -> float:
        """Seconds by which it is ahead of its pace; negative: its debt."""
        return self.num_tokens * pace_s - (now - self.since_s)


def allowed_s(clock: Clock, pace_s: float, now: float) -> float:
    """Longest step that may begin `now`, as far as one answer is concerned.

    A debt that its remaining tokens can't pay back is forgiven: the answer has missed its target, and others would pay
    for nothing.
    """
    credit_s = clock.credit_s(pace_s, now)
    if credit_s >= 0:
        return pace_s + min(credit_s, MAX_CREDIT * pace_s)
    if -credit_s > clock.num_left * (1 - LEAST_STEP) * pace_s:
        return pace_s
    return max(LEAST_STEP * pace_s, pace_s + credit_s)


class Rows(NamedTuple):
    """Decoding rows of a step, or what is reckoned for them."""

    num_rows: int = 0
    kv_tokens: int = 0
    num_sampled: int = 0

    def plus(self, other: "Rows") -> "Rows":
        return Rows(
            self.num_rows + other.num_rows, self.kv_tokens + other.kv_tokens, self.num_sampled + other.num_sampled
        )

    def times(self, part: float) -> "Rows":
        """What counts for rows that come in a part of the steps, rounded up."""
        return Rows(ceil(part * self.num_rows), ceil(part * self.kv_tokens), ceil(part * self.num_sampled))


def predict_step_s(costs: StepCosts, rows: Rows, prefill_tokens: int = 0, depth: int = 0) -> float:
    """Seconds of a step with a piece of a prompt that `depth` computed tokens precede."""
    return step_time_s(
        costs,
        rows=rows.num_rows + (prefill_tokens > 0),
        prefill_tokens=prefill_tokens,
        query_context=prefill_tokens * (depth + (prefill_tokens + 1) / 2),
        kv_tokens=rows.kv_tokens,
        sampled_rows=rows.num_sampled,
    )


def can_keep(costs: StepCosts, pace_s: float, row: Rows) -> bool:
    """Whether the replica is as quick as that with this row alone, context included; where it is not, holding others
    back is no use."""
    return predict_step_s(costs, row) <= pace_s


def has_room(costs: StepCosts, pace_s: float, rows: Rows, dearest: Rows) -> bool:
    """Whether steps with these rows, and a piece of a prompt now and then, keep a pace. dearest: a row that takes as
    long as any of them that keeps the pace alone."""
    alone_s = min(predict_step_s(costs, dearest), pace_s)
    return predict_step_s(costs, rows) <= max(ROW_SHARE * pace_s, alone_s + SPARE_SHARE * (pace_s - alone_s))


def fit_tokens(costs: StepCosts, limit_s: float, rows: Rows, depth: int, most: int) -> int:
    """Most tokens of prompts, up to `most`, beside these rows in a step of `limit_s`."""
    if most <= 0 or predict_step_s(costs, rows, most, depth) <= limit_s:
        return max(0, most)
    return bisect_right(range(1, most + 1), 0, key=lambda count: predict_step_s(costs, rows, count, depth) > limit_s)


def least_tokens(costs: StepCosts, pace_s: float) -> int:
    """Tokens of prompts that a step computes even if it gets longer than it may."""
    if costs.prefill_token_s <= 0:
        return LEAST_TOKENS
    return max(LEAST_TOKENS, int(LEAST_SHARE * pace_s / costs.prefill_token_s))


def count_places(num_running: int, max_lookahead: int, *, has_batch: bool) -> int:
    """Sequences that may be at a replica at once for the sake of targets: few wait there, since only a router can give
    those that wait to another one, and others their turn. One may always come, to a replica that has become idle too.
    max_lookahead: most that wait for the next place. has_batch: whether some are of the class batch, which wait long
    and keep places from others meanwhile."""
    ahead = min(max_lookahead, LEAST_LOOKAHEAD + num_running // ROWS_AHEAD) if has_batch else max_lookahead
    return num_running + max(1, ahead)
