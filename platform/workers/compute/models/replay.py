"""Decode steps of a model on a GPU as recordings: what a step launches is captured once for some numbers of rows (CUDA
graphs) and then replayed.

A recording reads what a step is made of from buffers that stay where they are. A step with fewer rows is filled up:
such a row writes its key and value nowhere and attends to nothing. What is launched depends neither on contexts nor on
anything else that a step brings, so the recording holds for all of them. Where there is nothing to capture with, the
same function is called instead: so all but the capture itself is tested without a GPU.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.models.llama import KvCache, Llama, largest
from penstock.workers.compute.triton.plan import Plan, Rows

NOWHERE = -1
"""Slot of a row that is filled up: its key and value are not written."""


class Replay:
    """Steps of one token a sequence, without adapters. One thread at a time."""

    def __init__(self, model: Llama, cache: KvCache, recorded: Sequence[int], max_context: int) -> None:
        """recorded: numbers of rows, ascending, for instance those of `sizes`. max_context: tokens of a sequence.

        Captures all it will replay, where there is a GPU: seconds."""
        self.model = model
        self.cache = cache
        self._most = recorded[-1]
        logits = torch.zeros(self._most, model.config.vocab_size, device=model.device)
        self._recordings = {size: _Recording(model, cache, logits[:size], max_context) for size in recorded}
        if model.device.type == "cuda":
            capturing = partial(torch.cuda.graph, pool=torch.cuda.graph_pool_handle())
            # the largest first: the others find room in its memory
            for recording in reversed(self._recordings.values()):
                recording.capture(capturing)

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
        recording.fill(batch)
        recording.run()
        return recording


class _Recording:
    """Steps of as many rows as logits [size, vocab_size] has, recorded. Other recordings may write to the same
    logits."""

    def __init__(self, model: Llama, cache: KvCache, logits: Tensor, max_context: int) -> None:
        size, device = len(logits), model.device
        self._model = model
        self._cache = cache
        self._max_context = max_context
        self._places = torch.zeros(4, size, dtype=torch.int64, device=device)
        self._places[2] = NOWHERE
        self._tables = torch.zeros(size, -(-max_context // cache.block_size), dtype=torch.int32, device=device)
        self._order = torch.arange(size, device=device)
        self.logits = logits
        self.largest = torch.zeros(2, size, dtype=torch.float64, device=device)
        self.run: Callable[[], None] = self._compute

    def fill(self, batch: Batch) -> None:
        """Copy the batch into the buffers. Rows that are filled up keep an earlier step's tables, which nothing
        reads."""
        count, attention = len(batch.rows), batch.attention
        places = torch.zeros(self._places.shape, dtype=torch.int64)
        places[2] = NOWHERE
        places[:, :count] = torch.stack(
            (batch.token_ids, batch.positions, attention.slot_mapping, attention.context_len.long())
        )
        self._places.copy_(places)
        self._tables[:count, : attention.block_tables.shape[1]].copy_(attention.block_tables)

    def capture(self, capturing: Callable[[torch.cuda.CUDAGraph], AbstractContextManager[None]]) -> None:
        """Record a step whose rows are all filled up, which changes nothing anywhere; before it one without capturing,
        so that kernels are compiled."""
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            self._compute()
            with capturing(graph):
                self._compute()
        self.run = graph.replay

    def _compute(self) -> None:
        token_ids, positions, slots, contexts = self._places
        order, visible = self._order.int(), contexts.int()
        plan = Plan(self._tables, Rows(order, order, visible, self._max_context))
        attention = AttentionBatch(order, visible, self._tables, slots, plan)
        logits = self._model.compute(token_ids, positions, self._cache, attention, self._order)
        self.logits.copy_(logits)
        self.largest.copy_(largest(logits))


def sizes(max_rows: int) -> list[int]:
    """Rows of recordings, ascending: 1, 2, 4, 8, then by halves of a power of two, up to the first that is enough."""
    found = [1]
    while found[-1] < max_rows:
        last = found[-1]
        found.append(2 * last if last < 8 else last + (last & -last) // (1 if last & (last - 1) else 2))
    return found
