"""Random two-layer models of every supported kind, made and saved by transformers: the oracle of the model tests."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from penstock.text.source import ModelSource
from penstock.workers.config import EngineConfig

BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * 2 * BLOCK_SIZE * 16 * 4
"""A block of `tiny_model("llama")`: K and V, layers, key heads, tokens, head size, float32."""

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS = ("llama", "llama-tied", "llama3-rope", "llama-biased", "mistral", "qwen2", "qwen2-tied", "qwen3")


def tiny_model(kind: str, **sizes: int) -> PreTrainedModel:
    torch.manual_seed(7)
    model: PreTrainedModel = _MAKERS[kind](SIZES | sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts norms at one and biases at zero, where mistakes would not show
            parameter.copy_(
                torch.randn_like(parameter) * 0.3 + 1 if "norm" in name else torch.randn_like(parameter) * 0.15
            )
    return model.eval()


Sizes = dict[str, Any]


def _llama(sizes: Sizes, **changes: Any) -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **changes))


def _qwen2(sizes: Sizes, **changes: Any) -> PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **changes))


_MAKERS: dict[str, Callable[[Sizes], PreTrainedModel]] = {
    "llama": _llama,
    "llama-tied": lambda sizes: _llama(sizes, tie_word_embeddings=True),
    "llama3-rope": lambda sizes: _llama(sizes, rope_parameters=LLAMA3_ROPE),
    "llama-biased": lambda sizes: _llama(sizes, attention_bias=True, mlp_bias=True),
    "mistral": lambda sizes: transformers.MistralForCausalLM(
        transformers.MistralConfig(**sizes, sliding_window=None, head_dim=32)
    ),
    "qwen2": _qwen2,
    "qwen2-tied": lambda sizes: _qwen2(sizes, tie_word_embeddings=True),
    "qwen3": lambda sizes: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=128)),
}


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> ModelSource:
    """The model, saved as a Hugging Face directory. options: of save_pretrained."""
    model.save_pretrained(folder, **options)
    return ModelSource("safetensors", folder, folder.name)


_GGUF_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "vocab_size": "vocab_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def written_as_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: gguf.GGMLQuantizationType,
    extra: dict[str, np.ndarray] | None = None,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> ModelSource:
    """The model, written by gguf's own writer and quantizer: matrices as `kind`, vectors as F32, q and k of llamas
    interleaved as llama.cpp wants them.

    kinds: of single matrices, by their GGUF names.
    """
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    for key, name in _GGUF_KEYS.items():
        writer.add_uint32(f"{architecture}.{key}", getattr(config, name))
    writer.add_uint32(
        f"{architecture}.attention.key_length",
        config.hidden_size // config.num_attention_heads if architecture != "qwen3" else config.head_dim,
    )
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 5)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if architecture == "llama" and heads:
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        stored = (kinds or {}).get(gguf_name(name), kind) if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource("gguf", path, path.stem)


def gguf_name(name: str) -> str:
    prefix, _, rest = name.removeprefix("model.layers.").partition(".")
    stem, _, suffix = (rest if name.startswith("model.layers.") else name).rpartition(".")
    return (
        f"blk.{prefix}.{_GGUF_NAMES[stem]}.{suffix}"
        if name.startswith("model.layers.")
        else f"{_GGUF_NAMES[stem]}.{suffix}"
    )


def engine_config(blocks: int = 64, max_model_len: int | None = None) -> EngineConfig:
    """A configuration of the tiny models in float32, with room for so many blocks and a little more."""
    return EngineConfig(
        dtype="float32",
        threads=1,
        block_size=BLOCK_SIZE,
        kv_memory_bytes=blocks * BLOCK_BYTES + 7,
        max_model_len=max_model_len,
    )
