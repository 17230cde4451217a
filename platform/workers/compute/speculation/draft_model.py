"""A draft model with KV of its own in the target's blocks: the same block ids and tables, other layers.

The drafter is to each sequence a second engine that lags behind: at every proposal it first computes the known tokens
that it has not computed yet, then one at a time those it proposes, with the target's sampler and noise. Whatever the
target rejects is written over, as the target does it.

Blocks are shared between sequences and found again by prefix, so a block may come with the target's KV and without the
drafter's: the drafter was behind, or did not draft, when it was computed. Each block is therefore marked with the key
of the chain whose draft KV it holds, all of it. Where the mark is not the block's key in a sequence, the block has no
draft KV for that sequence, whoever used it meanwhile, and the drafter computes it, CATCH_UP_TOKENS a step at most;
until it has caught up it proposes nothing.

Invariant: a mark is true: only this class writes this cache, and it takes a block's mark away before it writes to it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.workers.compute.batch import Span, lay_out
from penstock.workers.compute.device_choice import DeviceChoice, KeptLogits
from penstock.workers.compute.models.fused import Model
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.triton.attention.block_tables import BlockTables
from penstock.workers.engine.sequence import Chunk, Sequence

CATCH_UP_TOKENS = 512
"""Known tokens computed in one proposal, all sequences together, so that no step waits for a drafter's long prompt."""


@dataclass(slots=True)
class _State:
    """What the draft cache holds of a sequence: its first `num_computed` tokens and, behind them, `ahead`."""

    num_preemptions: int
    """The sequence's preemptions when the state was made; after another one its blocks are other ones."""
    num_computed: int
    num_marked: int
    """Leading blocks whose marks are set."""
    ahead: list[int] = field(default_factory=list)


class _Draft(NamedTuple):
    place: int
    """Index of the chunk in the step."""
    seq: Sequence
    num_wanted: int
    state: _State
    tokens: list[int]


class DraftModel:
    """Satisfies `penstock.workers.compute.speculation.drafter.Drafter`."""

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        sampler: Sampler,
        max_model_len: int,
        catch_up_tokens: int = CATCH_UP_TOKENS,
        on_device: DeviceChoice | None = None,
        tables: BlockTables | None = None,
    ) -> None:
        """cache: as many blocks, of the same size, as the target's. sampler: the target's. max_model_len: tokens the
        model can place. on_device: what chooses where the model is; None: the sampler does, on the host. tables: block
        tables of its own that stay on the device, with rows for as many sequences as a step has; None: they are made
        for every proposal."""
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._on_device = on_device
        self._tables = tables
        self._max_model_len = max_model_len
        self._catch_up_tokens = catch_up_tokens
        self._marks: list[bytes | None] = [None] * cache.num_blocks
        self._states: dict[Sequence, _State] = {}

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        try:
            with torch.inference_mode():
                return self._propose(chunks)
        except BaseException:
            if self._tables is not None:
                self._tables.clear()  # nobody knows which of its changes were made
            raise

    def _propose(self, chunks: list[Chunk]) -> list[list[int]]:
        drafts = self._catch_up(chunks)
        proposals: list[list[int]] = [[] for _ in chunks]
        for draft in drafts:
            proposals[draft.place] = draft.tokens
        going = [draft for draft in drafts if 0 < len(draft.tokens) < draft.num_wanted]
        while going:
            going = self._extend(going)
        return proposals

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)
        if self._on_device is not None:
            self._on_device.forget(seq)
        if self._tables is not None:
            self._tables.forget(seq)

    def poison(self, blocks: Tensor) -> None:
        """Fill blocks with NaN, so that a read of what was not written shows. For tests."""
        self._cache.poison(blocks)
        for block in blocks.tolist():
            self._marks[block] = None

    def _catch_up(self, chunks: list[Chunk]) -> list[_Draft]:
        """Compute known tokens; for the sequences that have them all now, propose the first token."""
        budget = self._catch_up_tokens
        spans: list[Span] = []
        drafts: list[_Draft] = []
        rows: list[int] = []
        for place, chunk in enumerate(chunks):
            seq, count = chunk.seq, min(chunk.max_drafts, self._max_model_len - chunk.seq.num_tokens)
            if count < 1 or not budget:
                continue
            state = self._resume(seq)
            num_lacking = seq.num_tokens - state.num_computed
            num_tokens = min(num_lacking, budget)
            spans.append(
                Span(
                    seq.token_ids[state.num_computed : state.num_computed + num_tokens],
                    state.num_computed,
                    seq.block_table,
                    seq,
                )
            )
            self._unmark(seq, state)
            state.num_computed += num_tokens
            budget -= num_tokens
            if num_tokens == num_lacking:
                drafts.append(_Draft(place, seq, count, state, []))
                rows.append(self._catch_up_tokens - budget - 1)
        if spans:
            self._propose_next(spans, drafts, rows)
        return drafts

    def _extend(self, drafts: list[_Draft]) -> list[_Draft]:
        """Propose one more token for each; returns the drafts that go on."""
        spans: list[Span] = []
        for draft in drafts:
            last, place = draft.tokens[-1], draft.seq.num_tokens + len(draft.tokens) - 1
            spans.append(Span([last], place, draft.seq.block_table, draft.seq))
            draft.state.ahead.append(last)
        lengths = [len(draft.tokens) for draft in drafts]
        self._propose_next(spans, drafts, list(range(len(drafts))))
        return [
            draft
            for draft, length in zip(drafts, lengths, strict=True)
            if length < len(draft.tokens) < draft.num_wanted
        ]

    def _propose_next(self, spans: list[Span], drafts: list[_Draft], rows: list[int]) -> None:
        """Compute the spans; rows[i] of their tokens is behind what drafts[i] has, which gains a token if there is
        one."""
        token_ids, positions, attention = lay_out(spans, self._cache.block_size, self._tables)
        step = ModelStep(token_ids, positions, attention, torch.tensor(rows, dtype=torch.int64))
        seqs, ahead = [draft.seq for draft in drafts], [draft.tokens for draft in drafts]
        if self._on_device is not None and isinstance(self._model, Llama):
            kept = KeptLogits(self._model.on_device(step, self._cache))
            proposals = self._on_device.propose(kept, seqs, ahead) if drafts else []
        else:
            logits = self._model.logits(step, self._cache)
            proposals = self._sampler.propose(logits, seqs, ahead) if drafts else []
        for draft, token_id in zip(drafts, proposals, strict=True):
            if token_id is not None:
                draft.tokens.append(token_id)

    def _resume(self, seq: Sequence) -> _State:
        """The sequence's state, in which proposals that the target accepted count as computed; at least its last token
        is not."""
        state = self._states.get(seq)
        if state is None or state.num_preemptions != seq.num_preemptions:
            num_blocks = self._num_marked(seq)
            state = self._states[seq] = _State(seq.num_preemptions, num_blocks * self._cache.block_size, num_blocks)
        known = seq.token_ids[state.num_computed : state.num_computed + len(state.ahead)]
        for token_id, proposed in zip(known, state.ahead, strict=False):
            if token_id != proposed:
                break
            state.num_computed += 1
        state.ahead = []
        state.num_computed = min(state.num_computed, seq.num_tokens - 1)
        self._mark(seq, state)
        return state

    def _num_marked(self, seq: Sequence) -> int:
        """Leading blocks of a sequence that are full of this chain's draft KV; the last token's KV is not needed."""
        num_blocks = 0
        for block, key in zip(
            seq.block_table, seq.block_keys[: (seq.num_tokens - 1) // self._cache.block_size], strict=False
        ):
            if self._marks[block] != key:
                break
            num_blocks += 1
        return num_blocks

    def _mark(self, seq: Sequence, state: _State) -> None:
        """Mark the full blocks whose keys have become known."""
        num_full = min(state.num_computed // self._cache.block_size, len(seq.block_keys))
        for index in range(state.num_marked, num_full):
            self._marks[seq.block_table[index]] = seq.block_keys[index]
        state.num_marked = max(state.num_marked, num_full)

    def _unmark(self, seq: Sequence, state: _State) -> None:
        """Take the marks from the blocks that the next tokens, and proposals behind them, are written to."""
        first = state.num_computed // self._cache.block_size
        for block in seq.block_table[first:]:
            self._marks[block] = None
        state.num_marked = min(state.num_marked, first)
