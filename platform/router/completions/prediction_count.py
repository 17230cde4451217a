"""How much of a chat's prediction stands in its answer, by the answer's tokens as they come. Pure.

Not the drafts: what is counted is the same whichever replica answers, however busy it is and however often the answer
went on elsewhere, also where nobody drafted. Meaning: OpenAI's API reference, `completion_tokens_details` of a chat
completion's usage ("the number of tokens in the prediction that appeared in the completion", and those that did not).
"""

from bisect import bisect_left
from collections.abc import Iterable

LONGEST, SHORTEST = 8, 2
"""Tokens of the answer's end that are looked for where the answer has left the prediction; the longest that are found
win."""
FEW = 8
"""Places that are compared one by one; more are sorted by the token before them."""


class PredictedTokens:
    """The tokens of a prediction, and where each run of them stands; shared by the choices of a request.

    Places are collected when an answer first leaves the prediction, and sorted further where a longer run is asked for:
    all in all at most LONGEST times for each token of the prediction, however many answers ask, so a token of an answer
    costs a few look-ups.
    """

    __slots__ = ("_places", "_sorted", "text")

    def __init__(self, prediction: bytes) -> None:
        """prediction: packed token ids, see `penstock.wire.frames.pack_token_ids`; a character each from here on, of
        which runs are compared faster than of numbers."""
        self.text = prediction.decode("utf-32-le", "surrogatepass")
        self._places: dict[str, list[int]] = {}
        """Where runs end, by the run; each list ascends."""
        self._sorted: set[str] = set()
        """Runs whose places are also listed by the token before them; "" has those of SHORTEST tokens."""

    def find(self, tail: str) -> tuple[int, list[int]]:
        """The longest end of `tail`, of at least SHORTEST tokens, that stands in the prediction: its length and the
        places behind it, ascending; 0 and none if there is no such end."""
        length, places, found = 0, list[int](), self._shortest(tail[-SHORTEST:])
        while found:
            length, places = max(length + 1, SHORTEST), found
            if length == len(tail):
                break
            found = self._narrow(tail[-length:], tail[-length - 1 :], places)
        return length, places

    def _shortest(self, run: str) -> list[int]:
        if "" not in self._sorted:
            self._sort("", range(SHORTEST, len(self.text) + 1), SHORTEST)
        return self._places.get(run, [])

    def _narrow(self, known: str, run: str, places: list[int]) -> list[int]:
        """The places of `known` at which `run`, a token longer, stands too."""
        if len(places) <= FEW:
            return [place for place in places if self.text.endswith(run, 0, place)]
        if known not in self._sorted:
            self._sort(known, places, len(run))
        return self._places.get(run, [])

    def _sort(self, known: str, places: Iterable[int], length: int) -> None:
        """List the places of a run by the runs of `length` tokens that end there."""
        self._sorted.add(known)
        for place in places:
            if place >= length:
                self._places.setdefault(self.text[place - length : place], []).append(place)


class PredictionCount:
    """Counts the tokens of a prediction that stand in one answer, in the order of the answer: from the beginning on as
    long as they agree, and after a difference where at least SHORTEST tokens in a row do. Each token of the prediction
    and of the answer counts once. Invariant: `num_accepted` is at most the number of either's tokens."""

    __slots__ = ("_accepted", "_is_found", "_next", "_num_lost", "_prediction", "_tail", "num_accepted")

    def __init__(self, prediction: PredictedTokens) -> None:
        self._prediction = prediction
        self._accepted = bytearray(len(prediction.text))
        self._next = 0
        """Place in the prediction of what comes next, or after which to look."""
        self._is_found = True
        """Whether the answer is there; else it has left the prediction."""
        self._num_lost = 0
        """Tokens of the answer since it left the prediction."""
        self._tail = ""
        self.num_accepted = 0
        """Tokens of the prediction that stand in the answer so far."""

    @property
    def num_rejected(self) -> int:
        """Tokens of the prediction that do not stand in the answer so far."""
        return len(self._prediction.text) - self.num_accepted

    def push(self, token_ids: list[int]) -> None:
        """Take the next tokens of the answer."""
        for token_id in token_ids:
            token = chr(token_id)
            self._tail = self._tail[1 - LONGEST :] + token
            if self._is_found and self._prediction.text[self._next : self._next + 1] == token:
                self._accept(self._next, 1)
            else:
                self._num_lost += 1
                self._find()

    def _find(self) -> None:
        """Look for the answer's end in the prediction: behind the place that was reached, else anywhere."""
        self._is_found = False
        length, places = self._prediction.find(self._tail)
        if not places:
            return
        num_new = min(length, self._num_lost)
        behind = bisect_left(places, self._next + num_new)
        self._accept(places[behind if behind < len(places) else 0] - num_new, num_new)

    def _accept(self, first: int, count: int) -> None:
        self.num_accepted += count - sum(self._accepted[first : first + count])
        self._accepted[first : first + count] = bytes([1]) * count
        self._next, self._is_found, self._num_lost = first + count, True, 0
