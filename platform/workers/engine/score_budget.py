"""The tokens of prompts that one step scores: whose log probabilities it computes. Pure; no torch, no clock.

Each needs a row of logits, over the whole vocabulary, and a step holds those of MAX_SCORED_TOKENS at most, whatever it
computes beside them.
"""

from penstock.perf.model import MAX_SCORED_TOKENS
from penstock.workers.engine.sequence import Chunk, Sequence


class ScoreBudget:
    """What a step may still score."""

    def __init__(self) -> None:
        self._left = MAX_SCORED_TOKENS

    def bound(self, seq: Sequence, start: int, count: int, *, is_shared: bool = False) -> int:
        """Number of the `count` tokens from `start` on that the step may compute. is_shared: others have prompts scored
        too, and are left half of the budget."""
        if not seq.lacks_scores:
            return count
        most = -(-self._left // 2) if is_shared else self._left
        scored = Chunk(seq, start, count).scored
        return count if len(scored) <= most else scored[most] - start

    def take(self, seq: Sequence, start: int, count: int) -> None:
        if seq.lacks_scores:
            self._left -= len(Chunk(seq, start, count).scored)
