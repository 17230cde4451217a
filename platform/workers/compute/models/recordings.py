"""What a model launches for steps of a certain size, recorded: decode steps whole, any others in pieces, between which
attention is launched as the step wants it.

Invariant: a recording reads what a step is made of from the `inputs` that all recordings share, and block tables and
tables of adapters that stay where they are; it leaves its results in memory of its own or, of pieces, in `Activations`
that all pieces share. So one step at a time, on one stream. Tokens that fill a step up have no slot, position 0 and no
adapter: what becomes of them is finite or not, but no other token's result depends on it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.models.capture import Recorder
from penstock.workers.compute.models.llama import KvCache, Llama, largest
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.triton.attention.block_tables import StepTables
from penstock.workers.compute.triton.attention.plan import Plan, Rows
from penstock.workers.compute.triton.segments import AdapterTables, Segments, most_tiles, tile_rows
from penstock.workers.compute.triton.staging import Array, lay_out

NOWHERE = -1
"""Slot of a token that fills up: its key and value are not written."""
DECODE_NUMBERS = 5
"""Numbers of a row: token id, position, slot, context, row of the block tables."""
MIXED_NUMBERS = 3
"""Numbers of a token: token id, position, slot."""


class Inputs:
    """What a recorded step of `size` tokens brings that recordings read, at the beginning of shared memory."""

    def __init__(self, memory: Tensor, num_numbers: int, size: int, adapters: AdapterTables | None) -> None:
        """memory: bytes, on the device. adapters: tables that the recording reads; None: it has no adapters."""
        self.size = size
        arrays = _arrays(num_numbers, size, 0 if adapters is None else len(adapters.table))
        starts, self.num_bytes = lay_out(_bytes_of(array) for array in arrays)
        self._memory = memory
        parts = [
            memory[start : start + _bytes_of(array)].view(array.dtype).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]
        self.numbers = parts[0]
        """int64 [numbers, size]."""
        self.segments: Segments | None = None
        if adapters is not None:
            _, rows, tiles = parts
            self.segments = Segments(adapters.table, rows, tiles, tile_rows(size), adapters.max_rank)

    def lay_out(self, numbers: tuple[Tensor, ...], segments: Segments | None) -> list[Array]:
        """The arrays of a step, filled up. numbers: of its tokens, as many as the recording has."""
        filled = np.zeros(self.numbers.shape, dtype=np.int64)
        filled[2] = NOWHERE
        for own, tensor in zip(filled, numbers, strict=True):
            own[: len(tensor)] = tensor.numpy()
        if self.segments is None:
            return [filled]
        rows = np.zeros(self.segments.rows.shape, dtype=np.int64)
        tiles = np.zeros(self.segments.tiles.shape, dtype=np.int32)
        if segments is not None:
            rows[: len(segments.rows)] = segments.rows.numpy()
            tiles[: len(segments.tiles)] = segments.tiles.numpy()
        return [filled, rows, tiles]

    def fill(self, sent: list[Tensor]) -> None:
        """Take over what was sent elsewhere."""
        own = [self.numbers, *((self.segments.rows, self.segments.tiles) if self.segments is not None else ())]
        for target, source in zip(own, sent, strict=True):
            target.copy_(source)

    def clear(self) -> None:
        """A step that is all filled up."""
        self._memory[: self.num_bytes].zero_()
        self.numbers[2] = NOWHERE


class _Array(NamedTuple):
    shape: tuple[int, int] | tuple[int]
    dtype: torch.dtype


def _arrays(num_numbers: int, size: int, num_adapters: int) -> list[_Array]:
    """Numbers, and where there are adapters the rows and tiles of `Segments`."""
    numbers = _Array((num_numbers, size), torch.int64)
    if not num_adapters:
        return [numbers]
    return [numbers, _Array((size,), torch.int64), _Array((most_tiles(size, num_adapters), 3), torch.int32)]


def _bytes_of(array: _Array) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def input_bytes(num_numbers: int, size: int, num_adapters: int) -> int:
    """Bytes of the `Inputs` of so many numbers a token, tokens and adapters."""
    return lay_out(_bytes_of(array) for array in _arrays(num_numbers, size, num_adapters))[1]


class DecodeRecording:
    """Steps of as many rows as logits [size, vocab_size] has, one token a sequence. Other recordings may write to the
    same logits."""

    def __init__(
        self,
        model: Llama,
        cache: KvCache,
        logits: Tensor,
        max_context: int,
        memory: Tensor,
        tables: Tensor,
        adapters: AdapterTables | None,
    ) -> None:
        """memory, adapters: as of `Inputs`. tables: block tables that it reads."""
        size, device = len(logits), model.device
        self._model = model
        self._cache = cache
        self._max_context = max_context
        self._tables = tables
        self._order = torch.arange(size, device=device)
        self.inputs = Inputs(memory, DECODE_NUMBERS, size, adapters)
        self.logits = logits
        self.largest = torch.zeros(2, size, dtype=torch.float64, device=device)
        self.run: Callable[[], None] = self._compute

    def lay_out(self, batch: Batch, tables: StepTables, segments: Segments | None) -> list[Array]:
        """The arrays of a batch, filled up."""
        attention = batch.attention
        numbers = batch.token_ids, batch.positions, attention.slot_mapping, attention.context_len, tables.rows
        return self.inputs.lay_out(numbers, segments)

    def record(self, recorder: Recorder) -> None:
        """Record a step that is all filled up, which changes nothing anywhere."""
        self.inputs.clear()
        self.run = recorder.record(self._compute)

    def _compute(self) -> None:
        token_ids, positions, slots, contexts, owners = self.inputs.numbers
        visible = contexts.int()
        order = self._order.int()
        plan = Plan(self._tables, Rows(order, owners.int(), visible, self._max_context))
        attention = AttentionBatch(order, visible, self._tables, slots, plan)
        step = ModelStep(token_ids, positions, attention, self._order, self.inputs.segments or ())
        logits = self._model.compute(step, self._cache)
        self.logits.copy_(logits)
        self.largest.copy_(largest(logits))


class Activations(NamedTuple):
    """What goes from piece to piece, for as many tokens as the largest step recorded in pieces has."""

    residual: Tensor
    """[T, hidden_size]; as all of them in the model's dtype."""
    queries: Tensor
    """[T, num_heads, head_dim]."""
    attended: Tensor
    """[T, num_heads, head_dim]."""
    normed: Tensor
    """[T, hidden_size], behind the last norm."""

    def first(self, size: int) -> "Activations":
        """The activations of a smaller step, in the same memory."""
        return Activations(*(part[:size] for part in self))


def make_activations(model: Llama, size: int) -> Activations:
    config = model.config
    hidden, heads = (size, config.hidden_size), (size, config.num_heads, config.head_dim)
    return Activations(
        *(torch.zeros(shape, dtype=model.dtype, device=model.device) for shape in (hidden, heads, heads, hidden))
    )


class MixedRecording:
    """Steps of up to `size` tokens of whatever sequences, in pieces: what lies before the first layer's attention, what
    lies between those of two layers, and what lies behind the last."""

    def __init__(
        self,
        model: Llama,
        cache: KvCache,
        activations: Activations,
        memory: Tensor,
        tables: Tensor,
        adapters: AdapterTables | None,
    ) -> None:
        """activations: of as many tokens as it has. memory, adapters: as of `Inputs`. tables: block tables."""
        self._model = model
        self._cache = cache
        self.activations = activations
        self.inputs = Inputs(memory, MIXED_NUMBERS, len(activations.residual), adapters)
        _, positions, slots = self.inputs.numbers
        # of the batch pieces take the slots, and of the plan that there is one
        attention = AttentionBatch(positions, positions, tables, slots, Plan(tables, None))
        self._way = model.make_way(positions, attention, cache, self.inputs.segments or (), activations.queries)
        self._pieces: list[Callable[[], None]] = [self._begin, *map(self._piece, range(len(model.layers)))]

    def lay_out(self, batch: Batch, segments: Segments | None) -> list[Array]:
        """The arrays of a batch, filled up."""
        return self.inputs.lay_out((batch.token_ids, batch.positions, batch.attention.slot_mapping), segments)

    def record(self, recorder: Recorder) -> None:
        """Record a step that is all filled up, which changes nothing but the activations."""
        self.inputs.clear()
        self._pieces = [recorder.record(piece) for piece in self._pieces]

    def run(self, attention: AttentionBatch, rows: Tensor) -> Tensor:
        """float32 [R, vocab_size] of the rows, int64 [R] on the device. attention: of the step's own tokens, which are
        in the inputs."""
        begin, *others = self._pieces
        begin()
        for index, go_on in enumerate(others):
            self._model.attend(index, self.activations.queries, attention, self._cache, self.activations.attended)
            go_on()
        return self._model.head(self.activations.normed, rows)

    def _begin(self) -> None:
        residual, _ = self._model.begin(self.inputs.numbers[0], self._way)
        self.activations.residual.copy_(residual)

    def _piece(self, index: int) -> Callable[[], None]:
        def go_on() -> None:
            behind = self._model.go_on(index, self.activations.residual, self.activations.attended, self._way)
            if index + 1 == len(self._model.layers):
                self.activations.normed.copy_(behind)

        return go_on
