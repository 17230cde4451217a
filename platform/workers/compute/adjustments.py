"""What a sequence's parameters change of a row of logits: bias, penalties, tokens and words that must not come, and
tokens that are masked until it may end.

Order: logit bias, repetition, frequency and presence penalties, then the masks: of `allowed_token_ids`, `bad_words` and
`min_tokens`. Not temperature and
truncation (`truncation`). Invariant: the row that comes out depends on the row, the sequence's tokens and its
parameters alone; what is kept between steps is only what would be counted again.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.triton.sampling.sampling_inputs import ANY, Changes, Counted, Listed, Words, pack_words
from penstock.workers.engine.sequence import Sequence

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
_SMALLEST = 256
"""Least number of tokens that there is room for."""
_NO_IDS, _NO_COUNTS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)


class TokenCounts:
    """The different tokens of a sequence, in no order, and how often it produced each."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(_SMALLEST, dtype=np.int64)
        self._produced = np.zeros(_SMALLEST, dtype=np.float32)
        self._num_tokens = 0
        self.largest_id = -1

    def update(self, seq: Sequence) -> None:
        """Count the known tokens that the sequence has gained."""
        num_known = seq.num_tokens - (seq.unknown_row is not None)
        if self._num_tokens < seq.num_prompt_tokens:
            first = min(num_known, seq.num_prompt_tokens)
            self._add(dict.fromkeys(seq.token_ids[self._num_tokens : first], 0))
            self._num_tokens = first
        if self._num_tokens < num_known:
            self._add(_count(seq.token_ids[self._num_tokens : num_known]))
            self._num_tokens = num_known

    def listed(self, seq: Sequence) -> Listed:
        """The different tokens, for a device that keeps a list."""
        return Listed(seq, self._num_tokens, len(self._places), partial(self._since, seq))

    def _since(self, seq: Sequence, num_tokens: int) -> Counted:
        """The different tokens of those behind the first `num_tokens`."""
        if not num_tokens:
            size = len(self._places)
            return Counted(np.arange(size), self._ids[:size], self._produced[:size])
        gained = set(seq.token_ids[num_tokens : self._num_tokens])
        places = np.array([self._places[token_id] for token_id in gained], dtype=np.int64)
        return Counted(places, self._ids[places], self._produced[places])

    def of_ahead(self, ahead: Seq[int]) -> tuple[Ids, Row]:
        """The different tokens of `ahead`, and how often each was produced, if all of them had been too."""
        counts = _count(ahead)
        for token_id in counts.keys() & self._places.keys():
            counts[token_id] += int(self._produced[self._places[token_id]])
        return np.array(list(counts), dtype=np.int64), np.array(list(counts.values()), dtype=np.float32)

    def with_ahead(self, ahead: Seq[int]) -> tuple[Ids, Row]:
        """The different tokens, and how often each was produced, if the tokens `ahead` had been too."""
        size = len(self._places)
        ids, produced = self._ids[:size], self._produced[:size]
        if not ahead:
            return ids, produced
        counts = _count(ahead)
        new = [token_id for token_id in counts if token_id not in self._places]
        produced = np.concatenate([produced, np.zeros(len(new), dtype=np.float32)])
        places = self._places | {token_id: size + index for index, token_id in enumerate(new)} if new else self._places
        for token_id, count in counts.items():
            produced[places[token_id]] += count
        return np.concatenate([ids, np.array(new, dtype=np.int64)]), produced

    def _add(self, counts: dict[int, int]) -> None:
        for token_id in counts:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._produced = np.concatenate([self._produced, np.zeros_like(self._produced)])
            self._ids[place] = token_id
            self.largest_id = max(self.largest_id, token_id)
            self._produced[place] += counts[token_id]


class Adjustments:
    """The changes that one sequence's parameters make to its rows, for as long as it runs."""

    def __init__(self, params: SamplingParams, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """eos_token_ids: masked, with the stop tokens, until min_tokens are out. Raises ValueError for a bias of a
        token below 0; tokens beyond the vocabulary are left out."""
        bias = {token_id: value for token_id, value in params.logit_bias if token_id < vocab_size}
        self._biased, self._bias = np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)
        if bias and min(bias) < 0:
            raise ValueError(f"there is no token {min(bias)} to be biased")
        masked = {token_id for token_id in (*eos_token_ids, *params.stop_token_ids) if 0 <= token_id < vocab_size}
        self._masked = sorted(masked)
        self._params = params
        self._counts = TokenCounts() if has_penalties(params) else None
        self._forbidden = _find_forbidden(params, vocab_size)
        self._bad_ends = _find_bad_ends(params.bad_words, vocab_size)
        words = [(beginning, end) for own in self._bad_ends.values() for beginning, end in own]
        self._longest = max((len(beginning) for beginning, _ in words), default=0)
        self._short_words = [(beginning[0], end) for beginning, end in words if len(beginning) == 1]
        """Words of two tokens."""
        self._long_words: dict[int, list[tuple[list[int], int, int]]] = {}
        """Words of more, by the last but two of their tokens: what stands before the last two, and these."""
        for beginning, end in words:
            if len(beginning) > 1:
                self._long_words.setdefault(beginning[-2], []).append((beginning[:-1], beginning[-1], end))
        self._vocab_size = vocab_size

    @cached_property
    def _allowed_words(self) -> Words | None:
        return None if self._forbidden is None else pack_words(~self._forbidden)

    def apply(self, raw: Row, seq: Sequence, ahead: Seq[int]) -> Row:
        """A copy of the row with the changes. ahead: tokens taken to stand behind the sequence's own."""
        row = raw.copy()
        row[self._biased] += self._bias
        if self._counts is not None:
            self._counts.update(seq)
            self._penalize(row, *self._counts.with_ahead(ahead))
        if self._forbidden is not None:
            row[self._forbidden] = -np.inf
        row[self._find_banned(seq, ahead)] = -np.inf
        return row

    def changes(self, seq: Sequence, ahead: Seq[int]) -> Changes:
        """The same, for whoever has the row elsewhere. Raises IndexError for a token beyond the vocabulary that is to
        be penalized. The arrays are to be read before the sequence gains a token."""
        params, counted, produced, listed = self._params, _NO_IDS, _NO_COUNTS, None
        assert seq.unknown_row is None or not ahead, "drafts stand behind known tokens"
        if self._counts is not None:
            self._counts.update(seq)
            if ahead:
                counted, produced = self._counts.of_ahead(ahead)
            listed = self._counts.listed(seq)
            largest_id = max(self._counts.largest_id, *ahead, -1)
            if largest_id >= self._vocab_size:
                raise IndexError(f"there is no token {largest_id} to be penalized")
        banned, needed = self._find_bans(seq, ahead)
        return Changes(
            self._biased,
            self._bias,
            counted,
            produced,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            banned,
            self._allowed_words,
            listed,
            needed,
            seq.unknown_row,
        )

    def _find_bans(self, seq: Sequence, ahead: Seq[int]) -> tuple[Ids, Ids]:
        """`Changes.banned` and `Changes.needed`."""
        if seq.unknown_row is None:
            banned = self._find_banned(seq, ahead)
            return np.array(banned, dtype=np.int64) if banned else _NO_IDS, _NO_IDS
        pairs = [*self._find_possible_ends(seq), *[(ANY, token_id) for token_id in self._masked_now(seq, ahead)]]
        both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return both[:, 1], both[:, 0]

    def _find_banned(self, seq: Sequence, ahead: Seq[int]) -> list[int]:
        """Tokens that must not come at this place, but for those that never come."""
        return [*(self._find_ends(seq, ahead) if self._bad_ends else ()), *self._masked_now(seq, ahead)]

    def _masked_now(self, seq: Sequence, ahead: Seq[int]) -> list[int]:
        """Tokens that must not come before there are so many."""
        return self._masked if seq.num_output_tokens + len(ahead) < self._params.min_tokens else []

    def _find_possible_ends(self, seq: Sequence) -> list[tuple[int, int]]:
        """Tokens that would complete a bad word if an unknown last token were a certain one: that one, and they."""
        found = [*self._short_words]
        if not self._long_words:
            return found
        output = seq.token_ids[max(seq.num_prompt_tokens, seq.num_tokens - self._longest) : -1]
        words = self._long_words.get(output[-1], ()) if output else ()
        found += [(last, end) for beginning, last, end in words if output[-len(beginning) :] == beginning]
        return found

    def _find_ends(self, seq: Sequence, ahead: Seq[int]) -> list[int]:
        """Tokens that would complete a bad word, all of which is output."""
        last = ahead[-1] if ahead else seq.token_ids[-1]
        words = self._bad_ends.get(last, ())
        if not words:
            return []
        longest = max(len(beginning) for beginning, _ in words)
        first = max(seq.num_prompt_tokens, seq.num_tokens - longest)
        output = [*seq.token_ids[first:], *ahead]
        return [end for beginning, end in words if output[-len(beginning) :] == beginning]

    def _penalize(self, row: Row, ids: Ids, produced: Row) -> None:
        """Repetition penalty (Keskar et al. 2019, CTRL) over all tokens seen; OpenAI's two over the ones produced."""
        params = self._params
        values = row[ids]
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty or params.presence_penalty:
            presence = np.float32(params.presence_penalty) * (produced > 0)
            values -= np.float32(params.frequency_penalty) * produced + presence
        row[ids] = values


def is_unadjusted(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether these parameters leave a row as it is, behind so many tokens of output."""
    return not (
        params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or has_penalties(params)
        or num_output_tokens < params.min_tokens
    )


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _find_forbidden(params: SamplingParams, vocab_size: int) -> NDArray[np.bool_] | None:
    """bool [vocab_size]: the tokens that never come: those that are not allowed, and bad words of one token. Returns
    None where there are none."""
    single = [word[0] for word in params.bad_words if len(word) == 1 and 0 <= word[0] < vocab_size]
    if not params.allowed_token_ids and not single:
        return None
    forbidden = np.full(vocab_size, bool(params.allowed_token_ids))
    allowed = np.frombuffer(params.allowed_token_ids, dtype="<u4")
    forbidden[allowed[allowed < vocab_size]] = False
    forbidden[single] = True
    return forbidden


def _find_bad_ends(words: Iterable[Seq[int]], vocab_size: int) -> dict[int, list[tuple[list[int], int]]]:
    """Words of several tokens, by the last but one of them: what stands before the last one, and that."""
    found: dict[int, list[tuple[list[int], int]]] = {}
    for word in words:
        if len(word) > 1 and 0 <= word[-1] < vocab_size:
            found.setdefault(word[-2], []).append(([*word[:-1]], word[-1]))
    return found


def _count(token_ids: Iterable[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for token_id in token_ids:
        counts[token_id] = counts.get(token_id, 0) + 1
    return counts
