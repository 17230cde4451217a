"""Tiny targets of four layers with random weights, and draft heads for them."""

import torch
from torch import Tensor

from penstock.workers.compute.kernels.decoder import Activations
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.fused import FusedLlama
from penstock.workers.compute.quant.packed import pack_all
from penstock.workers.compute.speculation.head_file import DraftHead, HeadSpec, quantize_head
from penstock.workers.compute.weights import layout, parameter_shapes

OWN_VOCAB, TAPS = 64, [0, 1, 2]
VOCAB, MAX_LEN = 211, 160
CONFIG = ModelConfig(
    family="llama", vocab_size=VOCAB, hidden_size=96, intermediate_size=160, num_layers=4, num_heads=6, num_kv_heads=2,
    head_dim=32, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, has_rope_factors=False,
    max_position_embeddings=MAX_LEN, sliding_window=None, is_tied=True, has_qkv_bias=False, has_o_bias=False,
    has_mlp_bias=False, has_qk_norm=False, eos_token_ids=frozenset({3}),
)  # fmt: skip


def random_head(config: ModelConfig, bits: int, name: str = "tiny", own_vocab: int = OWN_VOCAB) -> DraftHead:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    spec = HeadSpec(
        target=name, target_vocab_size=config.vocab_size, target_layers=config.num_layers, hidden_size=hidden,
        intermediate_size=inner, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, taps=TAPS,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    weights = {
        "first": random(hidden, 4 * hidden), "chained": random(hidden, 2 * hidden),
        "qkv": random(query + 2 * shared, hidden), "o": random(hidden, query), "gate_up": random(2 * inner, hidden),
        "down": random(hidden, inner), "lm_head": random(own_vocab, hidden),
    } | {name: 1 + random(hidden) for name in ("input_norm", "post_norm", "norm")}  # fmt: skip
    vocabulary = torch.randperm(config.vocab_size, generator=generator)[:own_vocab].sort().values
    return quantize_head(spec, weights, vocabulary, bits)


def random_target(
    config: ModelConfig, kernels: Library, size: float, activations: Activations = Activations.MIXED, threads: int = 1
) -> tuple[FusedLlama, Tensor]:
    """A target, and its embedding, float32. size: standard deviation of its matrices."""
    generator = torch.Generator().manual_seed(5)
    shapes = parameter_shapes(layout(config))
    weights = {
        name: torch.randn(shape, generator=generator) * (size if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
    }
    dense = {name: weight.bfloat16() if weight.dim() > 1 else weight for name, weight in weights.items()}
    packed = pack_all(dense.items(), kernels.matmul, torch.float32)
    target = FusedLlama(config, packed, config.max_position_embeddings, threads, kernels, activations)
    return target, dense["embed"].float()
