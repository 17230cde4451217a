"""The seam between a runner and what guesses tokens for it.

Not a sampler: whatever is guessed, the target's own choice stands, so a drafter can make answers sooner and never other
ones.
"""

from typing import Protocol

from penstock.workers.engine.sequence import Chunk, Sequence


class Drafter(Protocol):
    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        """For each chunk guesses of the tokens behind its sequence's last, at most `max_drafts` of them, and none where
        it has no idea.

        Every sequence holds blocks for its tokens and `max_drafts` more.
        """

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended; called once, also if it was never drafted for."""
