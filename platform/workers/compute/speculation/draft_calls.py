"""Steps of a draft head behind some sequences, and whole drafts in one call of its decoder.

A draft of one token takes the kernels a quarter of a millisecond. Laid out in tensors it took twice that in Python, so
here it is laid out in two plain arrays, and what the kernels write to stays from call to call.
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.workers.compute.batch import Span
from penstock.workers.compute.kernels.choice import GREEDY, Draw, lay_out_draws
from penstock.workers.compute.kernels.decoder import BoundCache, CDrafts, CStep, Decoder
from penstock.workers.compute.truncation import MOST_TOKENS


class Drafted(NamedTuple):
    """What a draft head proposes behind each of some sequences."""

    token_ids: list[list[int]]
    num_rounds: int
    """Tokens of the longest that were computed, those without a chance too."""


class DraftCalls:
    """One thread at a time, the decoder's."""

    def __init__(self, decoder: Decoder, cache: BoundCache, vocabulary: Tensor, sharpness: float) -> None:
        """decoder: a draft head's. vocabulary: int64 [its vocabulary], the ids that are proposed. sharpness: what
        temperatures of draws are divided by."""
        assert vocabulary.dtype == torch.int64
        assert vocabulary.is_contiguous()
        assert len(vocabulary) == decoder.shape.vocab
        self._decoder = decoder
        self._cache = cache
        self._vocabulary = vocabulary
        self._step, self._drafts = CStep(), CDrafts()
        self._drafts.sharpness = sharpness
        self._room = _Room(0, 0, 0, 0)

    def propose(
        self,
        spans: Sequence[Span],
        features: Tensor,
        wanted: Sequence[int],
        keep_from: float = 0.0,
        go_from: float = 0.0,
        draws: Sequence[Sequence[Draw]] | None = None,
    ) -> Drafted:
        """Compute the spans, one of each sequence, and go on behind the last token of each.

        features: float32 [T, taps, hidden], the target's of the spans' tokens in order. wanted: how many tokens for
        each sequence, 1 or more, falling; the block tables have room for them. keep_from: chance, by the head's own
        scores, that a proposal and those before it are right, which it must have; go_from: which one must have for
        another behind it. draws: how each of the wanted tokens is drawn, as the target draws it, but sharper; None: the
        likeliest.
        Fewer come where scores are not numbers. Raises IndexError for an id without a row in the embedding.
        """
        assert all(a >= b for a, b in pairwise(wanted))
        num_rows, most, drafts = len(spans), wanted[0], self._drafts
        room, laid_out = self._lay_out(spans, features, wanted)
        drafts.vocabulary = self._vocabulary.data_ptr()
        drafts.places, drafts.behind, drafts.chances, drafts.tokens, drafts.kept = room.of_drafts
        drafts.most, drafts.num_rows = most, num_rows
        drafts.keep_from, drafts.go_from = keep_from, go_from
        table = self._lay_out_draws(draws, most)
        self._decoder.compute(self._step, self._cache, drafts)
        del laid_out, table
        tokens, kept = room.tokens, room.kept
        proposed = [
            tokens[row * most : row * most + min(kept[row], count)].tolist() for row, count in enumerate(wanted)
        ]
        return Drafted(proposed, drafts.made)

    def _lay_out_draws(self, draws: Sequence[Sequence[Draw]] | None, most: int) -> object:
        """Describe how tokens are drawn. Returns what must live as long as they are."""
        if draws is None:
            self._drafts.choices = None
            return None
        assert len(self._vocabulary) < MOST_TOKENS
        rounds = [own[place] if place < len(own) else GREEDY for place in range(most) for own in draws]
        table = lay_out_draws(rounds, self._vocabulary.data_ptr())
        self._drafts.choices = _address(table)
        return table

    def score(self, spans: Sequence[Span], features: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the spans; the scores behind the last token of each, [spans, vocabulary], and the head's outputs,
        [spans, hidden], as they are until the next call. features: as above, or [T, 1, hidden], the head's outputs."""
        room, laid_out = self._lay_out(spans, features, [0] * len(spans))
        self._decoder.compute(self._step, self._cache)
        del laid_out
        return room.logits[: len(spans)], room.outputs[: len(spans)]

    def _lay_out(self, spans: Sequence[Span], features: Tensor, wanted: Sequence[int]) -> tuple["_Room", object]:
        """Describe the step. Returns where it writes to, and what must live as long as it is computed."""
        shape, size, num_rows = self._decoder.shape, self._cache.block_size, len(spans)
        ids: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        ends: list[int] = []
        contexts: list[int] = []
        for own, start, table, _ in spans:
            end = start + len(own)
            ids += own
            places += range(start, end)
            slots += [table[place // size] * size + place % size for place in range(start, end)]
            ends.append(len(ids))
            contexts.append(end)
        num_tokens = len(ids)
        num_given, num_parts, hidden = features.shape
        assert (num_given, hidden) == (num_tokens, shape.hidden)
        assert features.dtype == torch.float32
        assert features.is_contiguous()
        needed = [-(-(context + count) // size) for context, count in zip(contexts, wanted, strict=True)]
        width = max(needed)
        longs = array("q", [*ids, *places, *slots, *(end - 1 for end in ends), *wanted])
        ints = array("i", [0, *ends, *contexts])
        for span, count in zip(spans, needed, strict=True):
            assert len(span.block_table) >= count
            ints.extend(span.block_table[:count])
            ints.extend((0,) * (width - count))

        room = self._room = self._room.fit(num_rows, max(wanted), shape.hidden, shape.vocab)
        step, of_longs, of_ints = self._step, longs.buffer_info()[0], ints.buffer_info()[0]
        step.num_tokens, step.num_seqs, step.num_rows = num_tokens, num_rows, num_rows
        step.token_ids, step.positions, step.slots, step.rows = (of_longs + 8 * n * num_tokens for n in range(4))
        self._drafts.wanted = of_longs + 8 * (3 * num_tokens + num_rows)
        step.query_start, step.context_len = of_ints, of_ints + 4 * (num_rows + 1)
        step.block_tables, step.table_stride = of_ints + 4 * (2 * num_rows + 1), width
        step.features, step.num_parts = features.data_ptr(), num_parts
        step.logits, step.best, step.best_score, step.states = room.of_step
        return room, (longs, ints, features)


class _Room:
    """Memory for what a call writes."""

    def __init__(self, num_rows: int, most: int, hidden: int, vocab: int) -> None:
        self._size = num_rows, most
        self.logits, self.outputs = torch.empty(num_rows, vocab), torch.empty(num_rows, hidden)
        self.tokens, self.kept = _zeros("q", num_rows * most), _zeros("q", num_rows)
        self._best, self._scores = _zeros("q", num_rows), _zeros("f", num_rows)
        self._places = _zeros("q", 5 * num_rows + 1)
        self._behind, self._chances = torch.empty(num_rows, hidden), _zeros("f", num_rows)
        self.of_step = (
            self.logits.data_ptr(), _address(self._best), _address(self._scores), self.outputs.data_ptr(),
        )  # fmt: skip
        """Addresses of a step's logits, best ids, their scores, and outputs."""
        self.of_drafts = (
            _address(self._places), self._behind.data_ptr(), _address(self._chances), _address(self.tokens),
            _address(self.kept),
        )  # fmt: skip
        """Addresses of the places, outputs, chances, tokens and kept ones of drafts."""

    def fit(self, num_rows: int, most: int, hidden: int, vocab: int) -> "_Room":
        """Itself, or a larger one."""
        if num_rows <= self._size[0] and most <= self._size[1]:
            return self
        return _Room(max(num_rows, self._size[0]), max(most, self._size[1]), hidden, vocab)


def _zeros(code: str, count: int) -> "array[Any]":
    return array(code, bytes(array(code).itemsize * count))


def _address(values: "array[Any]") -> int:
    return values.buffer_info()[0]
