"""Where the engine's time goes: each step's is divided among its sequences, the rest is in accounts. No torch.

Not the time itself (the engine reads its clock) and no prices. A step lasts from the end of the one before, or from the
engine's waking, to its own end: so the host's work between steps is part of them, and where a step is launched behind
one that is under way, each second still counts once. Its time is divided by what the step model says of its rows, all
scaled so that the sum is the measured time:

* each row has its own coefficients (row, prompt tokens, attention, context read, drafts, sampling);
* what does not depend on rows (the base, what a floor or a recording adds to it) is divided evenly among the rows:
  every row needs the step, and the weights are read for all of them at once;
* passes of the drafter are divided by the tokens that they have drafted.

A search pays for all its beams, a sequence that starts over for what it computes again. A row for nothing, of a
sequence that ended while the step was under way, is paid by the other rows of that step: who has ended has had its last
report. Invariant: every second since the beginning is in exactly one account, and `steps_s` is the sum of all
sequences' shares.

Decisions: docs/decisions/cost.md
"""

import threading
from collections.abc import Iterable
from enum import Enum

from penstock.perf.model import cliffs_s, floor_s
from penstock.wire.frames import StepCosts, TimeAccounts
from penstock.workers.engine.sequence import Chunk, Sequence, Step


class Rest(Enum):
    """The account that time without a step goes to."""

    IDLE = "idle"
    DRAIN = "drain"
    FAILED = "failed"


class TimeShares:
    """The accounts of one engine, and who divides its steps. The engine's thread calls it; any thread may read
    `accounts`. Times are seconds of one clock."""

    def __init__(self, began_s: float) -> None:
        """began_s: time at which the replica began to exist."""
        self._lock = threading.Lock()
        self._at_s = began_s
        """Time up to which every second is in an account."""
        self._start_s = self._steps_s = self._idle_s = self._drain_s = self._failed_s = 0.0
        self._rest = Rest.IDLE
        self._is_resting = False

    def accounts(self, now: float) -> TimeAccounts:
        """The accounts as of `now`, but for a step that is under way."""
        with self._lock:
            rest_s = {Rest.IDLE: self._idle_s, Rest.DRAIN: self._drain_s, Rest.FAILED: self._failed_s}
            if self._is_resting:
                rest_s[self._rest] += max(0.0, now - self._at_s)
            return TimeAccounts(
                self._start_s, self._steps_s, rest_s[Rest.IDLE], rest_s[Rest.DRAIN], rest_s[Rest.FAILED]
            )

    def start(self, now: float) -> None:
        """End the start: from now on the engine serves."""
        with self._lock:
            self._start_s += self._pass(now)

    def rest(self) -> None:
        """Begin to wait for work: what has passed since the last step belongs to the wait."""
        self._is_resting = True

    def wake(self, now: float) -> None:
        """End the wait."""
        with self._lock:
            self._is_resting = False
            self._book_rest(self._pass(now))

    def rest_as(self, rest: Rest) -> None:
        """Count waits in another account from now on; one that has failed stays so."""
        if self._rest is not Rest.FAILED:
            self._rest = rest

    def fail(self, now: float) -> None:
        """End a step of which nothing came."""
        with self._lock:
            self._failed_s += self._pass(now)

    def end_step(self, step: Step, costs: StepCosts, now: float) -> None:
        """End a step and divide its time; call it before the step is committed."""
        self._end(now, divide(step, costs, now - self._at_s))

    def end_weighted(self, rows: Iterable[tuple[Sequence, float]], costs: StepCosts, now: float) -> None:
        """End a step of which only the rows are known, and what each of them took, seconds."""
        pairs = list(rows)
        seqs, weights = [seq for seq, _ in pairs], [weight for _, weight in pairs]
        _give(seqs, weights, max(costs.base_s, costs.knee_s - sum(weights)), now - self._at_s)
        self._end(now, bool(seqs))

    def _end(self, now: float, is_divided: bool) -> None:
        with self._lock:
            if is_divided:
                self._steps_s += self._pass(now)
            else:
                self._failed_s += self._pass(now)

    def _pass(self, now: float) -> float:
        seconds, self._at_s = now - self._at_s, now
        return seconds

    def _book_rest(self, seconds: float) -> None:
        if self._rest is Rest.IDLE:
            self._idle_s += seconds
        elif self._rest is Rest.DRAIN:
            self._drain_s += seconds
        else:
            self._failed_s += seconds


def divide(step: Step, costs: StepCosts, seconds: float) -> bool:
    """Add to each sequence of a step its share of the step's time. Returns False if all of them have ended."""
    return _divide_decode(step.chunks, costs, seconds) or _divide_any(step.chunks, costs, seconds)


def _divide_decode(chunks: list[Chunk], costs: StepCosts, seconds: float) -> bool:
    """Divide a step in which every sequence decodes a token and none has ended, which is what most steps are; two
    quick passes and nothing held. Returns False for any other step, of which nothing is changed."""
    num_context = num_sampled = 0
    for chunk in chunks:
        seq = chunk.seq
        if chunk.num_tokens != 1 or chunk.draft or seq.finish is not None or seq.leader is not None:
            return False
        num_context += chunk.start
        if seq.needs_sampling:
            num_sampled += 1
    num_rows = len(chunks)
    row_s, kv_token_s, sampled_row_s = costs.row_s + costs.kv_token_s, costs.kv_token_s, costs.sampled_row_s
    weighed_s = row_s * num_rows + kv_token_s * num_context + sampled_row_s * num_sampled
    total_s = weighed_s + _fixed_s(costs, weighed_s, num_rows, num_rows)
    if not num_rows or not total_s > 0:
        return False
    scale = seconds / total_s
    each_s = seconds / num_rows - scale * (weighed_s / num_rows - row_s)
    context_s, sampled_s = scale * kv_token_s, scale * sampled_row_s
    if num_sampled in (0, num_rows):
        if num_sampled:
            each_s += sampled_s
        for chunk in chunks:
            chunk.seq.step_s += each_s + context_s * chunk.start
    else:
        for chunk in chunks:
            seq = chunk.seq
            seq.step_s += each_s + context_s * chunk.start + (sampled_s if seq.needs_sampling else 0.0)
    return True


def _divide_any(chunks: list[Chunk], costs: StepCosts, seconds: float) -> bool:
    """Divide any step. Returns False if all sequences have ended."""
    row_s, kv_token_s, sampled_row_s = costs.row_s, costs.kv_token_s, costs.sampled_row_s
    seqs: list[Sequence] = []
    weights: list[float] = []
    drafted: list[tuple[int, int]] = []
    num_prompt_tokens = num_looked_up = 0
    for chunk in chunks:
        row = chunk.seq
        seq = row if row.leader is None else row.leader
        if seq.finish is not None:
            continue
        if chunk.num_tokens == 1:
            weight = row_s + kv_token_s * (chunk.start + 1)
            if chunk.draft and chunk.num_matched:
                weight += (row_s + sampled_row_s * row.needs_sampling) * len(chunk.draft)
                num_looked_up += len(chunk.draft)
            elif chunk.draft:
                drafted.append((len(weights), len(chunk.draft)))
        else:
            weight = row_s + weigh_prompt(chunk, costs)
            num_prompt_tokens += chunk.num_tokens
        if row.needs_sampling:
            weight += sampled_row_s
        seqs.append(seq)
        weights.append(weight)
    if not seqs:
        return False
    num_drafted = sum([count for _, count in drafted])
    if num_drafted:
        each_s = costs.draft_token_s + costs.draft_round_s * max(count for _, count in drafted) / num_drafted
        for index, count in drafted:
            sampled_s = sampled_row_s if seqs[index].needs_sampling else 0.0
            weights[index] += count * (each_s + sampled_s)
    num_tokens = len(seqs) + num_prompt_tokens + num_drafted + num_looked_up
    _give(seqs, weights, _fixed_s(costs, sum(weights), len(seqs), num_tokens), seconds)
    return True


def _fixed_s(costs: StepCosts, weighed_s: float, num_rows: int, num_tokens: int) -> float:
    """What a step takes by the model beyond what its rows weigh, seconds."""
    if costs.stairs is None:
        return max(costs.base_s, costs.knee_s - weighed_s)
    return max(costs.base_s + cliffs_s(costs, num_tokens), floor_s(costs, num_rows, num_tokens) - weighed_s)


def weigh_prompt(chunk: Chunk, costs: StepCosts) -> float:
    """What a piece of a prompt takes beyond its row, by the step model, seconds."""
    count = chunk.num_tokens
    query_context = count * (chunk.start + (count + 1) / 2)
    seconds = costs.prefill_token_s * count + costs.attention_s * query_context
    if chunk.seq.sampling.prompt_logprobs is not None:
        seconds += (costs.row_s + costs.sampled_row_s) * len(chunk.scored)
    return seconds


def _give(seqs: list[Sequence], weights: list[float], fixed_s: float, seconds: float) -> None:
    """Add to each sequence its share of `seconds`. weights: what each row took by the model, seconds; fixed_s: what the
    rows took together."""
    total_s = sum(weights) + fixed_s
    if total_s > 0:
        scale = seconds / total_s
        each_s = scale * fixed_s / len(seqs) if seqs else 0.0
    else:
        scale, each_s = 0.0, seconds / len(seqs) if seqs else 0.0
    for seq, weight in zip(seqs, weights, strict=True):
        seq.step_s += each_s + scale * weight
