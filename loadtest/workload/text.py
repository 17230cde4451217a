"""Prompts by key: made-up words, random token ids, blocks named by a trace's hash ids, real text.

Pure: a text depends on the seed, its key and its length, never on what was made before, and a longer text of a key
begins with the shorter one. So equal leading blocks are equal leading tokens, in any order and in any process, and
nothing has to be remembered.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.scenario import Prompts
from penstock_loadtest.workload.corpus import Corpus
from penstock_loadtest.workload.vocabulary import WORDS, find_single_token_words, load_tokenizer

MAX_TOKEN_ID: Final = (1 << 31) - 1

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1

Numbers = npt.NDArray[np.uint64]


class TextMaker:
    """Texts of one kind of request.

    Keys are numbers: two texts of one key are the same. Words are joined by one space; texts joined by a space again
    have as many tokens as their parts together. A count of tokens is exact with prompts.tokenizer, and without it as
    exact as the vocabulary's common words are single tokens. Raises ScenarioInvalid (tokenizer, token_range) and
    TraceInvalid (corpus).
    """

    def __init__(self, prompts: Prompts, seed: int) -> None:
        low, high = prompts.token_range
        if high > MAX_TOKEN_ID:
            raise ScenarioInvalid(f"token_range ends at {high}; no vocabulary has ids above {MAX_TOKEN_ID}.")
        tokenizer = load_tokenizer(prompts.tokenizer) if prompts.tokenizer is not None else None
        self._low, self._span = low, high - low  # ids in [low, high)
        self._seed = seed
        self._words = find_single_token_words(tokenizer) if tokenizer is not None else WORDS
        self._corpus = (
            Corpus.read(prompts.path, seed, tokenizer)
            if prompts.source == "corpus" and prompts.path is not None
            else None
        )

    def tokens(self, count: int, *key: int) -> list[int]:
        """Random token ids."""
        return self._to_ids(_draw(_stream(self._seed, 0, *key), count))

    def words(self, count: int, *key: int) -> str:
        """Made-up words."""
        return self._to_text(_draw(_stream(self._seed, 0, *key), count))

    def block_tokens(self, hash_ids: Sequence[int], block_tokens: int, count: int) -> list[int]:
        """`count` token ids: block_tokens for every hash id, cut where the prompt ends. The same id is the same block
        wherever it stands."""
        return self._to_ids(_draw_blocks(_stream(self._seed, 1), hash_ids, block_tokens, count))

    def block_words(self, hash_ids: Sequence[int], block_tokens: int, count: int) -> str:
        """Blocks as made-up words, one word for every token; see `block_tokens`."""
        return self._to_text(_draw_blocks(_stream(self._seed, 1), hash_ids, block_tokens, count))

    def corpus(self, index: int, count: int) -> list[str]:
        """The user's messages, turn by turn, of the index-th request that draws on the corpus.

        Rows of JSON lines go as they are, in shuffled order, and again from the first when they are used up. Plain text
        is cut to `count` tokens.
        """
        assert self._corpus is not None, "prompts.source is not corpus"
        return self._corpus.turns(index, count)

    def _to_ids(self, numbers: Numbers) -> list[int]:
        ids: list[int] = (_below(numbers, self._span) + np.uint64(self._low)).tolist()
        return ids

    def _to_text(self, numbers: Numbers) -> str:
        return " ".join(map(self._words.__getitem__, _below(numbers, len(self._words)).tolist()))


def _mix(number: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood, 2014): neighbouring numbers become unrelated ones."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _mix_all(numbers: Numbers) -> Numbers:
    """Apply `_mix` to every number, in place."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    return numbers


def _stream(*key: int) -> int:
    """A number of 64 bits that stands for the whole key."""
    state = 0
    for part in key:
        state = _mix((state + part + _GOLDEN) & _MASK)
    return state


def _positions(count: int) -> Numbers:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def _draw(stream: int, count: int) -> Numbers:
    """The first `count` numbers of splitmix64 that starts at `stream`."""
    return _mix_all(_positions(count) + np.uint64(stream))


def _draw_blocks(stream: int, hash_ids: Sequence[int], block_tokens: int, count: int) -> Numbers:
    """The first block_tokens numbers of a stream of its own for every hash id, one block after the other."""
    if count > len(hash_ids) * block_tokens:
        raise ValueError(f"{len(hash_ids)} blocks of {block_tokens} tokens are fewer than {count} tokens")
    starts = _mix_all(np.array(hash_ids, np.uint64) * np.uint64(_GOLDEN) + np.uint64(stream))
    return _mix_all(starts[:, None] + _positions(block_tokens)).ravel()[:count]


def _below(numbers: Numbers, bound: int) -> Numbers:
    """Numbers in [0, bound), of the upper 32 bits."""
    return (numbers >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)
