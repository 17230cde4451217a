"""The decoder of the Llama family over a paged KV cache: Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3.

The tokens of a step are one flat list, whatever sequences they belong to; only attention knows which is whose. Norms,
RoPE and softmax are computed in float32, the rest in the model's dtype, as in transformers. In exact mode every row of
the output is bit-identical whatever other rows are in the step: matrix products go by fixed tiles (`linear`), and
operations whose inner order may depend on the tensor's shape go row by row. What lies between the products is that of
`Operators`: torch's, or on a GPU fused kernels.

A step is computed in pieces with attention between them (`begin`, then `attend` and `go_on` for each layer), so that
each piece can be recorded by itself (`recordings`): of a piece only the number of tokens matters.

A model may be one of several parts (`penstock.workers.compute.parallel`): it then has some of the heads, channels and
token ids, and asks its `Peers` for what takes all of them: sums behind o and down, rows of the embedding, logits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.workers.compute.attention import AttentionBatch, attend
from penstock.workers.compute.batch import fill_in
from penstock.workers.compute.device import CPU, fetch
from penstock.workers.compute.kernels.arena import Arena
from penstock.workers.compute.kernels.cache_layout import PLAIN, CacheLayout
from penstock.workers.compute.kernels.decoder import ChosenTokens
from penstock.workers.compute.linear import linear, linear_in_parts
from penstock.workers.compute.lora import StepAdapters, add_adapters, build_segments
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.models.operators import Norms, Operators, TorchOperators
from penstock.workers.compute.models.peers import Peers
from penstock.workers.compute.models.rope import inverse_frequencies, rope_tables
from penstock.workers.compute.quant.quantized import Matrix as QuantizedMatrix
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from penstock.workers.compute.triton.products.matrices import GpuMatrix
from penstock.workers.compute.triton.segments import Segments
from penstock.workers.compute.triton.staging import Staging, send_once
from penstock.workers.compute.weights import ROPE_FACTORS

Matrix = QuantizedMatrix | GpuMatrix
"""[N, K], dense or quantized."""
Adapt = Callable[[str, Tensor, Tensor], None]
"""Adds to a matrix's output what the step's adapters add, given its name in `lora.FUSED`, the output and the input."""

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
"""Types of keys and values that come with scales."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters of one decoder layer; matrices are [out, in]."""

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Matrix
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None

    @property
    def head_norms(self) -> Norms | None:
        """Weights of the norms of queries and keys, where the model has them."""
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)


class KvCache:
    """Keys and values of all layers, in blocks: per layer two tensors [num_blocks, num_kv_heads, block_size, head_dim].

    In 8 bits (int8 on the CPU, float8 e4m3 on a GPU) each token's head has a scale of its own: beside them two float32
    tensors [num_blocks, num_kv_heads, block_size].
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        *,
        by_block: bool = False,
        is_tiled: bool = False,
    ) -> None:
        """A cache of zeros. by_block: each block lies in one piece, all layers of it; on the host. is_tiled: see
        `cache_layout`; only kernels can read it."""
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self._device = device
        self.num_blocks = num_blocks
        self.block_size = block_size
        count = 2 * config.num_layers
        self._by_block = _by_block(shape, count, dtype) if by_block else None
        made = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]
            if self._by_block is None
            else list(self._by_block.unbind(1))
        )
        self.layers = list(zip(made[::2], made[1::2], strict=True))
        self.layouts = [CacheLayout(is_tiled=True) if is_tiled else PLAIN] * config.num_layers
        if dtype in EIGHT_BITS:
            self.layouts = [
                CacheLayout((torch.zeros(shape[:3], device=device), torch.zeros(shape[:3], device=device)), is_tiled)
                for _ in self.layers
            ]

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        row_bytes = config.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype in EIGHT_BITS else 0)
        return 2 * config.num_layers * config.num_kv_heads * block_size * row_bytes

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, each to where its pair says; none is both read and written."""
        if self._by_block is not None:
            self._copy_pieces(self._by_block, blocks)
            return
        source, target = send_once([np.array(blocks, dtype=np.int64).T], self._device)[0]
        for pair, layout in zip(self.layers, self.layouts, strict=True):
            for part in (*pair, *(layout.scales or ())):
                raw = part.view(torch.uint8) if part.dtype in EIGHT_BITS else part
                raw[target] = raw[source]

    def _copy_pieces(self, pieces: Tensor, blocks: Sequence[tuple[int, int]]) -> None:
        """`copy` where each block is a piece of memory, but for its scales: a gather for each layer would take more of
        torch's code than all else that a step does."""
        scales = [part for layout in self.layouts for part in layout.scales or ()]
        for source, target in blocks:
            for part in (pieces, *scales):
                part[target] = part[source]

    def poison(self, blocks: Tensor) -> None:
        """Fill blocks with NaN, so that a read of what nobody wrote shows. For tests."""
        for pair, layout in zip(self.layers, self.layouts, strict=True):
            for part in layout.scales or pair:
                part[blocks] = math.nan


def _by_block(shape: tuple[int, int, int, int], count: int, dtype: torch.dtype) -> Tensor:
    """Zeros [num_blocks, count, ...], on huge pages: the same block of all `count` tensors lies side by side, so memory
    is taken as blocks are, and few pages are in use."""
    num_blocks, *inner = shape
    return Arena().cut(count * math.prod(shape) * dtype.itemsize).view(dtype).view(num_blocks, count, *inner)


class Way(NamedTuple):
    """What the pieces of one step share."""

    operators: Operators
    cache: KvCache
    adapter_rows: StepAdapters


class Llama:
    """The model with its weights. Stateless between calls: the KV cache is the caller's."""

    reads_tiles = False
    """Whether the model reads a tiled cache (see `kernels.cache_layout`)."""
    packed_adapter_bits: int | None = None
    """Whether adapters must be packed for the model (see `kernels.low_rank`)."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Matrix],
        max_model_len: int,
        threads: int,
        exact: bool,
        peers: Peers | None = None,
    ) -> None:
        """weights: as `weights.load_weights` or `device.place_weights` returns them, all on one device. threads: of
        attention, on the CPU. peers: where the model is in parts; `config` then has this rank's heads."""
        self.config = config
        self.weights = weights
        self.embed = weights["embed"]
        self.dtype = self.embed.dtype
        self.device = self.embed.device if isinstance(self.embed, Tensor | GroupedMatrix) else CPU
        self.layers = [_layer(weights, index) for index in range(config.num_layers)]
        self.norm = _dense(weights["norm"])
        self._next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        self.lm_head = weights.get("lm_head", self.embed)
        factors = weights.get(ROPE_FACTORS)
        inverse = inverse_frequencies(config, None if factors is None else _dense(factors).cpu())
        self._cos, self._sin = (table.to(self.device) for table in rope_tables(inverse, max_model_len))
        self._threads = threads
        self._exact = exact
        self._peers = peers
        self._staging = Staging(self.device)

    @property
    def rope(self) -> tuple[Tensor, Tensor]:
        """Tables of cosines and sines of each position, as `rope_tables` makes them."""
        return self._cos, self._sin

    def logits(self, step: ModelStep, cache: KvCache) -> Tensor:
        """float32 [R, vocab_size] of the step's rows; the KV of all tokens is written to the cache. The step and the
        result are on the host, wherever the model is; only adapters and cache are beside it."""
        if self.device.type == "cpu":
            return self.compute(step, cache)
        return fetch(self.on_device(step, cache))

    def greedy_tokens(self, step: ModelStep, cache: KvCache) -> ChosenTokens | None:
        """Always returns None: this model computes logits, and the caller chooses tokens from them. Arguments as of
        `logits`."""

    def on_device(self, step: ModelStep, cache: KvCache, *, is_greedy: bool = False) -> Tensor:
        """`logits` that stay on the GPU, or with is_greedy their `largest`. Waits for nothing."""
        compute = self.compute_largest if is_greedy else self.compute
        return compute(self.place(step, cache), cache)

    def place(self, step: ModelStep, cache: KvCache) -> ModelStep:
        """The step on the GPU, as `compute` takes it. Waits for nothing."""
        adapters = step.adapter_rows
        if adapters and not isinstance(adapters, Segments):
            adapters = build_segments(adapters, len(step.token_ids))
        beside = (adapters.rows, adapters.tiles) if isinstance(adapters, Segments) else ()
        attention, (token_ids, positions, rows, *placed) = step.attention.send(
            self._staging, cache.block_size, self._exact, (step.token_ids, step.positions, step.rows, *beside)
        )
        if isinstance(adapters, Segments):
            adapters = adapters.placed(*placed)
        if step.before is not None:
            fill_in(token_ids, step.before)
        return ModelStep(token_ids, positions, attention, rows, adapters)

    def compute(self, step: ModelStep, cache: KvCache) -> Tensor:
        """`logits` of what is where the model is, and so is the result. On a GPU nothing here waits for it."""
        return self.head(self.normed(step, cache), step.rows)

    def compute_largest(self, step: ModelStep, cache: KvCache) -> Tensor:
        """`largest` of what `compute` computes; where the model is in parts, no rank has the logits of others."""
        own = largest(self._own_logits(self.normed(step, cache), step.rows))
        return own if self._peers is None else self._peers.merge(own)

    def head(self, normed: Tensor, rows: Tensor) -> Tensor:
        """float32 [R, vocab_size] of the rows of what is behind the last norm, [T, hidden_size]."""
        own = self._own_logits(normed, rows)
        return own if self._peers is None else self._peers.join(own)

    def normed(self, step: ModelStep, cache: KvCache) -> Tensor:
        """What the head takes, [T, hidden_size]; the step is where the model is."""
        way = self.make_way(step.positions, step.attention, cache, step.adapter_rows)
        x, behind = self.begin(step.token_ids, way)
        for index in range(len(self.layers)):
            behind = self.go_on(index, x, self.attend(index, behind, step.attention, cache), way)
        return behind

    def make_way(
        self,
        positions: Tensor,
        attention: AttentionBatch,
        cache: KvCache,
        adapter_rows: StepAdapters = (),
        queries: Tensor | None = None,
    ) -> "Way":
        """What the pieces of a step share. queries: memory that queries are written to, as of `Operators`."""
        return Way(self._operators(positions, attention, queries), cache, adapter_rows)

    def begin(self, token_ids: Tensor, way: "Way") -> tuple[Tensor, Tensor]:
        """The first piece: the residual [T, hidden_size], and the first layer's queries [T, num_heads, head_dim], when
        its keys and values are stored."""
        x = self._embed(token_ids)
        return x, self._queries(0, way.operators.norm(x, self.layers[0].input_norm), way)

    def attend(
        self, index: int, q: Tensor, attention: AttentionBatch, cache: KvCache, out: Tensor | None = None
    ) -> Tensor:
        """What lies between two pieces, [T, num_heads, head_dim]. out: as of `attention.attend`."""
        (keys, values), layout = cache.layers[index], cache.layouts[index]
        scale = self.config.head_dim**-0.5
        return attend(q, keys, values, attention, scale, self._threads, self._exact, layout, out)

    def go_on(self, index: int, x: Tensor, attended: Tensor, way: "Way") -> Tensor:
        """The piece behind a layer's attention; changes the residual x in place. Returns the next layer's queries, as
        `begin` does; behind the last layer what the head takes, [T, hidden_size]."""
        layer, operators = self.layers[index], way.operators
        adapt = self._adapt(index, way)
        out = self._product("o", attended.view(len(x), -1), layer.o, layer.o_bias, operators, adapt)
        normed = operators.add_norm(x, self._sum(out), layer.post_norm)
        normed = operators.add_norm(x, self._sum(self._mlp(layer, normed, operators, adapt)), self._next_norms[index])
        return normed if index + 1 == len(self.layers) else self._queries(index + 1, normed, way)

    def _queries(self, index: int, normed: Tensor, way: "Way") -> Tensor:
        layer, ((keys, values), layout) = self.layers[index], (way.cache.layers[index], way.cache.layouts[index])
        qkv = self._product("qkv", normed, layer.qkv, layer.qkv_bias, way.operators, self._adapt(index, way))
        heads = qkv.view(*qkv.shape[:-1], -1, self.config.head_dim)
        return way.operators.rotate_and_store(heads, layer.head_norms, keys, values, layout)

    def _adapt(self, index: int, way: "Way") -> Adapt | None:
        return partial(add_adapters, way.adapter_rows, index, self._exact) if way.adapter_rows else None

    def _own_logits(self, normed: Tensor, rows: Tensor) -> Tensor:
        """Logits of the token ids that this rank has, float32 [R, number of them]."""
        return self._linear(normed[rows], self.lm_head, None).float()

    def _operators(self, positions: Tensor, batch: AttentionBatch, queries: Tensor | None = None) -> Operators:
        if batch.plan is None or self._exact:
            return TorchOperators(self.config, self.rope, positions, batch, self._exact)
        from penstock.workers.compute.models.gpu_operators import GpuOperators  # noqa: PLC0415 (Triton may be absent)

        return GpuOperators(
            self.config.rms_norm_eps, self.rope, positions, batch.slot_mapping, self.dtype,
            takes_parts=self._peers is None, queries=queries,
        )  # fmt: skip

    def _sum(self, x: Tensor) -> Tensor:
        return x if self._peers is None else self._peers.add(x)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._peers is None:
            return self._rows_of_table(token_ids)
        own = self._peers.token_ids
        is_own = (token_ids >= own.start) & (token_ids < own.stop)
        found = self._rows_of_table(torch.where(is_own, token_ids - own.start, 0))
        return self._peers.add(found.masked_fill_(~is_own[:, None], 0))

    def _rows_of_table(self, token_ids: Tensor) -> Tensor:
        return self.embed[token_ids] if isinstance(self.embed, Tensor) else _rows(self.embed, token_ids)

    def _mlp(self, layer: Layer, x: Tensor, operators: Operators, adapt: Adapt | None) -> Tensor:
        gate_up = self._product("gate_up", x, layer.gate_up, layer.gate_up_bias, operators, adapt)
        return self._product("down", operators.gate(gate_up), layer.down, layer.down_bias, operators, adapt)

    def _product(
        self,
        name: str,
        x: Tensor,
        weight: Matrix,
        bias: Tensor | None,
        operators: Operators,
        adapt: Adapt | None,
    ) -> Tensor:
        """A product that `operators` take next: [T, N], or its parts where they add them up."""
        if operators.takes_parts and adapt is None:
            return linear_in_parts(x, weight, bias)
        return self._add_adapters(name, x, weight, bias, adapt)

    def _add_adapters(self, name: str, x: Tensor, weight: Matrix, bias: Tensor | None, adapt: Adapt | None) -> Tensor:
        out = self._linear(x, weight, bias)
        if adapt is not None:
            adapt(name, out, x)
        return out

    def _linear(self, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias, self._exact)


def largest(logits: Tensor) -> Tensor:
    """float64 [2, R] of logits [R, vocab_size]: ids and values of the largest ones, of equals the first, NaN before all
    numbers. One tensor to fetch."""
    if not len(logits):
        return logits.new_empty(2, 0, dtype=torch.float64)
    values, ids = logits.max(dim=1)
    return torch.stack((ids.double(), values.double()))


def _dense(weight: Matrix) -> Tensor:
    assert isinstance(weight, Tensor), "only linear layers are quantized"
    return weight


def _rows(table: Matrix, ids: Tensor) -> Tensor:
    assert isinstance(table, GroupedMatrix), "a table that is looked up in is dense or of a GPU's kernels"
    return table.rows(ids)


def _layer(weights: Mapping[str, Matrix], index: int) -> Layer:
    def get(name: str) -> Tensor | None:
        found = weights.get(f"layers.{index}.{name}")
        return None if found is None else _dense(found)

    def require(name: str) -> Tensor:
        return _dense(weights[f"layers.{index}.{name}"])

    def matrix(name: str) -> Matrix:
        return weights[f"layers.{index}.{name}"]

    return Layer(
        input_norm=require("input_norm"),
        qkv=matrix("qkv"),
        qkv_bias=get("qkv_bias"),
        q_norm=get("q_norm"),
        k_norm=get("k_norm"),
        o=matrix("o"),
        o_bias=get("o_bias"),
        post_norm=require("post_norm"),
        gate_up=matrix("gate_up"),
        gate_up_bias=get("gate_up_bias"),
        down=matrix("down"),
        down_bias=get("down_bias"),
    )
