"""Prompt look-up: what followed the last time when the sequence's last few tokens stood in it before (Saxena 2023,
prompt-lookup-decoding).

No model and hardly any cost: the tokens are kept as bytes, and `bytes.rfind` is the search. Good where answers repeat
what was read: quotes, code, summaries.
"""

from dataclasses import dataclass, field

from penstock.wire.frames import pack_token_ids
from penstock.workers.engine.sequence import Chunk, Sequence

LONGEST, SHORTEST = 4, 2
"""Tokens of the suffix that is looked up; the longest that is found wins, then the latest place."""
WINDOW = 16384
"""Last tokens that are searched, at most: bounds the search to some microseconds a step, whatever the context."""
MAX_MISALIGNED = 8
"""Finds that begin inside a token and are passed over, before a search is given up."""

_TOKEN_BYTES = 4


@dataclass(slots=True)
class _Packed:
    """A sequence's tokens as `pack_token_ids` packs them."""

    data: bytearray = field(default_factory=bytearray)

    def update(self, token_ids: list[int]) -> None:
        """Tokens are only ever appended."""
        self.data += pack_token_ids(token_ids[len(self.data) // _TOKEN_BYTES :])


class NgramDrafter:
    """Satisfies `penstock.workers.compute.speculation.drafter.Drafter`."""

    def __init__(self, shortest: int = SHORTEST) -> None:
        """shortest: tokens that must have stood there before."""
        self._shortest = shortest
        self._packed: dict[Sequence, _Packed] = {}

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        return [self._propose(chunk.seq, chunk.max_drafts) for chunk in chunks]

    def forget(self, seq: Sequence) -> None:
        self._packed.pop(seq, None)

    def _propose(self, seq: Sequence, count: int) -> list[int]:
        packed = self._packed.setdefault(seq, _Packed())
        packed.update(seq.token_ids)
        place = find_continuation(packed.data, self._shortest)
        return [] if place is None else continue_from(seq.token_ids, place, count)


def find_continuation(data: bytearray, shortest: int) -> int | None:
    """Index of the token that came after the latest earlier occurrence of the longest suffix found. Returns None if no
    suffix is found."""
    for length in range(LONGEST, shortest - 1, -1):
        place = _find(data, length)
        if place is not None:
            return place + length
    return None


def _find(data: bytearray, length: int) -> int | None:
    """Where, in tokens, the last `length` tokens begin in what is before the last one."""
    suffix = data[-length * _TOKEN_BYTES :]
    if len(suffix) < length * _TOKEN_BYTES:
        return None
    end = len(data) - _TOKEN_BYTES
    first = max(0, len(data) - WINDOW * _TOKEN_BYTES)
    for _ in range(MAX_MISALIGNED):
        found = data.rfind(suffix, first, end)
        if found < 0:
            return None
        if not found % _TOKEN_BYTES:
            return found // _TOKEN_BYTES
        end = found + len(suffix) - 1
    return None


def continue_from(token_ids: list[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on; beyond the end they repeat themselves."""
    period = len(token_ids) - place
    return [token_ids[place + step % period] for step in range(count)]
