"""Drafts by prompt look-up alone (`penstock.workers.engine.lookups`): what followed the last time when the sequence's
last few tokens stood in it before."""

from penstock.workers.engine.lookups import LENGTHS, SHORTEST, look_up
from penstock.workers.engine.sequence import Chunk, Sequence


class NgramDrafter:
    """Satisfies `penstock.workers.compute.speculation.drafter.Drafter`."""

    def __init__(self, shortest: int = SHORTEST) -> None:
        """shortest: tokens that must have stood there before."""
        self._lengths = (*(length for length in LENGTHS if length > shortest), shortest)

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        return [self._propose(chunk.seq, chunk.max_drafts) for chunk in chunks]

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept but what the sequence keeps itself."""

    def _propose(self, seq: Sequence, count: int) -> list[int]:
        found = look_up(seq.packed, seq.token_ids, count, self._lengths)
        return [] if found is None else found.token_ids
