"""How far a sequence's answer has come in its grammar: which tokens may follow, and what of a draft may.

A matcher goes to wherever the sequence is when it is asked: forward, and back by llguidance's rollback where tokens
were drafted in vain or a step failed. Invariant: what may follow depends on the grammar and the answer's tokens alone,
so it is the same after a preemption, on another replica, and with any drafter.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from penstock.text.grammar import describe

_WORD_BITS = 32


class GrammarFault(Exception):
    """The grammar goes no further: a limit was reached, or a token came that it does not allow."""


class Allowed:
    """The tokens that may stand at a place: a bit each, as llguidance writes them."""

    __slots__ = ("_vocab_size", "_words")

    def __init__(self, words: NDArray[np.uint32], vocab_size: int) -> None:
        """words: at least vocab_size bits, the lowest of a word first; those behind are 0."""
        self._words, self._vocab_size = words, vocab_size

    def __contains__(self, token_id: int) -> bool:
        return bool(int(self._words[token_id // _WORD_BITS]) >> token_id % _WORD_BITS & 1)

    @property
    def words(self) -> NDArray[np.uint32]:
        """The bits, vocab_size of them or more, the lowest of a word first; not to be changed."""
        return self._words

    def is_empty(self) -> bool:
        return not self._words.any()

    def add(self, token_ids: Iterable[int]) -> None:
        """Allow these, which are below the vocabulary's size, too."""
        for token_id in token_ids:
            self._words[token_id // _WORD_BITS] |= np.uint32(1 << token_id % _WORD_BITS)

    def row(self) -> NDArray[np.bool_]:
        """bool [vocab_size]."""
        bits = np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)


class Matcher:
    """The matcher of one sequence. One thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        """vocab_size: of the logits; the id behind them stands for the end of the answer in llguidance's masks."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_words = -(-(vocab_size + 1) // _WORD_BITS)
        self._tokens: list[int] = []
        """Tokens of the answer that the matcher stands behind."""
        self._num_settled = 0
        """Leading ones of them that were the answer's when it was last asked: an answer's tokens stay as they are."""

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def go_to(self, output: Seq[int], ahead: Seq[int] = ()) -> None:
        """Stand behind the tokens `output` of the answer, which only ever grows, and those of `ahead` behind them.
        Raises GrammarFault if they do not fit the grammar."""
        first = self._num_settled
        held, wanted = self._tokens[first:], [*output[first:], *ahead]
        num_same = 0
        for token_id, other in zip(held, wanted, strict=False):
            if token_id != other:
                break
            num_same += 1
        if num_same < len(held):
            self._matcher.rollback(len(held) - num_same)
            del self._tokens[first + num_same :]
        for token_id in wanted[num_same:]:
            if not self._step(token_id):
                raise GrammarFault(self._sentence("The answer so far does not fit the grammar."))
        self._num_settled = len(output)
        self._check()

    def try_step(self, token_id: int) -> bool:
        """Go behind a token if it may stand there. Returns False if it may not."""
        return token_id < self._vocab_size and not self._matcher.is_stopped() and self._step(token_id)

    def count_fitting(self, token_ids: Seq[int]) -> int:
        """How many of these tokens may follow, one after the other."""
        if self._matcher.is_stopped() or not token_ids:
            return 0
        return int(self._matcher.validate_tokens(list(token_ids)))

    def allowed(self) -> tuple[Allowed, bool]:
        """The tokens that may follow, and whether the answer may end here. Raises GrammarFault at a limit."""
        words = np.empty(self._num_words, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        word, bit = divmod(self._vocab_size, _WORD_BITS)
        may_end = int(words[word]) >> bit & 1
        words[word] &= np.uint32((1 << bit) - 1)
        return Allowed(words, self._vocab_size), bool(may_end)

    def _step(self, token_id: int) -> bool:
        if self._matcher.is_stopped() or self._matcher.try_consume_tokens([token_id]) != 1:
            return False
        self._tokens.append(token_id)
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFault(self._sentence("The grammar goes no further."))

    def _sentence(self, default: str) -> str:
        message = self._matcher.get_error()
        return f"The answer can't keep to its grammar any further. {describe(message) if message else default}"
