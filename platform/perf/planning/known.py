"""Shapes of models that are often asked for, so that a plan needs no checkpoint.

Each row is what the checkpoint's config.json says on the Hugging Face hub, in the repository that `source` names.
Not an endorsement, and not a list of what is supported: a checkpoint's own configuration always goes first.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.perf.planning.shape import ModelShape


class Known(NamedTuple):
    """A model by its common name."""

    source: str
    """Repository on the hub whose config.json has these numbers."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


KNOWN: dict[str, Known] = {
    "smollm2-135m": Known("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 576, 9, 3, 64, 1536, 49152, 8192, is_tied=True),
    "smollm2-1.7b": Known("HuggingFaceTB/SmolLM2-1.7B", 24, 2048, 32, 32, 64, 8192, 49152, 8192, is_tied=True),
    "qwen2.5-0.5b": Known(
        "Qwen/Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, 32768, is_tied=True, has_qkv_bias=True
    ),
    "qwen2.5-7b": Known("Qwen/Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, 131072, has_qkv_bias=True),
    "qwen2.5-32b": Known("Qwen/Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064, 131072, has_qkv_bias=True),
    "qwen2.5-72b": Known("Qwen/Qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, 152064, 131072, has_qkv_bias=True),
    "qwen3-0.6b": Known("Qwen/Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, 40960, is_tied=True, has_qk_norm=True),
    "qwen3-4b": Known("Qwen/Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, 40960, is_tied=True, has_qk_norm=True),
    "qwen3-8b": Known("Qwen/Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, 40960, has_qk_norm=True),
    "qwen3-14b": Known("Qwen/Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, 40960, has_qk_norm=True),
    "qwen3-32b": Known("Qwen/Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, 40960, has_qk_norm=True),
    "llama-2-7b": Known("meta-llama/Llama-2-7b-hf", 32, 4096, 32, 32, 128, 11008, 32000, 4096),
    "llama-2-13b": Known("meta-llama/Llama-2-13b-hf", 40, 5120, 40, 40, 128, 13824, 32000, 4096),
    "llama-2-70b": Known("meta-llama/Llama-2-70b-hf", 80, 8192, 64, 8, 128, 28672, 32000, 4096),
    "llama-3-8b": Known("meta-llama/Meta-Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256, 8192),
    "llama-3-70b": Known("meta-llama/Meta-Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256, 8192),
    "llama-3.1-8b": Known("meta-llama/Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "llama-3.1-70b": Known("meta-llama/Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "llama-3.2-1b": Known("meta-llama/Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, 131072, is_tied=True),
    "llama-3.2-3b": Known("meta-llama/Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, 131072, is_tied=True),
    "llama-3.3-70b": Known("meta-llama/Llama-3.3-70B-Instruct", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "mistral-7b": Known("mistralai/Mistral-7B-v0.3", 32, 4096, 32, 8, 128, 14336, 32768, 32768),
}


def known_shape(name: str) -> ModelShape | None:
    """The shape of a model by its common name, upper or lower case; None: it is not in the table."""
    found = KNOWN.get(name.lower())
    if found is None:
        return None
    sizes = found.num_heads * found.head_dim + 2 * found.num_kv_heads * found.head_dim
    biases = found.num_layers * sizes if found.has_qkv_bias else 0
    norms = (2 * found.num_layers + 1) * found.hidden_size
    head_norms = 2 * found.num_layers * found.head_dim if found.has_qk_norm else 0
    return ModelShape(
        name=name.lower(),
        num_layers=found.num_layers,
        hidden_size=found.hidden_size,
        num_heads=found.num_heads,
        num_kv_heads=found.num_kv_heads,
        head_dim=found.head_dim,
        intermediate_size=found.intermediate_size,
        vocab_size=found.vocab_size,
        is_tied=found.is_tied,
        max_context=found.max_context,
        num_vector_params=norms + biases + head_norms,
    )


def known_names() -> Sequence[str]:
    return sorted(KNOWN)
