"""Checkpoints of random weights in a Hugging Face directory: the configuration alone, or with weights in AutoAWQ's
layout."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.gpu.steps.shapes import Bench
from penstock.workers.compute.model_config import ModelConfig

PER_INT = 8
EOS_TOKEN_ID = 2


def write_config(config: ModelConfig, folder: Path, quantization: dict[str, object] | None = None) -> None:
    """config.json of a Llama of this shape."""
    settings: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope_theta, "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID, "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if quantization is not None:
        settings["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_checkpoint(bench: Bench, folder: Path) -> int:
    """Random weights in AutoAWQ's layout, and their configuration; returns their bytes."""
    config, group = bench.config, bench.group_size
    torch.manual_seed(5)
    tensors: dict[str, Tensor] = {}
    dtype = torch.bfloat16
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(config.vocab_size, config.hidden_size, device=bench.device).to(dtype).cpu()
    tensors["model.norm.weight"] = torch.ones(config.hidden_size, dtype=dtype)
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    matrices = {
        "self_attn.q_proj": (hidden, heads), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=dtype)
        for name, (inputs, outputs) in matrices.items():
            tensors |= {
                f"{prefix}.{name}.{part}": tensor for part, tensor in _packed(inputs, outputs, group, bench).items()
            }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    awq: dict[str, object] = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
    write_config(config, folder, awq | {"group_size": group})
    return sum(tensor.nbytes for tensor in tensors.values())


def _packed(inputs: int, outputs: int, group: int, bench: Bench) -> dict[str, Tensor]:
    """A linear layer in AutoAWQ's GEMM layout (`penstock.workers.compute.quant.awq`)."""

    def words(rows: int) -> Tensor:
        drawn = torch.randint(-(2**31), 2**31 - 1, (rows, outputs // PER_INT), device=bench.device)
        return drawn.to(torch.int32).cpu()

    scales = torch.full((inputs // group, outputs), math.pow(inputs, -0.5) / 8, dtype=torch.float16)
    return {"qweight": words(inputs), "qzeros": words(inputs // group), "scales": scales}
