"""The decoder of the Llama family on a CPU, a step at a time in one call of the kernels
(`kernels/cpp/decoder/decoder.cpp`), over packed matrices.

Activations are float32, and for products with quantized matrices rounded to one or two terms of 8 bits, so logits
differ from torch's as roundings do. A row's result depends on other rows in the step only as far as the products choose
another path by how many there are. Adapters take no part in that: what they add is computed in float32 from matrices in
bfloat16, for each row by itself.
"""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.text.source import ModelSource
from penstock.workers.compute.device import CPU
from penstock.workers.compute.kernels.build import load_kernels
from penstock.workers.compute.kernels.cache_layout import can_tile
from penstock.workers.compute.kernels.choice import GREEDY, Draw
from penstock.workers.compute.kernels.decoder import (
    NO_STATES,
    Activations,
    BoundCache,
    CacheLayer,
    ChosenTokens,
    Parameters,
    Shape,
    States,
    TokenLayout,
)
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.low_rank import AdapterTable, PackedAdapter
from penstock.workers.compute.kernels.matmul import Kind, Level, PackedMatrix
from penstock.workers.compute.measured import gpu_timing
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.gpu_weights import load_on_gpu
from penstock.workers.compute.models.llama import KvCache, Llama, Matrix
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.models.rope import inverse_frequencies, rope_tables
from penstock.workers.compute.quant.packed import Packed, UnsupportedMatrix, pack_all
from penstock.workers.compute.triton.segments import Segments
from penstock.workers.compute.weights import ROPE_FACTORS, load_weights, read_weights
from penstock.workers.config import EngineConfig

_log = logging.getLogger("penstock.fused")
ACTIVATIONS = {
    "auto": Activations.MIXED,
    "bf16": Activations.BFLOAT16,
    "int8": Activations.ONE_TERM,
    "int16": Activations.TWO_TERMS,
}
"""Values of `engine.activations`."""
Weights = Mapping[str, Matrix | Packed]
"""A model's parameters: all matrices packed, or none."""
_LAYER_PARTS = (
    "input_norm",
    "post_norm",
    "q_norm",
    "k_norm",
    "qkv",
    "o",
    "gate_up",
    "down",
    "qkv_bias",
    "o_bias",
    "gate_up_bias",
    "down_bias",
)


KEPT_ROWS = 16
"""Rows of logits in memory that is kept from step to step, for draws that need all of a row: fresh memory is mapped
page by page."""


class FusedLlama:
    """`Llama` with its weights packed. One thread at a time."""

    reads_tiles = True
    """Whether the model reads a tiled cache (see `kernels.cache_layout`)."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_model_len: int,
        threads: int,
        library: Library,
        activations: Activations = Activations.MIXED,
    ) -> None:
        """weights: as `quant.packed.pack_all` returns them."""
        self.config = config
        self.weights = weights
        self.dtype, self.device = weights["embed"].dtype, CPU
        self.activations = activations
        self.packed_adapter_bits = packed_adapter_bits(weights)
        self.parameters = _parameters(config, weights, max_model_len)
        self._decoder = library.decoder(self.parameters, threads, activations)
        self.taps: Tensor | None = None
        """int32, numbers of layers behind which steps leave the residual stream; None: nowhere."""
        self._tapped: Tensor | None = None
        self._kept_logits = torch.empty(KEPT_ROWS, config.vocab_size)  # never touched, it takes no memory
        self._no_logits = torch.empty(0, config.vocab_size)
        self._bound: tuple[KvCache, BoundCache] | None = None

    def logits(self, step: ModelStep, cache: KvCache) -> Tensor:
        """Logits of the rows, float32 [R, vocab_size]."""
        logits = torch.empty(len(step.rows), self.config.vocab_size)
        self._step(step, cache, logits)
        return logits

    def greedy_tokens(self, step: ModelStep, cache: KvCache) -> ChosenTokens:
        """Tokens of the step that `logits` would compute: each row's largest logit and its id."""
        return self._step(step, cache, None)

    def choose_tokens(
        self, step: ModelStep, cache: KvCache, draws: Sequence[Draw | None]
    ) -> tuple[ChosenTokens, Tensor]:
        """Tokens of the step that `logits` would compute, chosen as the rows' draws say, and the logits of the rows
        without one, float32 [number of them, vocab_size], whose tokens are chosen greedily."""
        wanted = [row for row, draw in enumerate(draws) if draw is None]
        rows = wanted + [row for row, draw in enumerate(draws) if draw is not None and draw.is_cut]
        own = [draw or GREEDY for draw in draws]
        if not rows:
            return self._step(step, cache, None, draws=own), self._no_logits
        places = [-1] * len(draws)
        for place, row in enumerate(rows):
            places[row] = place
        logits = (
            torch.empty(len(rows), self.config.vocab_size) if wanted or len(rows) > KEPT_ROWS else self._kept_logits
        )
        return self._step(step, cache, logits, torch.tensor(places), draws=own), logits[: len(wanted)]

    def take_tapped(self) -> Tensor | None:
        """What the last step has left behind `taps`, float32 [T, taps, hidden]; None if nothing, or nothing new."""
        tapped, self._tapped = self._tapped, None
        return tapped

    def with_states(
        self, step: ModelStep, cache: KvCache, states: States, logits: Tensor | None = None
    ) -> ChosenTokens:
        """`greedy_tokens` of a step that takes or leaves states; logits: float32 [R, vocab_size], where they go."""
        return self._step(step, cache, logits, None, states)

    def _step(
        self,
        step: ModelStep,
        cache: KvCache,
        logits: Tensor | None,
        places: Tensor | None = None,
        states: States = NO_STATES,
        draws: Sequence[Draw] | None = None,
    ) -> ChosenTokens:
        if self.taps is not None and states is NO_STATES:
            self._tapped = torch.empty(len(step.token_ids), len(self.taps), self.config.hidden_size)
            states = States(taps=self.taps, tapped=self._tapped)
        batch = step.attention
        layout = TokenLayout(batch.query_start, batch.context_len, batch.block_tables, batch.slot_mapping)
        return self._decoder.step(
            step.token_ids,
            step.positions,
            self._bind(cache),
            layout,
            step.rows,
            logits,
            places,
            states,
            _adapters_of(step),
            draws,
        )

    def _bind(self, cache: KvCache) -> BoundCache:
        if self._bound is None or self._bound[0] is not cache:
            layers = [
                CacheLayer(keys, values, layout)
                for (keys, values), layout in zip(cache.layers, cache.layouts, strict=True)
            ]
            self._bound = cache, BoundCache(layers)
        return self._bound[1]


Model = Llama | FusedLlama


def load_for(
    source: ModelSource,
    config: ModelConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> Weights:
    """The weights in the form that the engine's device and settings want; logs why where torch's operators must
    compute instead of the kernels. Raises ConfigError."""
    if device.type == "cpu" and not engine.exact:
        reason = "engine.dtype asks for float32" if engine.dtype == "float32" else _why_not_fused(config)
        if reason is None:
            kernels = load_kernels()
            assert kernels is not None
            try:
                return pack_all(read_weights(source, config, dtype, head=engine.lm_head), kernels.matmul, dtype)
            except UnsupportedMatrix as error:
                reason = str(error)
        _log.info("Steps run on torch's operators, not in the fused kernels: %s.", reason)
    if device.type == "cpu":
        return load_weights(source, config, dtype, head=engine.lm_head)
    return load_on_gpu(source, config, engine.lm_head, dtype, device, gpu_timing(device))


def is_fused(config: ModelConfig, engine: EngineConfig, device: torch.device) -> bool:
    """Whether the fused kernels are to serve, as far as that can be known without the weights."""
    return device.type == "cpu" and not engine.exact and engine.dtype != "float32" and _why_not_fused(config) is None


def make_model(config: ModelConfig, weights: Weights, max_model_len: int, threads: int, engine: EngineConfig) -> Model:
    """The model that fits the form of the weights."""
    kernels = load_kernels() if isinstance(weights["embed"], Packed) else None
    if kernels is None:
        plain = {name: weight for name, weight in weights.items() if not isinstance(weight, Packed)}
        return Llama(config, plain, max_model_len, threads, engine.exact)
    return FusedLlama(config, weights, max_model_len, threads, kernels, ACTIVATIONS[engine.activations])


def packed_adapter_bits(weights: Weights) -> int | None:
    """Bits of an adapter's elements, which are packed for a model of these weights (see `kernels.low_rank`): 8 beside
    layers that are quantized themselves, else 16; None: adapters stay tensors, for torch's operators."""
    matrices = [each.matrix for name, each in weights.items() if isinstance(each, Packed) and name.startswith("layers")]
    if not matrices:
        return None
    return 16 if all(matrix.kind is Kind.BF16 for matrix in matrices) else 8


def make_cache(model: Model, num_blocks: int, block_size: int, dtype: torch.dtype) -> KvCache:
    """A KV cache for the model on its device, in the order that its kernels like best."""
    is_tiled = model.reads_tiles and can_tile(block_size, model.config.head_dim, dtype)
    return KvCache(
        model.config,
        num_blocks,
        block_size,
        dtype,
        model.device,
        by_block=model.device.type == "cpu",
        is_tiled=is_tiled,
    )


def _why_not_fused(config: ModelConfig) -> str | None:
    kernels = load_kernels()
    if kernels is None:
        return "there are no kernels"
    if kernels.matmul.level() is Level.PORTABLE:
        return "this CPU has none of the instructions that they are quick with"
    if not kernels.covers(config.head_dim, config.num_heads // config.num_kv_heads):
        group = config.num_heads // config.num_kv_heads
        return f"they don't cover {config.num_heads} heads of {config.head_dim} in groups of {group}"
    return None


def _adapters_of(step: ModelStep) -> AdapterTable | None:
    if not step.adapter_rows:
        return None
    assert not isinstance(step.adapter_rows, Segments)
    adapter_of = torch.full((len(step.token_ids),), -1, dtype=torch.int32)
    packed: list[PackedAdapter] = []
    for adapter, rows in step.adapter_rows:
        assert adapter.packed is not None
        adapter_of[slice(None) if rows is None else rows] = len(packed)
        packed.append(adapter.packed)
    return AdapterTable(packed, adapter_of)


def _parameters(config: ModelConfig, weights: Weights, max_model_len: int) -> Parameters:
    embed = _matrix(weights["embed"])
    shape = Shape(
        config.num_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
    )
    factors = None if ROPE_FACTORS not in weights else _vector(weights[ROPE_FACTORS])
    tables = rope_tables(inverse_frequencies(config, factors), max_model_len)
    cos, sin = (table.flatten(1).contiguous() for table in tables)
    return Parameters(
        shape,
        [_layer(weights, index) for index in range(config.num_layers)],
        embed,
        _matrix(weights["lm_head"]) if "lm_head" in weights else embed,
        _vector(weights["norm"]),
        cos,
        sin,
        config.rms_norm_eps,
    )


def _layer(weights: Weights, index: int) -> dict[str, PackedMatrix | Tensor]:
    found = {name: weights[f"layers.{index}.{name}"] for name in _LAYER_PARTS if f"layers.{index}.{name}" in weights}
    return {name: value.matrix if isinstance(value, Packed) else _vector(value) for name, value in found.items()}


def _matrix(weight: Matrix | Packed) -> PackedMatrix:
    assert isinstance(weight, Packed)
    return weight.matrix


def _vector(weight: Matrix | Packed) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight.float().contiguous()
