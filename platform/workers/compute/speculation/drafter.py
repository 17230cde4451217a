"""The seam between a runner and what proposes tokens for it.

Not a sampler: whatever is proposed, the target's own choice stands, so a drafter can make answers sooner and never
different.
"""

from typing import Protocol

from penstock.workers.engine.sequence import Chunk, Sequence


class Drafter(Protocol):
    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        """Proposals for each chunk of the tokens behind its sequence's last: at most `max_drafts` of them, and none
        where the drafter has no idea.

        Every sequence holds blocks for its tokens and `max_drafts` more.
        """

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept of a sequence that has ended; called once, also if it was never drafted for."""
