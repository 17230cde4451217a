"""What each prompt may take of the step that is being made: of its token budget, beside others of its tenant, other
tenants and the class batch, and of the tokens that it scores. Pure; no torch, no clock.

Not who is admitted, and not how tenants divide the budget (`prompt_shares`). It is made anew for each step.
"""

import itertools
from collections import deque

from penstock.wire.frames import StepCosts
from penstock.workers.engine.prompt_shares import divide, tenant_of
from penstock.workers.engine.score_budget import ScoreBudget
from penstock.workers.engine.sequence import Chunk, Sequence

BATCH_PROMPT_S = 0.020
"""Most time that prompts of the class batch take of a step, as far as is known, while there are sequences of other
classes: so long these may wait for it."""


class PromptBudget:
    """The prompts of a step and what is left for them."""

    def __init__(
        self,
        running: list[Sequence],
        waiting: deque[Sequence],
        token_budget: int,
        costs: StepCosts,
        *,
        num_candidates: int,
    ) -> None:
        """running, waiting: the scheduler's own, as they change. token_budget: of the step. num_candidates: waiting
        sequences, the first ones, that count as those who want tokens too."""
        self.partial: list[Chunk] = []
        """Prompts of which not all tokens are in the step."""
        self._running = running
        self._waiting = waiting
        self._num_candidates = num_candidates
        self._shares: dict[str, int] | None = None
        """Tokens that are left for the prompts of each tenant; None: one tenant alone has any."""
        self._scores = ScoreBudget()
        self._batch_left = _find_batch_budget(running, waiting, token_budget, costs)
        """Tokens that are left for prompts of the class batch; each may have one all the same."""

    def divide(self, budget: int) -> None:
        """Divide tokens among tenants with prompts that run, or wait and may be admitted. Batch rows have no part in
        it: they get what others leave."""
        prompts = (seq for seq in self._running if seq.num_uncomputed_tokens > 1)
        candidates = itertools.chain(prompts, itertools.islice(self._waiting, self._num_candidates))
        self._shares = divide(budget, (seq for seq in candidates if not seq.is_batch))

    def share(self, seq: Sequence, budget: int, position: int) -> int:
        """Most tokens of the budget that a prompt may take before others have had their turn: those that run from
        `position` on, and those that wait. Where tenants divide the budget, others of its tenant. Batch rows leave all
        but one to others; others leave nothing to batch."""
        if seq.is_batch and self._waiting and not self._waiting[0].is_batch:
            return min(budget, 1)
        if seq.is_batch:
            budget = min(budget, max(1, self._batch_left))
        shares = None if seq.is_batch else self._shares
        num_waiting = 1
        if shares is not None:
            budget = min(budget, shares.get(tenant_of(seq), 0))
            num_waiting = self._num_candidates
        waiting = (other for other in itertools.islice(self._waiting, num_waiting) if other is not seq)
        later = itertools.chain(itertools.islice(self._running, position, None), waiting)
        is_shared = any(
            other.num_uncomputed_tokens > 1
            and other.is_batch <= seq.is_batch
            and (shares is None or tenant_of(other) == tenant_of(seq))
            for other in later
        )
        return -(-budget // 2) if is_shared else budget

    def bound_scored(self, seq: Sequence, start: int, count: int) -> int:
        """Number of the `count` tokens from `start` on that the step may compute, some of which are to be scored."""
        if not seq.lacks_scores:
            return count
        others = itertools.chain(self._running, itertools.islice(self._waiting, self._num_candidates))
        is_shared = any(other.lacks_scores and other is not seq for other in others)
        return self._scores.bound(seq, start, count, is_shared=is_shared)

    def take(self, seq: Sequence, start: int, count: int) -> None:
        """Note that the step computes the `count` tokens from `start` on."""
        if seq.is_batch:
            self._batch_left -= count if count > 1 else 0
        elif self._shares is not None:
            tenant = tenant_of(seq)
            self._shares[tenant] = max(0, self._shares.get(tenant, 0) - count)
        self._scores.take(seq, start, count)

    def num_partial_beside(self, seq: Sequence) -> int:
        """Prompts that are computed in part in this step and count for a waiting sequence."""
        return sum(
            chunk.seq.is_batch <= seq.is_batch and (self._shares is None or tenant_of(chunk.seq) == tenant_of(seq))
            for chunk in self.partial
        )

    def top_up(self, budget: int) -> int:
        """Give the prompts of the step what nobody else wanted of the budget, batch ones last; returns what is left.
        They hold the blocks of all their tokens."""
        for chunk in sorted(self.partial, key=lambda chunk: chunk.seq.is_batch):
            count = min(budget, chunk.seq.num_tokens - chunk.end)
            if chunk.seq.is_batch:
                count = min(count, max(0, self._batch_left))
            count = self._scores.bound(chunk.seq, chunk.end, count)
            self.take(chunk.seq, chunk.end, count)
            chunk.num_tokens += count
            budget -= count
        return budget


def _find_batch_budget(running: list[Sequence], waiting: deque[Sequence], budget: int, costs: StepCosts) -> int:
    """Tokens that prompts of the class batch may have of a step: whatever comes meanwhile, or shares the step,
    waits for its end."""
    has_others = any(seqs and not seqs[0].is_batch for seqs in (running, waiting))
    if not has_others or costs.prefill_token_s <= 0:
        return budget
    return min(budget, int(BATCH_PROMPT_S / costs.prefill_token_s))
