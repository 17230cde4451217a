"""C ABI of cpp/decoder/decoder.cpp: a model and a cache as it wants them, and the call that computes a step. Shapes and
types are checked here, because C can't."""

import ctypes
import enum
import mmap
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.workers.compute.kernels.cache_layout import CacheLayout, cache_code
from penstock.workers.compute.kernels.choice import MOST_TOKENS, Draw, lay_out_draws
from penstock.workers.compute.kernels.low_rank import AdapterTable
from penstock.workers.compute.kernels.matmul import PackedMatrix

_P, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
MOST_TRIES = 64
"""Times that a call may ask for more memory: once, and once more for each further step of a draft."""


class _Layer(ctypes.Structure):
    _fields_ = tuple(
        (name, _P)
        for name in (
            "input_norm", "post_norm", "q_norm", "k_norm", "qkv", "o", "gate_up", "down",
            "qkv_bias", "o_bias", "gate_up_bias", "down_bias",
        )
    )  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _I64) for name in ("num_layers", "hidden", "inner", "num_heads", "num_kv_heads", "dim", "vocab")),
        *((name, _P) for name in ("layers", "embed", "head", "norm", "cos", "sin")),
        ("eps", _F32),
        ("activations", _I32),
        ("first", _P),
        ("chained", _P),
    )


class _Store(ctypes.Structure):
    _fields_ = (("data", _P), ("scales", _P), ("block_stride", _I64), ("is_values", ctypes.c_bool))


class _Cache(ctypes.Structure):
    _fields_ = (("stores", _P), ("block_size", _I64), ("dtype", _I32))


class CStep(ctypes.Structure):
    _fields_ = (
        *((name, _I64) for name in ("num_tokens", "num_seqs", "num_rows")),
        *((name, _P) for name in ("token_ids", "positions", "slots", "query_start", "context_len", "block_tables")),
        ("table_stride", _I64),
        *((name, _P) for name in ("rows", "logits", "places", "choices", "best", "best_score", "features")),
        ("num_parts", _I64),
        ("taps", _P),
        ("num_taps", _I64),
        *((name, _P) for name in ("tapped", "states")),
        ("num_adapters", _I64),
        *((name, _P) for name in ("adapters", "adapter_of")),
        ("widest_rank", _I64),
    )


class CDrafts(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("vocabulary", "wanted", "tokens")),
        *((name, _I64) for name in ("most", "num_rows")),
        *((name, _P) for name in ("places", "behind")),
        ("made", _I64),
        *((name, ctypes.c_float) for name in ("keep_from", "go_from")),
        *((name, _P) for name in ("chances", "kept", "choices")),
        ("sharpness", ctypes.c_float),
    )


class Activations(enum.IntEnum):
    """What activations are rounded to before they are multiplied with quantized matrices; as decoder.hpp has it."""

    MIXED = 0
    """One term of 8 bits, with outliers for few rows and in steps of short prompts (`Rounding.OUTLIERS`)."""
    BFLOAT16 = 1
    ONE_TERM = 2
    TWO_TERMS = 3


class Shape(NamedTuple):
    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    dim: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Parameters:
    """A model's parameters: matrices packed, vectors float32."""

    shape: Shape
    layers: Sequence[Mapping[str, PackedMatrix | Tensor]]
    """Each layer's parameters by the names of `_Layer`; a name is missing where the model has no such parameter."""
    embed: PackedMatrix
    head: PackedMatrix
    norm: Tensor
    cos: Tensor
    """float32 [positions, dim]; sin likewise, its first half negative."""
    sin: Tensor
    eps: float
    first: PackedMatrix | None = None
    """[hidden, (1 + parts) * hidden], for `States.features` of the target, of a draft head alone."""
    chained: PackedMatrix | None = None
    """[hidden, 2 * hidden], the same for one part, its own output."""


@dataclass(frozen=True, slots=True)
class CacheLayer:
    keys: Tensor
    """[num_blocks, num_kv_heads, block_size, dim], as `values`; blocks may lie apart."""
    values: Tensor
    layout: CacheLayout


class BoundCache:
    """A KV cache as the kernel takes it; keeps its tensors."""

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        self._layers = layers
        self.num_blocks, _, self.block_size, _ = layers[0].keys.shape
        code = cache_code(layers[0].keys, layers[0].layout)
        self._stores = (_Store * (2 * len(layers)))()
        for index, layer in enumerate(layers):
            for is_values, data in enumerate((layer.keys, layer.values)):
                assert data[0].is_contiguous()
                assert cache_code(data, layer.layout) == code
                scales = None if layer.layout.scales is None else layer.layout.scales[is_values].data_ptr()
                self._stores[2 * index + is_values] = _Store(data.data_ptr(), scales, data.stride(0), is_values)
        self._struct = _Cache(ctypes.addressof(self._stores), self.block_size, code)
        self.address = ctypes.addressof(self._struct)


class TokenLayout(NamedTuple):
    """Where a step's tokens lie: the tensors of `attention.AttentionBatch`, with their shapes."""

    query_start: Tensor
    context_len: Tensor
    block_tables: Tensor
    slot_mapping: Tensor


class ChosenTokens(NamedTuple):
    """The token that is chosen in each row of a step."""

    ids: Tensor
    """int64 [R]: drawn, or with the largest logit, of equals the lowest."""
    scores: Tensor
    """float32 [R]: the largest logit; NaN where a logit of the row is NaN."""


class States(NamedTuple):
    """What a step takes of a drafter, and leaves for one; None: it does not. All float32."""

    features: Tensor | None = None
    """[T, parts, hidden]: what a draft head joins to the tokens."""
    taps: Tensor | None = None
    """int32: numbers of layers below the last, ascending."""
    tapped: Tensor | None = None
    """[T, taps, hidden]: where the residual stream behind those layers goes."""
    behind: Tensor | None = None
    """[R, hidden]: where that of the rows behind the last layer goes, before the last norm."""

    def check(self, num_tokens: int, num_rows: int, shape: Shape) -> None:
        num_taps = 0 if self.taps is None else len(self.taps)
        wanted = (
            (self.features, (num_tokens, 0 if self.features is None else self.features.shape[1], shape.hidden)),
            (self.tapped, (num_tokens, num_taps, shape.hidden)),
            (self.behind, (num_rows, shape.hidden)),
        )
        for tensor, size in wanted:
            assert tensor is None or (
                tensor.dtype == torch.float32 and tensor.is_contiguous() and tuple(tensor.shape) == size
            )
        assert (self.taps is None) == (self.tapped is None)
        if self.taps is not None:
            assert self.taps.dtype == torch.int32
            layers = self.taps.tolist()
            assert layers == sorted(set(layers))
            assert all(0 <= layer < shape.num_layers - 1 for layer in layers)


NO_STATES = States()


class Decoder:
    """A model in the kernel library: each step is computed in one call. Only one thread may use it at a time."""

    def __init__(self, library: ctypes.CDLL, parameters: Parameters, threads: int, activations: Activations) -> None:
        self._call = library.penstock_step
        self._call.restype, self._call.argtypes = _I64, [_P, _P, _P, _P, _I32, _P, _I64]
        self._threads = threads
        self._parameters = parameters
        shape = parameters.shape
        self._layers = (_Layer * shape.num_layers)(
            *(_Layer(**{name: _address(value) for name, value in layer.items()}) for layer in parameters.layers)
        )
        self._model = _Model(
            *shape, ctypes.addressof(self._layers), parameters.embed.handle, parameters.head.handle,
            _address(parameters.norm), _address(parameters.cos), _address(parameters.sin), parameters.eps, activations,
            *(None if matrix is None else matrix.handle for matrix in (parameters.first, parameters.chained)),
        )  # fmt: skip
        self.shape = parameters.shape
        self._step = CStep()
        self._model_address = ctypes.addressof(self._model)
        self._memory: Tensor | None = None
        self._memory_address = self._memory_bytes = 0

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: BoundCache,
        layout: TokenLayout,
        rows: Tensor,
        logits: Tensor | None,
        places: Tensor | None = None,
        states: States = NO_STATES,
        adapters: AdapterTable | None = None,
        draws: Sequence[Draw] | None = None,
    ) -> ChosenTokens:
        """token_ids, positions: int64 [T]. rows: int64 [R], tokens whose logits are wanted, in order. logits: float32
        [R, vocab], where they go. places: int64 [R], the row of `logits` for each, -1: nowhere; None: all, in order.
        draws: how each row's token is chosen, whose logits have a place if it `is_cut`; None: greedily.

        Raises IndexError for an id without a row in the embedding.
        """
        num_tokens, num_seqs, num_rows = len(token_ids), len(layout.context_len), len(rows)
        shape = self.shape
        assert token_ids.dtype == positions.dtype == layout.slot_mapping.dtype == rows.dtype == torch.int64
        assert layout.query_start.dtype == layout.context_len.dtype == layout.block_tables.dtype == torch.int32
        assert len(positions) == len(layout.slot_mapping) == num_tokens
        assert len(layout.query_start) == num_seqs + 1 == len(layout.block_tables) + 1
        assert logits is None or (logits.dtype == torch.float32 and logits.is_contiguous())
        if places is None:
            assert logits is None or logits.shape == (num_rows, shape.vocab)
        else:
            assert logits is not None
            assert places.dtype == torch.int64
            assert places.is_contiguous()
            assert len(places) == num_rows
            assert num_rows == 0 or int(places.max()) < len(logits)
            assert logits.shape[1] == shape.vocab
        tables = layout.block_tables if layout.block_tables.stride(1) == 1 else layout.block_tables.contiguous()
        chosen, scores = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
        table = self._lay_out_draws(draws, places, num_rows)
        kept = [
            part.contiguous()
            for part in (token_ids, positions, layout.slot_mapping, layout.query_start, layout.context_len)
        ]
        rows = rows.contiguous()
        step = self._step
        step.num_tokens, step.num_seqs, step.num_rows = num_tokens, num_seqs, num_rows
        step.token_ids, step.positions, step.slots, step.query_start, step.context_len = (
            part.data_ptr() for part in kept
        )
        step.block_tables, step.table_stride = tables.data_ptr(), tables.stride(0)
        step.rows, step.logits = rows.data_ptr(), None if logits is None else logits.data_ptr()
        step.places = None if places is None else places.data_ptr()
        step.choices = None if table is None else table.buffer_info()[0]
        step.best, step.best_score = chosen.data_ptr(), scores.data_ptr()
        states.check(num_tokens, num_rows, shape)
        step.features, step.taps, step.tapped, step.states = map(
            _pointer, (states.features, states.taps, states.tapped, states.behind)
        )
        step.num_parts = 0 if states.features is None else states.features.shape[1]
        step.num_taps = 0 if states.taps is None else len(states.taps)
        kept_too = self._place(adapters, num_tokens)
        self.compute(step, cache)
        del kept_too, table
        return ChosenTokens(chosen, scores)

    def _lay_out_draws(self, draws: Sequence[Draw] | None, places: Tensor | None, num_rows: int) -> "array[int] | None":
        if draws is None:
            return None
        assert len(draws) == num_rows
        assert self.shape.vocab < MOST_TOKENS
        if any(draw.is_cut for draw in draws):
            assert places is not None
            assert all(place >= 0 or not draw.is_cut for place, draw in zip(places.tolist(), draws, strict=True))
        return lay_out_draws(draws)

    def _place(self, table: AdapterTable | None, num_tokens: int) -> object:
        """Write a step's adapters into it; returns what must live as long as it is computed."""
        step = self._step
        if table is None:
            step.num_adapters = step.widest_rank = 0
            return None
        assert table.adapter_of.dtype == torch.int32
        assert table.adapter_of.is_contiguous()
        assert len(table.adapter_of) == num_tokens
        assert all(adapter.num_layers == self.shape.num_layers for adapter in table.adapters)
        addresses = (_P * len(table.adapters))(*(adapter.address for adapter in table.adapters))
        step.num_adapters, step.widest_rank = len(table.adapters), table.widest_rank
        step.adapters, step.adapter_of = ctypes.addressof(addresses), table.adapter_of.data_ptr()
        return addresses

    def compute(self, step: CStep, cache: BoundCache, drafts: CDrafts | None = None) -> None:
        """Compute a step that is laid out, with all that it points to; and behind its rows drafts, of a draft head.

        Raises IndexError for an id without a row in the embedding.
        """
        behind = None if drafts is None else ctypes.addressof(drafts)
        # a draft is several steps, of which a later one may need more than the first
        for _ in range(MOST_TRIES):
            needed = self._call(
                self._model_address, cache.address, ctypes.addressof(step), behind, self._threads,
                self._memory_address, self._memory_bytes,
            )  # fmt: skip
            if not needed:
                return
            if needed < 0:
                raise IndexError(
                    f"a token id without a row, but the embedding has {self._parameters.embed.shape[0]} rows"
                )
            self._memory_address = self._memory_bytes = 0
            self._memory = None  # what was there goes first, so that never both are resident
            self._memory, self._memory_bytes = _map_memory(needed + needed // 4), needed + needed // 4
            self._memory_address = self._memory.data_ptr()
        raise AssertionError("the memory that a step needs grows from call to call")


def _map_memory(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], in pages of its own: none is resident before it is written, and all are given back. Out of the
    allocator's heap, what a smaller step had would stay there, under what a larger one has."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _pointer(value: Tensor | None) -> int | None:
    return None if value is None else value.data_ptr()


def _address(value: PackedMatrix | Tensor) -> int:
    if isinstance(value, PackedMatrix):
        return value.handle
    assert value.dtype == torch.float32
    assert value.is_contiguous()
    return value.data_ptr()
