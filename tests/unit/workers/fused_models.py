"""Models of the fused decoder's family for tests: the same one in torch and fused, over sequences in scattered blocks,
NaN wherever nobody wrote."""

import random
from dataclasses import replace

import torch
from torch import Tensor

from penstock.workers.compute.batch import Span, lay_out
from penstock.workers.compute.kernels.cache_layout import can_tile
from penstock.workers.compute.kernels.decoder import Activations
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import Level
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.fused import FusedLlama
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.quant.packed import pack_all
from penstock.workers.compute.quant.quantized import QuantizedTensor, quantize, quantize_int8
from penstock.workers.compute.weights import layout, parameter_shapes

BLOCK, NUM_BLOCKS, MAX_LEN = 16, 20, 200
PLAIN = ModelConfig(
    family="llama", vocab_size=211, hidden_size=96, intermediate_size=160, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=32, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, has_rope_factors=False,
    max_position_embeddings=MAX_LEN, sliding_window=None, is_tied=True, has_qkv_bias=False, has_o_bias=False,
    has_mlp_bias=False, has_qk_norm=False, eos_token_ids=frozenset({3}),
)  # fmt: skip
CONFIGS = {
    "tied": PLAIN,
    "untied, with biases": replace(
        PLAIN, is_tied=False, has_qkv_bias=True, has_o_bias=True, has_mlp_bias=True, vocab_size=160
    ),
    "with norms of heads": replace(PLAIN, family="qwen3", has_qk_norm=True, head_dim=128, num_heads=4, num_kv_heads=1),
    "heads that are no panels": replace(PLAIN, head_dim=80, num_heads=2, num_kv_heads=2, hidden_size=80),
    "odd sizes": replace(
        PLAIN, hidden_size=72, intermediate_size=88, num_heads=8, num_kv_heads=8, head_dim=48, has_mlp_bias=True
    ),
    "wide groups": replace(PLAIN, head_dim=64, num_heads=8, num_kv_heads=1, num_layers=3),
}


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Float32 numbers that bfloat16 has too."""
    generator = torch.Generator().manual_seed(5)
    shapes = parameter_shapes(layout(config))
    return {
        name: (torch.randn(shape, generator=generator) * (0.15 if len(shape) > 1 else 1.0)).bfloat16().float()
        for name, shape in shapes.items()
    }


def make_pair(config: ModelConfig, kernels: Library, threads: int = 2) -> tuple[Llama, FusedLlama]:
    """The same model twice: in torch with float32, and fused."""
    weights = random_weights(config)
    dense = {name: weight.bfloat16() if weight.dim() > 1 else weight for name, weight in weights.items()}
    packed = pack_all(dense.items(), kernels.matmul, torch.float32)
    return Llama(config, weights, MAX_LEN, 1, exact=False), FusedLlama(config, packed, MAX_LEN, threads, kernels)


class Tables:
    """Sequences in blocks drawn at random, in caches that are NaN where nobody wrote."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.free = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.tables: dict[int, list[int]] = {}

    def cache(self, dtype: torch.dtype = torch.float32) -> KvCache:
        cache = KvCache(
            self.config, NUM_BLOCKS, BLOCK, dtype, by_block=True, is_tiled=can_tile(BLOCK, self.config.head_dim, dtype)
        )
        cache.poison(torch.arange(NUM_BLOCKS))
        return cache

    def span(self, seq: int, start: int, count: int) -> Span:
        table = self.tables.setdefault(seq, [])
        while len(table) * BLOCK < start + count:
            table.append(self.free.pop())
        return Span(
            [
                random.Random(1000 * seq + place).randrange(self.config.vocab_size)
                for place in range(start, start + count)
            ],
            start,
            list(table),
        )


STEPS = [
    [(0, 0, 37)],
    [(1, 0, 5), (0, 37, 1)],
    [(0, 38, 1), (2, 0, 1), (1, 5, 1)],
    [(1, 6, 40), (0, 39, 4), (3, 0, 19), (2, 1, 1)],
    [(0, 43, 1)],
]
"""(sequence, start, tokens): prompts in chunks, decodes and drafts, alone and mixed."""


def logits_of(
    model: Llama | FusedLlama, cache: KvCache, tables: Tables, parts: list[tuple[int, int, int]], every: int = 1
) -> Tensor:
    with torch.inference_mode():
        token_ids, positions, attention = lay_out([tables.span(*part) for part in parts], BLOCK)
        return model.logits(ModelStep(token_ids, positions, attention, torch.arange(0, len(token_ids), every)), cache)


QUANTIZED = {"tied": PLAIN, "odd sizes, untied": replace(CONFIGS["odd sizes"], is_tied=False)}


def quantized_weights(config: ModelConfig) -> dict[str, Tensor | QuantizedTensor]:
    """4 bits, tables 8."""
    return {
        name: weight
        if weight.dim() == 1
        else quantize_int8(weight, 32)
        if name in ("embed", "lm_head")
        else quantize(weight, 32)
        for name, weight in random_weights(config).items()
    }


def most_error(activations: Activations, rows: int, level: Level) -> float:
    """Root mean square of the deviation by roundings, of the logits' own, with so few layers and columns as here."""
    is_bfloat16 = activations is Activations.BFLOAT16 or (
        activations is Activations.TWO_TERMS and rows >= 16 and level >= Level.AVX512
    )
    if is_bfloat16:
        return 0.02 if level >= Level.AVX512 else 1e-5  # else weights are dequantized to float32
    is_one_term = activations is Activations.ONE_TERM or (activations is Activations.MIXED and rows > 4)
    if activations is Activations.MIXED and rows <= 4 and level >= Level.VNNI:
        return 0.03
    return 0.05 if is_one_term and level >= Level.AVX2 else 5e-4
