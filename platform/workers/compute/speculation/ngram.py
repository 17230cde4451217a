"""Drafts by prompt look-up alone (`penstock.workers.engine.lookups`): what followed the last time when the sequence's
last few tokens stood in it before."""

from penstock.workers.engine.lookups import SHORTEST, Packed, continue_from, find_continuation
from penstock.workers.engine.sequence import Chunk, Sequence


class NgramDrafter:
    """Satisfies `penstock.workers.compute.speculation.drafter.Drafter`."""

    def __init__(self, shortest: int = SHORTEST) -> None:
        """shortest: tokens that must have stood there before."""
        self._shortest = shortest
        self._packed: dict[Sequence, Packed] = {}

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        return [self._propose(chunk.seq, chunk.max_drafts) for chunk in chunks]

    def forget(self, seq: Sequence) -> None:
        self._packed.pop(seq, None)

    def _propose(self, seq: Sequence, count: int) -> list[int]:
        packed = self._packed.setdefault(seq, Packed())
        packed.update(seq.token_ids)
        place = find_continuation(packed.data, self._shortest)
        return [] if place is None else continue_from(seq.token_ids, place, count)
