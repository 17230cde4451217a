"""Decode steps of a model on a GPU as recordings: what a step launches is captured once for some numbers of rows (CUDA
graphs) and then replayed.

A recording reads what a step is made of from memory that stays where it is, and blocks from tables that stay there too
(`block_tables`). A step sends its numbers, and what it changes in the tables, in one copy. One with fewer rows is
filled up: such a row writes its key and value nowhere and attends to nothing. What is launched depends neither on
contexts nor on anything else that a step brings, so the recording holds for all of them. Where there is nothing to
capture with, the same function is called instead: so all but the capture itself is tested without a GPU.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.wire.frames import Stairs
from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.batch import Batch, fill_in
from penstock.workers.compute.models.llama import KvCache, Llama, largest
from penstock.workers.compute.triton.attention.block_tables import BlockTables, StepTables
from penstock.workers.compute.triton.attention.plan import Plan, Rows
from penstock.workers.compute.triton.staging import Staging, lay_out

NOWHERE = -1
"""Slot of a row that is filled up: its key and value are not written."""
NUMBERS = 5
"""Numbers of a row: token id, position, slot, context, row of the block tables."""
MOST_CHANGES = 2
"""Changed entries of the tables for each row that have room beside the numbers: more of them take a copy more."""


class Replay:
    """Steps of one token a sequence, without adapters. One thread at a time."""

    def __init__(self, model: Llama, cache: KvCache, recorded: Sequence[int], max_context: int) -> None:
        """recorded: numbers of rows, ascending, for instance those of `sizes`. max_context: tokens of a sequence.

        Captures all it will replay, where there is a GPU: seconds."""
        self.model = model
        self.cache = cache
        self._most = recorded[-1]
        self.tables = BlockTables(self._most, -(-max_context // cache.block_size), model.device)
        """The tables that recordings read, and steps as they come too, whose batches are made by them."""
        self._staging = Staging(model.device)
        self._inputs = torch.zeros(_input_bytes(self._most), dtype=torch.uint8, device=model.device)
        logits = torch.zeros(self._most, model.config.vocab_size, device=model.device)
        self._recordings = {
            size: _Recording(model, cache, logits[:size], max_context, self._inputs, self.tables.table)
            for size in recorded
        }
        if model.device.type == "cuda":
            capturing = partial(torch.cuda.graph, pool=torch.cuda.graph_pool_handle())
            # the largest first: the others find room in its memory
            for recording in reversed(self._recordings.values()):
                recording.capture(capturing)

    @property
    def stairs(self) -> Stairs:
        """What the performance model is told of the recordings."""
        return Stairs(self._most, cliffs=tuple((size, 0.0) for size in self._recordings))

    def greedy_tokens(self, batch: Batch) -> Tensor:
        """float64 [2, R], on the host: see `largest`."""
        return self.greedy_on_device(batch).cpu()

    def greedy_on_device(self, batch: Batch) -> Tensor:
        """`greedy_tokens` that stay on the GPU, until the next step. Waits for nothing."""
        return self._run(batch).largest[:, : len(batch.rows)]

    def logits(self, batch: Batch) -> Tensor:
        """float32 [R, vocab_size], on the host."""
        return self.on_device(batch).cpu()

    def on_device(self, batch: Batch) -> Tensor:
        """`logits` that stay on the GPU, until the next step. Waits for nothing."""
        return self._run(batch).logits[: len(batch.rows)]

    def covers(self, batch: Batch) -> bool:
        """Whether the batch is a decode step of no more rows than the largest recording has."""
        return len(batch.token_ids) == len(batch.rows) == len(batch.attention.context_len) <= self._most

    def _run(self, batch: Batch) -> "_Recording":
        recording = next(recording for size, recording in self._recordings.items() if size >= len(batch.rows))
        own = batch.attention.tables
        tables = self.tables.replace(batch.attention.block_tables) if own is None else own
        self._send(recording, recording.lay_out(batch, tables), tables)
        if batch.before is not None:
            fill_in(recording.numbers[0], batch.before)
        recording.run()
        return recording

    def _send(self, recording: "_Recording", numbers: NDArray[np.int64], tables: StepTables) -> None:
        """Bring a step's numbers to where its recording reads them, and the tables up to date."""
        arrays = [numbers, tables.places.numpy(), tables.blocks.numpy()]
        has_room = lay_out(array.nbytes for array in arrays)[1] <= len(self._inputs)
        sent, places, blocks = self._staging.send(arrays, self._inputs if has_room else None)
        if not has_room:
            recording.numbers.copy_(sent)
        tables.change(places, blocks)


class _Recording:
    """Steps of as many rows as logits [size, vocab_size] has, recorded. Other recordings may read from the same inputs
    and write to the same logits."""

    def __init__(
        self, model: Llama, cache: KvCache, logits: Tensor, max_context: int, inputs: Tensor, tables: Tensor
    ) -> None:
        """inputs: bytes that begin with the numbers of a step's rows. tables: block tables that it reads."""
        size, device = len(logits), model.device
        self._model = model
        self._cache = cache
        self._max_context = max_context
        self._tables = tables
        self._order = torch.arange(size, device=device)
        self.numbers = inputs[: 8 * NUMBERS * size].view(torch.int64).view(NUMBERS, size)
        self.logits = logits
        self.largest = torch.zeros(2, size, dtype=torch.float64, device=device)
        self.run: Callable[[], None] = self._compute

    def lay_out(self, batch: Batch, tables: StepTables) -> NDArray[np.int64]:
        """The numbers of a batch's rows, and of those that fill it up."""
        count, attention = len(batch.rows), batch.attention
        numbers = np.zeros(self.numbers.shape, dtype=np.int64)
        numbers[2] = NOWHERE
        of_rows = batch.token_ids, batch.positions, attention.slot_mapping, attention.context_len, tables.rows
        for own, tensor in zip(numbers, of_rows, strict=True):
            own[:count] = tensor.numpy()
        return numbers

    def capture(self, capturing: Callable[[torch.cuda.CUDAGraph], AbstractContextManager[None]]) -> None:
        """Record a step whose rows are all filled up, which changes nothing anywhere; before it one without capturing,
        so that kernels are compiled."""
        graph = torch.cuda.CUDAGraph()
        self.numbers.zero_()
        self.numbers[2] = NOWHERE
        with torch.inference_mode():
            self._compute()
            with capturing(graph):
                self._compute()
        self.run = graph.replay

    def _compute(self) -> None:
        token_ids, positions, slots, contexts, owners = self.numbers
        visible = contexts.int()
        order = self._order.int()
        plan = Plan(self._tables, Rows(order, owners.int(), visible, self._max_context))
        attention = AttentionBatch(order, visible, self._tables, slots, plan)
        logits = self._model.compute(token_ids, positions, self._cache, attention, self._order)
        self.logits.copy_(logits)
        self.largest.copy_(largest(logits))


def _input_bytes(size: int) -> int:
    """Bytes of what a step of so many rows brings, with MOST_CHANGES for each."""
    changes = MOST_CHANGES * size
    return lay_out((8 * NUMBERS * size, 8 * changes, 4 * changes))[1]


def sizes(max_rows: int) -> list[int]:
    """Rows of recordings, ascending: 1, 2, 4, 8, then by halves of a power of two, up to the first that is enough."""
    found = [1]
    while found[-1] < max_rows:
        last = found[-1]
        found.append(2 * last if last < 8 else last + (last & -last) // (1 if last & (last - 1) else 2))
    return found
