"""How much of a chat's prediction stands in its answer, by the answer's tokens as they come. Pure.

Not the drafts: what is counted is the same whichever replica answers, however busy it is and however often the answer
went on elsewhere, also where nobody drafted. Meaning: OpenAI's API reference, `completion_tokens_details` of a chat
completion's usage ("the number of tokens in the prediction that appeared in the completion", and those that did not).
"""

LONGEST, SHORTEST = 8, 2
"""Tokens of the answer's end that are looked for where the answer has left the prediction; the longest that are found
win."""


class PredictionCount:
    """Counts the tokens of a prediction that stand in one answer, in the order of the answer: from the beginning on as
    long as they agree, and after a difference where at least SHORTEST tokens in a row do. Each token of the prediction
    and of the answer counts once. Invariant: `num_accepted` is at most the number of either's tokens."""

    __slots__ = ("_accepted", "_is_found", "_next", "_num_lost", "_prediction", "_tail", "num_accepted")

    def __init__(self, prediction: bytes) -> None:
        """prediction: packed token ids, see `penstock.wire.frames.pack_token_ids`; a character each from here on, which
        are found faster than numbers."""
        self._prediction = prediction.decode("utf-32-le", "surrogatepass")
        self._accepted = bytearray(len(self._prediction))
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
        return len(self._prediction) - self.num_accepted

    def push(self, token_ids: list[int]) -> None:
        """Take the next tokens of the answer."""
        for token_id in token_ids:
            token = chr(token_id)
            self._tail = self._tail[1 - LONGEST :] + token
            if self._is_found and self._prediction[self._next : self._next + 1] == token:
                self._accept(self._next, 1)
            else:
                self._num_lost += 1
                self._find()

    def _find(self) -> None:
        """Look for the answer's end in the prediction: behind the place that was reached, else anywhere."""
        self._is_found = False
        if self._tail[-SHORTEST:] not in self._prediction:
            return
        for length in range(len(self._tail), SHORTEST - 1, -1):
            wanted, num_known = self._tail[-length:], max(0, length - self._num_lost)
            place = self._prediction.find(wanted, max(0, self._next - num_known))
            if place < 0:
                place = self._prediction.find(wanted)
            if place >= 0:
                self._accept(place + num_known, length - num_known)
                return

    def _accept(self, first: int, count: int) -> None:
        self.num_accepted += count - sum(self._accepted[first : first + count])
        self._accepted[first : first + count] = bytes([1]) * count
        self._next, self._is_found, self._num_lost = first + count, True, 0
