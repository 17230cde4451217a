"""Steps of a model on a GPU as recordings (CUDA graphs): captured once for a few numbers of rows and tokens and then
replayed. Decode steps, of one token a sequence, are recorded whole; steps of anything else, prompts, drafts and decode
rows side by side, in pieces with attention between them. Either with adapters too.

A recording reads what a step is made of from memory that stays where it is, and blocks from tables that stay there too
(`block_tables`), as do tables of adapters (`segments`). A step sends its numbers, how its queries are attended to, and
what it changes in the block tables, in one copy. One with fewer tokens than its recording is filled up. What is
recorded depends neither on contexts nor on anything else that a step brings, so it holds for all of them. Where there
is nothing to capture with, the same functions are called instead: so all but the capture itself is tested without a
GPU. The invariants are those of `capture` and `recordings`.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock.wire.frames import Stairs
from penstock.workers.compute.batch import Batch, fill_in
from penstock.workers.compute.lora import AdapterRows, build_segments, make_tables
from penstock.workers.compute.models.capture import GraphRecorder, NoRecorder, Recorder
from penstock.workers.compute.models.llama import KvCache, Llama, largest
from penstock.workers.compute.models.recordings import (
    DECODE_NUMBERS,
    MIXED_NUMBERS,
    DecodeRecording,
    Inputs,
    MixedRecording,
    input_bytes,
    make_activations,
)
from penstock.workers.compute.triton.attention.block_tables import BlockTables, StepTables
from penstock.workers.compute.triton.attention.plan import check_contexts, plan_queries
from penstock.workers.compute.triton.segments import Segments, tile_rows
from penstock.workers.compute.triton.staging import Array, Staging, lay_out
from penstock.workers.config import EngineConfig

FEWEST_TOKENS, MOST_TOKENS = 16, 512
"""Tokens of the smallest and the largest step that is recorded in pieces. What takes fewer than 16 rows computes 16;
with more than 512 a GPU computes for longer than Python launches."""
MOST_CHANGES = 2
"""Changed entries of the tables for each token that have room beside the numbers: more of them take a copy more."""
PLAN_ARRAYS = 13
"""Arrays of a step's plan (`attention.plan.HostPlan`)."""

_log = logging.getLogger("penstock.runner")
_Recording = TypeVar("_Recording", DecodeRecording, MixedRecording)


class Recorded(NamedTuple):
    """Sizes of the steps that are recorded, ascending, and what adapters they may have."""

    rows: Sequence[int]
    """Rows of decode steps, one at least."""
    tokens: Sequence[int] = ()
    """Tokens of other steps."""
    num_adapters: int = 0
    """Adapters of a step with adapters, at most; 0: no such step is recorded."""
    max_rank: int = 0
    """Rank of a module of an adapter, at most."""

    @property
    def num_sizes(self) -> int:
        """Sizes of the kind of which there are more."""
        return max(len(self.rows), len(self.tokens))

    def pick(self, *places: int) -> "Recorded":
        """The same of one size or a few of each kind, by their places."""
        rows, tokens = (tuple(sorted({own[place] for place in places if own})) for own in (self.rows, self.tokens))
        return self._replace(rows=rows, tokens=tokens)


class Replay:
    """One thread at a time."""

    def __init__(
        self, model: Llama, cache: KvCache, recorded: Recorded, max_context: int, recorder: Recorder | None = None
    ) -> None:
        """max_context: tokens of a sequence. recorder: None: what the model's device has.

        Captures all it will replay, where there is a GPU: seconds."""
        self.model = model
        self.cache = cache
        self.tables = BlockTables(recorded.rows[-1], -(-max_context // cache.block_size), model.device)
        """The tables that recordings read, and steps as they come too, whose batches are made by them."""
        self.adapters = make_tables(recorded.num_adapters, recorded.max_rank, len(model.layers), model.device)
        """Tables of adapters that recordings read, and steps as they come too."""
        self._staging = Staging(model.device)
        self._inputs = torch.zeros(_input_bytes(recorded), dtype=torch.uint8, device=model.device)
        logits = torch.zeros(recorded.rows[-1], model.config.vocab_size, device=model.device)
        activations = make_activations(model, max(recorded.tokens, default=0))
        self._decoding: dict[bool, list[DecodeRecording]] = {}
        """Recordings of steps without adapters and with them."""
        self._mixed: dict[bool, list[MixedRecording]] = {}
        for adapters in (None, self.adapters) if recorded.num_adapters else (None,):
            beside = self._inputs, self.tables.table, adapters
            self._decoding[adapters is not None] = [
                DecodeRecording(model, cache, logits[:size], max_context, *beside) for size in recorded.rows
            ]
            self._mixed[adapters is not None] = [
                MixedRecording(model, cache, activations.first(size), *beside) for size in recorded.tokens
            ]
        if recorder is None and model.device.type == "cuda":
            self._capture()
        else:
            self._record(recorder or NoRecorder())

    @property
    def stairs(self) -> Stairs:
        """What the performance model is told of the recordings. A step has as many tokens as it has rows, or more, so
        of few tokens those of decode steps count."""
        rows = [recording.inputs.size for recording in self._decoding[False]]
        tokens = [recording.inputs.size for recording in self._mixed[False]]
        sizes = [*rows, *(size for size in tokens if size > rows[-1])]
        return Stairs(rows[-1], max(tokens, default=0), cliffs=tuple((size, 0.0) for size in sizes))

    def greedy_on_device(self, batch: Batch, adapter_rows: Sequence[AdapterRows] = ()) -> Tensor:
        """`models.llama.largest` of a step that is covered; it stays on the GPU, until the next step. Waits for
        nothing."""
        if not _is_decode(batch):
            return largest(self._run_mixed(batch, adapter_rows))
        return self._run_decode(batch, adapter_rows).largest[:, : len(batch.rows)]

    def on_device(self, batch: Batch, adapter_rows: Sequence[AdapterRows] = ()) -> Tensor:
        """float32 [R, vocab_size] of a step that is covered; it stays on the GPU, until the next step. Waits for
        nothing."""
        if not _is_decode(batch):
            return self._run_mixed(batch, adapter_rows)
        return self._run_decode(batch, adapter_rows).logits[: len(batch.rows)]

    def covers(self, batch: Batch, adapter_rows: Sequence[AdapterRows] = ()) -> bool:
        """Whether there is a recording for the step."""
        recordings = (self._decoding if _is_decode(batch) else self._mixed).get(bool(adapter_rows))
        if not recordings or not self.adapters.hold([rows.adapter for rows in adapter_rows]):
            return False
        is_known = len(batch.attention.context_len) <= len(self.tables.table)
        return is_known and len(batch.token_ids) <= recordings[-1].inputs.size

    def segments(
        self, batch: Batch, adapter_rows: Sequence[AdapterRows], inputs: Inputs | None = None
    ) -> Segments | None:
        """The adapters of a step, those of recordings where they hold them; None where it has none. inputs: of the
        recording that reads them; None: the step is computed as it comes."""
        if not adapter_rows:
            return None
        num_tokens = len(batch.token_ids) if inputs is None else inputs.size
        return build_segments(adapter_rows, len(batch.token_ids), self.adapters, tile_rows(num_tokens))

    def _run_decode(self, batch: Batch, adapter_rows: Sequence[AdapterRows]) -> DecodeRecording:
        recording = _find(self._decoding[bool(adapter_rows)], len(batch.rows))
        tables, segments = self._tables_of(batch), self.segments(batch, adapter_rows, recording.inputs)
        self._send(recording.inputs, recording.lay_out(batch, tables, segments), tables)
        if batch.before is not None:
            fill_in(recording.inputs.numbers[0], batch.before)
        recording.run()
        return recording

    def _run_mixed(self, batch: Batch, adapter_rows: Sequence[AdapterRows]) -> Tensor:
        recording = _find(self._mixed[bool(adapter_rows)], len(batch.token_ids))
        tables, segments = self._tables_of(batch), self.segments(batch, adapter_rows, recording.inputs)
        attention, contexts = batch.attention, batch.attention.context_len.numpy()
        check_contexts(contexts, tables.table, self.cache.block_size)
        queries = plan_queries(attention.query_start.numpy(), contexts, tables.rows.numpy(), exact=False)
        others = [batch.rows.numpy(), *queries.arrays]
        rows, *planned = self._send(recording.inputs, recording.lay_out(batch, segments), tables, others)
        if batch.before is not None:
            fill_in(recording.inputs.numbers[0], batch.before)
        return recording.run(replace(attention, plan=queries.on_device(tables.table, planned)), rows)

    def _tables_of(self, batch: Batch) -> StepTables:
        own = batch.attention.tables
        return self.tables.replace(batch.attention.block_tables) if own is None else own

    def _send(
        self, inputs: Inputs, arrays: Sequence[Array], tables: StepTables, others: Sequence[Array] = ()
    ) -> list[Tensor]:
        """Bring a step's arrays to where its recording reads them, others anywhere, and the tables up to date. Returns
        the others."""
        sending = [*arrays, tables.places.numpy(), tables.blocks.numpy(), *others]
        has_room = lay_out(array.nbytes for array in sending)[1] <= len(self._inputs)
        sent = self._staging.send(sending, self._inputs if has_room else None)
        if not has_room:
            inputs.fill(sent[: len(arrays)])
        places, blocks, *moved = sent[len(arrays) :]
        tables.change(places, blocks)
        return moved

    def _capture(self) -> None:
        begun_s = time.perf_counter()
        recorder = GraphRecorder(self.model.device)
        with recorder.session():
            self._record(recorder)
        seconds = round(time.perf_counter() - begun_s, 3)
        _log.info("steps recorded", extra={"num_graphs": recorder.num_graphs, "seconds": seconds})

    def _record(self, recorder: Recorder) -> None:
        # the largest first: the others find room in its memory
        for mixed in self._mixed.values():
            for in_pieces in reversed(mixed):
                in_pieces.record(recorder)
        for decoding in self._decoding.values():
            for whole in reversed(decoding):
                whole.record(recorder)


def _is_decode(batch: Batch) -> bool:
    """Whether it is one token a sequence, whose logits are wanted in order."""
    num_tokens = len(batch.token_ids)
    is_single = num_tokens == len(batch.rows) == len(batch.attention.context_len)
    return is_single and bool((batch.rows == torch.arange(num_tokens)).all())


def _find(recordings: Sequence[_Recording], size: int) -> _Recording:
    return next(recording for recording in recordings if recording.inputs.size >= size)


def _input_bytes(recorded: Recorded) -> int:
    """Bytes of the largest steps, with what they change in the tables and how their queries are attended to."""
    most = 0
    kinds = ((DECODE_NUMBERS, recorded.rows, 0), (MIXED_NUMBERS, recorded.tokens, PLAN_ARRAYS))
    for num_numbers, sizes_of, num_arrays in kinds:
        size = max(sizes_of, default=0)
        changes, rows = MOST_CHANGES * size, size if num_arrays else 0
        own = input_bytes(num_numbers, size, recorded.num_adapters)
        most = max(most, lay_out((own, 8 * changes, 4 * changes, 8 * rows, *([4 * size] * num_arrays)))[1])
    return most


def sizes(max_rows: int) -> list[int]:
    """Rows of recorded decode steps, ascending: 1, 2, 4, 8, then by halves of a power of two, up to the first that is
    enough."""
    found = [1]
    while found[-1] < max_rows:
        last = found[-1]
        found.append(2 * last if last < 8 else last + (last & -last) // (1 if last & (last - 1) else 2))
    return found


def token_sizes(max_tokens: int) -> list[int]:
    """Tokens of steps recorded in pieces, ascending: from FEWEST_TOKENS to MOST_TOKENS three to a power of two, up to
    the first that is enough. Above 12 tokens a step is filled up by less than a third."""
    every: list[int] = []
    power = FEWEST_TOKENS
    while power < MOST_TOKENS:
        every += [power, power * 5 // 4, power * 13 // 8]
        power *= 2
    every.append(MOST_TOKENS)
    return every[: 1 + sum(size < max_tokens for size in every)]


def recorded_steps(config: EngineConfig) -> Recorded:
    """What a replica's engine records."""
    adapters = config.adapters
    tokens = token_sizes(config.token_budget)
    return Recorded(sizes(config.max_num_seqs), tokens, adapters.slots, adapters.max_rank)
