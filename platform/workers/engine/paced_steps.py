"""What a step holds so that the answers under way keep their classes' seconds per output token: how many tokens its
prompts have, which rows wait, and who is admitted. Pure; no torch, no clock.

The strictest of the answers that decode says how long the step may be (`penstock.perf.pace`). Rows yield to it, without
losing a block: those of the class batch, then those of classes without a target, then those whose target is looser, as
long as they have a credit. They come into the step where prompts have left time, those that have waited longest first
of their class; each comes after MAX_SKIPPED steps at the latest. A sequence whose row takes longer than its pace by
itself, with its context, is as one without a target. Outputs are the same tokens whenever they are chosen.

Not how prompts divide a step among each other (`prompt_budget`). Without a target that can be kept nothing here says
anything.

Decisions: docs/decisions/engine.md
"""

import math
from collections.abc import Iterable

from penstock.perf.model import step_time_s
from penstock.perf.pace import Clock, Rows, allowed_s, can_keep, fit_tokens, has_room, least_tokens, pace_s
from penstock.wire.frames import StepCosts
from penstock.workers.engine.sequence import Sequence, Status, StepShape

MAX_SKIPPED, MAX_SKIPPED_BATCH = 3, 15
"""Most steps one after the other in which a row without a target waits, of the class batch or another."""


class PacedStep:
    """The bounds of the step that is being made. token_budget: of its rows that do not wait, and of prompts."""

    def __init__(self, costs: StepCosts, limit_s: float, token_budget: int, deferred: list[Sequence]) -> None:
        self.token_budget = token_budget
        self.deferred = deferred
        """Rows that come behind the prompts, where there is time."""
        self._costs = costs
        self._limit_s = limit_s

    def choose_deferred(self, shape: StepShape) -> list[Sequence]:
        """The deferred rows for which a step of this shape has time, in the order in which they come; one at the least
        where it has nothing else, since whoever they waited for has lost its blocks."""
        count, kv_tokens, num_sampled = shape.rows, shape.kv_tokens, shape.sampled_rows
        chosen: list[Sequence] = []
        left = [seq for seq in self.deferred if seq.status is Status.RUNNING]  # others have lost their blocks since
        for seq in sorted(left, key=lambda seq: (seq.is_batch, -seq.num_skipped)):
            count, kv_tokens = count + 1, kv_tokens + seq.num_tokens
            num_sampled += seq.needs_sampling
            seconds = step_time_s(
                self._costs,
                rows=count,
                prefill_tokens=shape.prefill_tokens,
                query_context=shape.query_context,
                kv_tokens=kv_tokens,
                sampled_rows=num_sampled,
            )
            if seconds > self._limit_s and (chosen or shape.rows):
                break
            chosen.append(seq)
        return chosen


def pace_step(
    running: list[Sequence], first_waiting: Sequence | None, costs: StepCosts, token_budget: int, now: float
) -> PacedStep | None:
    """The bounds of the step that begins `now`. Returns None where no answer that decodes has a target that can be
    kept. token_budget: of any step."""
    rows = [seq for seq in running if seq.num_uncomputed_tokens == 1 and not seq.beams]
    _start_clocks(rows, now)
    paces = {seq: own_s for seq in rows if (own_s := _kept_pace(seq, costs)) is not None}
    paced = [(seq, own_s) for seq, own_s in paces.items() if seq.paced_since_s is not None]
    if not paced:
        return None
    limit_s = min(allowed_s(_clock(seq), own_s, now) for seq, own_s in paced)
    strictest_s = min(own_s for _, own_s in paced)
    deferred = [seq for seq in rows if _may_wait(seq, paces.get(seq), strictest_s, limit_s, now)]
    waiting = set(deferred)
    prompts = [seq for seq in running if seq.num_uncomputed_tokens > 1 and not seq.beams]
    fixed = _sum_rows(seq for seq in running if seq.beams or (seq.num_uncomputed_tokens == 1 and seq not in waiting))
    most = token_budget - fixed.num_rows - len(deferred)
    depth = max((seq.num_computed_tokens for seq in prompts), default=0)
    count = max(fit_tokens(costs, limit_s, fixed, depth, most), len(prompts), 1)
    others = prompts if first_waiting is None else [*prompts, first_waiting]
    if not all(seq.is_batch for seq in others):
        count = max(count, least_tokens(costs, strictest_s))
    return PacedStep(costs, limit_s, fixed.num_rows + max(0, min(count, most)), deferred)


def admits(running: list[Sequence], seq: Sequence, costs: StepCosts) -> bool:
    """Whether a waiting sequence may run beside these without breaking the strictest target among theirs and its own.
    Rows that yield to it count as often as they then come at the least."""
    seqs = [seq, *running]
    paces = {each: own_s for each in seqs if (own_s := _kept_pace(each, costs)) is not None}
    if not running or not paces:
        return True
    strictest_s = min(paces.values())
    count = kv_tokens = num_sampled = 0.0
    dearest = Rows(1)
    for other in seqs:
        row = _row(other)
        least = _least_part(other, paces.get(other), strictest_s)
        if can_keep(costs, strictest_s, row):
            part = least if _yields(other, seq, paces) else 1.0
            dearest = Rows(1, max(dearest.kv_tokens, row.kv_tokens), max(dearest.num_sampled, min(1, row.num_sampled)))
        else:
            # it breaks the target in any company: it comes as seldom as it may, and if that breaks it too, nobody waits
            part = least if can_keep(costs, strictest_s, row.times(least)) else 0.0
        count += part * row.num_rows
        kv_tokens += part * row.kv_tokens
        num_sampled += part * row.num_sampled
    return has_room(costs, strictest_s, Rows(math.ceil(count), math.ceil(kv_tokens), math.ceil(num_sampled)), dearest)


def _kept_pace(seq: Sequence, costs: StepCosts) -> float | None:
    """Seconds per token to which steps keep for a sequence; None: it has no target, or none that it can keep."""
    if seq.tpot_s is None:
        return None
    own_s = pace_s(seq.tpot_s)
    return own_s if can_keep(costs, own_s, _row(seq)) else None


def _yields(other: Sequence, seq: Sequence, paces: dict[Sequence, float]) -> bool:
    """Whether a running row waits for a sequence."""
    return other is not seq and not seq.is_batch and (seq in paces or other.is_batch)


def _least_part(seq: Sequence, own_s: float | None, strictest_s: float) -> float:
    """Part of the steps in which a row comes if it yields as much as it can. own_s: the pace that it keeps."""
    return 1 / (1 + _max_skipped(seq)) if own_s is None else min(1.0, strictest_s / own_s)


def _start_clocks(rows: Iterable[Sequence], now: float) -> None:
    """Note which answers have got their first token."""
    for seq in rows:
        if seq.paced_since_s is None and seq.num_output_tokens > 0:
            seq.paced_since_s, seq.num_unpaced_tokens = now, seq.num_output_tokens


def _sum_rows(seqs: Iterable[Sequence]) -> Rows:
    """The rows of running sequences, as if none had a prompt to be computed."""
    count = kv_tokens = num_sampled = 0
    for seq in seqs:
        row = _row(seq)
        count += row.num_rows
        kv_tokens += row.kv_tokens
        num_sampled += row.num_sampled
    return Rows(count, kv_tokens, num_sampled)


def _row(seq: Sequence) -> Rows:
    count = len(seq.beams) or 1
    return Rows(count, seq.num_context_tokens, count if seq.beams or seq.needs_sampling else 0)


def _clock(seq: Sequence) -> Clock:
    assert seq.paced_since_s is not None
    num_output = seq.num_output_tokens
    return Clock(seq.paced_since_s, num_output - seq.num_unpaced_tokens, seq.sampling.max_tokens - num_output)


def _may_wait(seq: Sequence, own_s: float | None, strictest_s: float, limit_s: float, now: float) -> bool:
    """Whether a decoding row need not be in a step that takes `limit_s`. own_s: the pace that it keeps."""
    if own_s is None:
        return seq.num_skipped < _max_skipped(seq)
    has_clock = seq.paced_since_s is not None
    return own_s > strictest_s and has_clock and _clock(seq).credit_s(own_s, now) >= limit_s


def _max_skipped(seq: Sequence) -> int:
    return MAX_SKIPPED_BATCH if seq.is_batch else MAX_SKIPPED
