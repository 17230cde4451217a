"""How many tokens to draft for each sequence of a step: as many as pay, none where none does. Pure.

A draft's j-th token is kept with probability a**j, a being the estimated chance that the target agrees with one more
proposal. Tokens a step gains are (decode rows + sum of those), its time is the performance model's. For every greatest
length, drafts are taken in order of worth for as long as the ratio, the goodput, rises (the criterion of SmartSpec, Liu
et al. 2024, arXiv 2406.14066, with a length for each sequence).

Not a drafter, and without influence on an answer's tokens: any length gives the same ones.
"""

from typing import NamedTuple

import msgspec

from penstock.perf.model import cliffs_s, count_tokens, floor_s, step_time_s
from penstock.wire.frames import StepCosts
from penstock.workers.engine.sequence import Chunk, Sequence, StepShape

FIRST_ACCEPTANCE = 0.7
"""Chance that a proposal is accepted, assumed of a pool's drafter before anything is measured."""
SEQUENCE_RATE, POOL_RATE = 0.1, 0.03
"""Share of the way that one verified proposal moves the estimate of its sequence, and that of the pool, where a new
sequence starts."""
MAX_ACCEPTANCE = 0.98
"""Upper bound of an estimate when drafts are weighed."""
FORGET_RATE = 0.01
"""Share of the way that a step without a draft moves a sequence's estimate towards the pool's: answers change their
nature."""
RETRY_EVERY = 64
"""Number of steps in which no draft paid until one token is drafted for one sequence all the same: the estimate of what
is never tried can't change."""


class Proposal(NamedTuple):
    """A draft's `length`-th token. Sorted, the best comes first, and none before the shorter ones of its sequence."""

    negative_worth: float
    """Minus the chance that the token is kept, -1 to 0."""
    place: int
    """Index of the sequence in the batch; 0 is the first."""
    length: int
    """Number of the draft's tokens up to this one, 1 or more."""
    needs_sampling: bool = False
    """Whether its sequence's tokens take more than the largest logit."""


class DraftLengths:
    """Chooses how many tokens to draft, learns how often they are accepted, and counts both for the metrics."""

    def __init__(self, max_draft_tokens: int, *, is_adaptive: bool = True) -> None:
        """max_draft_tokens: most tokens of one sequence in a step. is_adaptive: False drafts as much as is allowed,
        whether it pays or not."""
        self.max_draft_tokens = max_draft_tokens
        self._is_adaptive = is_adaptive
        self._num_idle_steps = 0
        self.num_drafted = 0
        """Draft tokens verified since the start."""
        self.num_accepted = 0
        """Draft tokens accepted since the start."""
        self._acceptance = FIRST_ACCEPTANCE

    def choose(
        self, chunks: list[Chunk], caps: list[int], shape: StepShape, costs: StepCosts, budget: int
    ) -> list[int]:
        """Draft tokens for each of the decoding `chunks`, at most caps[i], together at most `budget` >= 0.

        shape: the step's without drafts. Costs that are all 0 are unknown: everything pays.
        """
        worths = (enumerate(self._worths(chunk.seq, caps[place]), 1) for place, chunk in enumerate(chunks))
        proposals = sorted(
            Proposal(-worth, place, length, chunks[place].seq.needs_sampling)
            for place, row in enumerate(worths)
            for length, worth in row
        )
        chosen = choose_proposals(proposals, budget, shape, costs) if self._is_adaptive else proposals[:budget]
        chosen = chosen or proposals[: min(budget, self._num_retried())]
        self._num_idle_steps = 0 if chosen else self._num_idle_steps + 1
        counts = [0] * len(chunks)
        for proposal in chosen:
            counts[proposal.place] += 1
        for count, chunk in zip(counts, chunks, strict=True):
            if not count and chunk.seq.acceptance is not None:
                chunk.seq.acceptance += FORGET_RATE * (self._acceptance - chunk.seq.acceptance)
        return counts

    def record(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn from a verified draft: its first `num_accepted` tokens were kept; the next one, if there was one, was
        not."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        own = self._acceptance if seq.acceptance is None else seq.acceptance
        for place in range(min(num_drafted, num_accepted + 1)):
            is_accepted = place < num_accepted
            own += SEQUENCE_RATE * (is_accepted - own)
            self._acceptance += POOL_RATE * (is_accepted - self._acceptance)
        seq.acceptance = own

    def _worths(self, seq: Sequence, cap: int) -> list[float]:
        acceptance = min(MAX_ACCEPTANCE, self._acceptance if seq.acceptance is None else seq.acceptance)
        return [acceptance**length for length in range(1, cap + 1)]

    def _num_retried(self) -> int:
        return 1 if self._num_idle_steps >= RETRY_EVERY else 0


def choose_proposals(proposals: list[Proposal], budget: int, shape: StepShape, costs: StepCosts) -> list[Proposal]:
    """The proposals, at most `budget`, that give the most tokens in the least time; of equals, the most. They come in
    with the best first."""
    # where rounds cost nothing, the greatest length decides nothing
    depths = (
        range(1, max((proposal.length for proposal in proposals), default=0) + 1)
        if costs.draft_round_s
        else (max((g.length for g in proposals), default=0),)
    )
    line = msgspec.structs.replace(costs, knee_s=0.0, stairs=None)
    plain_s = step_time_s(
        line,
        rows=shape.rows,
        prefill_tokens=shape.prefill_tokens,
        query_context=shape.query_context,
        kv_tokens=shape.kv_tokens,
        sampled_rows=shape.sampled_rows,
    )
    num_computed = count_tokens(shape.rows, shape.prefill_tokens, 0)
    best: list[Proposal] = []
    best_tokens, best_s = float(shape.decode_rows), _step_s(costs, shape.rows, num_computed, plain_s)
    for depth in depths:
        candidates = [proposal for proposal in proposals if proposal.length <= depth][:budget]
        tokens, seconds = float(shape.decode_rows), plain_s + depth * costs.draft_round_s
        for count, proposal in enumerate(candidates, 1):
            tokens -= proposal.negative_worth
            seconds += costs.draft_token_s + costs.sampled_row_s * proposal.needs_sampling
            step_s = _step_s(costs, shape.rows, num_computed + count, seconds)
            if tokens * best_s >= best_tokens * step_s:
                best, best_tokens, best_s = candidates[:count], tokens, step_s
    return best


def _step_s(costs: StepCosts, rows: int, num_tokens: int, line_s: float) -> float:
    """Seconds of a step for which the model's line gives `line_s`: drafts can make one that is recorded one that is
    not."""
    return max(floor_s(costs, rows, num_tokens), line_s + cliffs_s(costs, num_tokens))
