"""A draft head beside the target (`head_file` says what it computes): its keys and values lie in the target's blocks,
and what it reads is what the target's own steps leave.

After each step `observe` takes the features of the step's tokens. Those of prompts are turned into the head's keys and
values at once; those of decoded tokens wait until tokens are proposed, or until some have gathered, because a product
of few rows costs what one of many does. `propose` computes what is lacking up to the last known token, whose row gives
the first proposal, and goes on from the head's own outputs. What the target rejects is written over.

Where features are lacking (behind a prefix found in the cache, a step that was computed by torch's operators, steps
that are not observed because drafts don't pay) slots have none, or, where they are many, the head reads a sequence from
a later block on, its window: that costs drafts, never tokens.

Invariant: what is read has been written for the sequence itself, or for the one that computed the block it has found in
the cache. So it is known of each block whether the head has written all of it, and from which window on (`_windows`).
"""

from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.batch import Span, lay_out
from penstock.workers.compute.kernels.cache_layout import can_tile
from penstock.workers.compute.kernels.choice import Draw
from penstock.workers.compute.kernels.decoder import (
    Activations,
    BoundCache,
    CacheLayer,
    Decoder,
    Parameters,
    Shape,
    States,
    TokenLayout,
)
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import PackedMatrix
from penstock.workers.compute.models.fused import FusedLlama
from penstock.workers.compute.models.llama import KvCache
from penstock.workers.compute.quant.packed import pack_matrix
from penstock.workers.compute.sampling import SHARPNESS, Sampler
from penstock.workers.compute.speculation.draft_calls import DraftCalls
from penstock.workers.compute.speculation.head_file import DraftHead
from penstock.workers.compute.truncation import MOST_TOKENS
from penstock.workers.engine.sequence import Chunk, Sequence, Step

MOST_WAITING = 16
"""Decoded tokens of a sequence whose features wait at the most: a block. When those of one are read that has more, or
those of a prompt, those of others that have more than a quarter of that are read too. What waits when a sequence ends
is lost to whoever goes on behind its blocks."""
MOST_MISSING = 64
"""Tokens without features between two that the head has read, at the most: with more it goes on behind them, as if the
sequence began there."""
FEW_ROWS = 64
"""Features that wait stay where a step of at most so many tokens has left them, and hold all that it has left; those
of a larger one are copied."""


class _Part(NamedTuple):
    """Rows `first` to `first + num_rows` of what a step has left. Cut out of its tensor when they are read: most steps
    have others before that, and each view takes Python's time."""

    left: Tensor
    """[T, taps, hidden]."""
    first: int
    num_rows: int

    @property
    def features(self) -> Tensor:
        is_whole = self.num_rows == len(self.left)
        return self.left if is_whole else self.left[self.first : self.first + self.num_rows]


@dataclass(slots=True)
class _State:
    """Features of a sequence that the head has not read yet."""

    num_preemptions: int
    num_skipped: int
    """Leading slots that the head does not read, those of whole blocks: what it wrote there is another sequence's, or
    of another window."""
    num_written: int
    """Leading slots that have the head's keys and values, if they are not skipped."""
    parts: list[_Part]
    """Features behind the tokens from place `num_written - 1` on."""
    num_waiting: int
    """The rows of all parts."""

    def add(self, part: _Part) -> None:
        self.parts.append(part)
        self.num_waiting += part.num_rows

    def cut(self, count: int) -> None:
        """Keep the first `count`."""
        while self.num_waiting > count:
            last = self.parts.pop()
            self.num_waiting -= last.num_rows
            if self.num_waiting < count:
                self.add(last._replace(num_rows=count - self.num_waiting))

    def take(self, count: int) -> Tensor:
        """The first `count`, which are there no more."""
        whole = self.parts[0]
        if len(self.parts) > 1:
            whole = _Part(_join([part.features for part in self.parts]), 0, self.num_waiting)
        num_left = self.num_waiting - count
        self.parts, self.num_waiting = [], 0
        if num_left > 0:
            rest = whole._replace(first=whole.first + count, num_rows=num_left)
            self.add(_Part(rest.features.clone(), 0, num_left))
        return whole._replace(num_rows=count).features


@dataclass(slots=True)
class _Draft:
    chunk: Chunk
    tokens: list[int]
    chance: float = 1.0
    """Chance by the head's own scores that all of them are right."""
    num_kept: int = 0
    """Leading ones that have enough of it."""
    num_skipped: int = 0
    """Slots of its sequence that are not read."""

    @property
    def seq(self) -> Sequence:
        return self.chunk.seq

    @property
    def num_wanted(self) -> int:
        return self.chunk.max_drafts


class HeadDrafter:
    """Satisfies `penstock.workers.compute.speculation.drafter.Drafter`. One thread at a time, the target's."""

    def __init__(
        self,
        head: DraftHead,
        target: FusedLlama,
        num_blocks: int,
        block_size: int,
        kv_dtype: torch.dtype,
        sampler: Sampler,
        library: Library,
        threads: int,
    ) -> None:
        """head: one that fits the target. num_blocks, block_size: of the target's cache."""
        self._target = target
        self._taps = target.taps = torch.tensor(head.spec.taps, dtype=torch.int32)
        self._sampler = sampler
        self._packed = {name: pack_matrix(name, matrix, library.matmul) for name, matrix in head.matrices.items()}
        self._vocabulary = head.vocabulary.contiguous()
        self._parameters = _parameters(head, target, self._packed)
        self._decoder: Decoder = library.decoder(self._parameters, threads, Activations.ONE_TERM)
        self.cache = make_head_cache(target, num_blocks, block_size, kv_dtype)
        self._bound = BoundCache(
            [CacheLayer(k, v, layout) for (k, v), layout in zip(self.cache.layers, self.cache.layouts, strict=True)]
        )
        self._can_draw = len(self._vocabulary) < MOST_TOKENS
        self._calls = DraftCalls(self._decoder, self._bound, self._vocabulary, SHARPNESS)
        self._states: dict[Sequence, _State] = {}
        self._windows: list[int | None] = [None] * num_blocks
        """The block of its sequence, for each block of the cache, at which the window began in which the head has
        written it; None: the head has not written all of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
        return sum(matrix.nbytes for matrix in self._packed.values())

    def expect(self, step: Step) -> None:
        """Prepare for a step of the target: whether it leaves anything, and which blocks it begins to write."""
        windows, size = self._windows, self.cache.block_size
        is_observed = False
        for chunk in step.chunks:
            is_observed |= chunk.is_observed
            first, end = chunk.start, chunk.end + chunk.max_drafts
            if first % size == 0 or end - first > 1:
                table = chunk.seq.block_table
                for place in range(-(-first // size), -(-end // size)):
                    windows[table[place]] = None
        for _, block in step.copies:
            windows[block] = None
        self._target.taps = self._taps if is_observed else None
        if self._states:
            for chunk in step.chunks:
                if not chunk.is_observed:
                    self._states.pop(chunk.seq, None)

    def take_features(self) -> Tensor | None:
        """What the target's last step has left for the head; None: nothing, for it was computed elsewhere."""
        return self._target.take_tapped()

    def observe(self, chunks: Seq[Chunk], tapped: Tensor, ignored: Set[Sequence] = frozenset()) -> None:
        """Take what a step of the target has left. tapped: [T, taps, hidden], the step's tokens in order, drafts too.
        ignored: sequences that nothing is drafted for."""
        counts = [chunk.num_tokens + len(chunk.draft or ()) for chunk in chunks]
        are_few = sum(counts) <= FEW_ROWS
        extended: list[tuple[Chunk, _State]] = []
        is_due = False
        first = 0
        for chunk, count in zip(chunks, counts, strict=True):
            seq, part = chunk.seq, _Part(tapped, first, count)
            first += count
            if chunk.is_observed and seq.leader is None and not seq.beams and seq not in ignored:
                if not are_few and chunk.num_tokens == 1:
                    part = _Part(part.features.clone(), 0, count)
                state = self._extend(chunk, part)
                extended.append((chunk, state))
                is_due |= chunk.end - state.num_written > (MOST_WAITING if chunk.num_tokens == 1 else 0)
        if not is_due:
            return
        spans = [
            self._take(chunk.seq, state, chunk.end)
            for chunk, state in extended
            if chunk.end - state.num_written > (MOST_WAITING // 4 if chunk.num_tokens == 1 else 0)
        ]
        self._write([span for span, _ in spans], _join([features for _, features in spans]))

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        with torch.inference_mode():
            proposals: list[list[int]] = [[] for _ in chunks]
            drafts: list[_Draft] = []
            spans: list[tuple[Span, Tensor]] = []
            for place, chunk in enumerate(chunks):
                seq, state = chunk.seq, self._states.get(chunk.seq)
                if state is None or state.num_preemptions != seq.num_preemptions or chunk.max_drafts < 1:
                    continue
                if state.num_written + state.num_waiting < seq.num_tokens or state.num_written >= seq.num_tokens:
                    continue  # the features behind the token before the last are not there
                spans.append(self._take(seq, state, seq.num_tokens))
                drafts.append(_Draft(chunk, proposals[place], num_skipped=state.num_skipped))
            if not drafts:
                return proposals
            draws = self._find_draws(drafts)
            if draws is not None:
                order = sorted(range(len(drafts)), key=lambda index: -drafts[index].num_wanted)
                drafts, spans = [drafts[index] for index in order], [spans[index] for index in order]
                draws = [draws[index] for index in order]
            features = _join([features for _, features in spans])
            if draws is not None:
                self._draft_at_once(drafts, [span for span, _ in spans], features, draws)
                return proposals
            going, behind = self._choose(drafts, [span for span, _ in spans], features)
            while going:
                going, behind = self._go_on(going, behind)
            for draft in drafts:
                draft.chunk.num_rounds = len(draft.tokens)
                del draft.tokens[draft.num_kept :]
        return proposals

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def poison(self, blocks: Tensor) -> None:
        """Fill blocks with NaN, so that a read of what was not written shows. For tests."""
        self.cache.poison(blocks)

    def _extend(self, chunk: Chunk, part: _Part) -> _State:
        """The sequence's state with the features of a chunk, which replace those of rejected drafts."""
        seq, state = chunk.seq, self._states.get(chunk.seq)
        if (
            state is None
            or state.num_preemptions != seq.num_preemptions
            or not 0 <= chunk.start - (state.num_written - 1) <= state.num_waiting
        ):
            # slots up to that of the first token have no features: none are known behind the token before each
            size = self.cache.block_size
            window, end = self._find_window(seq.block_table, chunk.start // size)
            count = chunk.start - end * size + 1
            missing = _Part(part.left.new_zeros(count, *part.left.shape[1:]), 0, count)
            state = _State(seq.num_preemptions, window * size, end * size, [missing], count)
            self._states[seq] = state
        else:
            state.cut(chunk.start - (state.num_written - 1))
        state.add(part)
        return state

    def _find_window(self, table: list[int], first: int) -> tuple[int, int]:
        """The block from which on the head reads a sequence that goes on with block `first`, and that up to which it is
        written: not many before that, for those between are written without features."""
        for end in range(first, max(first - MOST_MISSING // self.cache.block_size, 0) - 1, -1):
            window = self._windows[table[end - 1]] if end else 0
            if window is not None and all(self._windows[block] == window for block in table[window:end]):
                return window, end
        return first, first

    def _take(self, seq: Sequence, state: _State, end: int) -> tuple[Span, Tensor]:
        """The slots up to `end` that are lacking, and their features; they count as written. Places are counted from
        the window's begin: attention sees their distances alone."""
        first, skipped, size = state.num_written, state.num_skipped, self.cache.block_size
        count, state.num_written, table = end - first, end, seq.block_table
        for block in range(first // size, end // size):
            self._windows[table[block]] = skipped // size
        if skipped:
            table = table[skipped // size :]
        return Span(seq.token_ids[first:end], first - skipped, table, seq), state.take(count)

    def _choose(self, drafts: list[_Draft], spans: list[Span], features: Tensor) -> tuple[list[_Draft], Tensor]:
        """Compute the spans, whose last tokens give each draft another one; the drafts that go on, and the head's
        outputs behind them, [drafts, 1, hidden]."""
        seqs = [draft.seq for draft in drafts]
        logits, behind = self._calls.score(spans, features)
        ahead = [draft.tokens for draft in drafts]
        proposals = self._sampler.propose_among(logits, self._vocabulary.numpy(), seqs, ahead)
        going = []
        for row, (draft, token_id) in enumerate(zip(drafts, proposals, strict=True)):
            if token_id is None:
                continue
            draft.chance *= self._chance(logits[row], token_id, draft.seq)
            draft.tokens.append(token_id)
            if draft.num_kept == len(draft.tokens) - 1 and draft.chance >= draft.chunk.keep_from:
                draft.num_kept += 1
            if len(draft.tokens) < draft.num_wanted and draft.chance >= draft.chunk.go_from:
                going.append(row)
        return [drafts[row] for row in going], behind[going, None]

    def _chance(self, logits: Tensor, token_id: int, seq: Sequence) -> float:
        """Chance of a token by the head's scores; penalties and truncation left out."""
        place = int(torch.searchsorted(self._vocabulary, token_id))
        if place == len(self._vocabulary) or int(self._vocabulary[place]) != token_id:
            return 0.0
        return float(torch.softmax(logits / (seq.sampling.temperature or 1.0), 0)[place])

    def _go_on(self, drafts: list[_Draft], behind: Tensor) -> tuple[list[_Draft], Tensor]:
        """Propose one more token for each, behind the head's own outputs."""
        size = self.cache.block_size
        spans = [
            Span(
                [draft.tokens[-1]],
                draft.seq.num_tokens + len(draft.tokens) - 1 - draft.num_skipped,
                draft.seq.block_table[draft.num_skipped // size :],
                draft.seq,
            )
            for draft in drafts
        ]
        return self._choose(drafts, spans, behind)

    def _write(self, spans: list[Span], features: Tensor) -> None:
        """Compute the head's keys and values of the spans. features: [T, taps, hidden] of the target."""
        token_ids, positions, attention = lay_out(spans, self.cache.block_size)
        states = States(features=features, behind=torch.empty(0, features.shape[2]))
        rows = torch.empty(0, dtype=torch.int64)
        self._decoder.step(token_ids, positions, self._bound, _token_layout(attention), rows, None, None, states)

    def _find_draws(self, drafts: Seq[_Draft]) -> list[list[Draw]] | None:
        """How the tokens of each draft are drawn; empty lists where all take the likeliest. None: not by the kernels,
        because something changes the scores of one before, or there are too many tokens."""
        if self._sampler.are_greedy([draft.seq for draft in drafts]):
            return [[] for _ in drafts]
        found = (
            [self._sampler.proposal_draws(draft.seq, draft.num_wanted) for draft in drafts]
            if self._can_draw
            else [None]
        )
        known = [own for own in found if own is not None]
        return known if len(known) == len(drafts) else None

    def _draft_at_once(
        self, drafts: list[_Draft], spans: list[Span], features: Tensor, draws: list[list[Draw]]
    ) -> None:
        """All tokens of the drafts, in one call. The longest come first."""
        wanted = [draft.num_wanted for draft in drafts]
        keep_from = min(draft.chunk.keep_from for draft in drafts)
        go_from = min(draft.chunk.go_from for draft in drafts)
        found = self._calls.propose(spans, features, wanted, keep_from, go_from, draws if any(draws) else None)
        for draft, proposed in zip(drafts, found.token_ids, strict=True):
            draft.tokens.extend(proposed)
            draft.chunk.num_rounds = min(draft.num_wanted, found.num_rounds)


def _join(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _token_layout(attention: AttentionBatch) -> TokenLayout:
    return TokenLayout(attention.query_start, attention.context_len, attention.block_tables, attention.slot_mapping)


def make_head_cache(target: FusedLlama, num_blocks: int, block_size: int, kv_dtype: torch.dtype) -> KvCache:
    """A cache of one layer of the target's shape."""
    return KvCache(
        replace(target.config, num_layers=1),
        num_blocks,
        block_size,
        kv_dtype,
        by_block=True,
        is_tiled=can_tile(block_size, target.config.head_dim, kv_dtype),
    )


def _parameters(head: DraftHead, target: FusedLlama, packed: dict[str, PackedMatrix]) -> Parameters:
    spec, of_target = head.spec, target.parameters
    shape = Shape(
        1, spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim,
        len(head.vocabulary),
    )  # fmt: skip
    layer = {name: packed[name] for name in ("qkv", "o", "gate_up", "down")} | {
        name: head.vectors[name].contiguous() for name in ("input_norm", "post_norm")
    }
    return Parameters(
        shape,
        [layer],
        of_target.embed,
        packed["lm_head"],
        head.vectors["norm"].contiguous(),
        of_target.cos,
        of_target.sin,
        of_target.eps,
        packed["first"],
        packed["chained"],
    )
