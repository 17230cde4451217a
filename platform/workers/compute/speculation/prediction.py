"""Drafts out of a request's own prediction of its answer (`Sequence.prediction`): what stands there behind the place
that the answer has reached.

No model and hardly any cost. The place moves on with each token that agrees; where one does not, it is found again by
the answer's last tokens, after the old place if they stand there, else anywhere: so an answer that leaves out, puts in
or changes something is followed again behind it. What no prediction can guess is left to the pool's own drafter, if it
has one.
"""

from dataclasses import dataclass, field

from penstock.wire.frames import pack_token_ids
from penstock.workers.compute.speculation.drafter import Drafter
from penstock.workers.engine.sequence import Chunk, Sequence

LONGEST, SHORTEST = 8, 2
"""Tokens of the answer's end that are looked for; the longest that are found win."""
_TOKEN_BYTES = 4


@dataclass(slots=True)
class _Place:
    """How far an answer has come in its prediction."""

    data: bytes
    """The prediction, packed."""
    num_seen: int = 0
    """Tokens of the answer that have been compared."""
    next: int = 0
    """Index in the prediction of what comes next, or after which to look."""
    is_found: bool = True
    tail: list[int] = field(default_factory=list)
    """Last tokens of the answer, at most LONGEST."""


class PredictionDrafter:
    """Satisfies `penstock.workers.compute.speculation.drafter.Drafter`."""

    def __init__(self, other: Drafter | None = None) -> None:
        """other: the pool's own drafter; None: it has none."""
        self._other = other
        self._places: dict[Sequence, _Place] = {}

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        drafts = [self._propose(chunk.seq, chunk.max_drafts) if chunk.seq.prediction else [] for chunk in chunks]
        if self._other is None:
            return drafts
        left = [index for index, draft in enumerate(drafts) if not draft]
        if left:
            for index, draft in zip(left, self._other.propose([chunks[index] for index in left]), strict=True):
                drafts[index] = draft
        return drafts

    def forget(self, seq: Sequence) -> None:
        self._places.pop(seq, None)
        if self._other is not None:
            self._other.forget(seq)

    def _propose(self, seq: Sequence, count: int) -> list[int]:
        place = self._places.get(seq)
        if place is None:
            place = self._places[seq] = _Place(pack_token_ids(seq.prediction))
        follow(place, seq.prediction, seq.token_ids[seq.num_prompt_tokens + place.num_seen :])
        return seq.prediction[place.next : place.next + count] if place.is_found else []


def follow(place: _Place, prediction: list[int], output: list[int]) -> None:
    """Move the place on by what the answer has gained."""
    for token_id in output:
        if place.is_found and prediction[place.next : place.next + 1] == [token_id]:
            place.next += 1
        else:
            place.is_found = False
    place.num_seen += len(output)
    place.tail = [*place.tail, *output][-LONGEST:]
    if not place.is_found:
        found = _find(place)
        if found is not None:
            place.next, place.is_found = found, True


def _find(place: _Place) -> int | None:
    """Index in the prediction of what comes behind the answer's last tokens."""
    for length in range(len(place.tail), SHORTEST - 1, -1):
        wanted = pack_token_ids(place.tail[-length:])
        for first in (max(0, place.next - length), 0):
            found = _find_token(place.data, wanted, first)
            if found is not None:
                return found + length
    return None


def _find_token(data: bytes, wanted: bytes, first: int) -> int | None:
    """Index of the first token at or after `first` from which on `wanted` stands in the data."""
    at = data.find(wanted, first * _TOKEN_BYTES)
    while at >= 0 and at % _TOKEN_BYTES:
        at = data.find(wanted, at + 1)
    return None if at < 0 else at // _TOKEN_BYTES
