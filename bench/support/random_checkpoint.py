"""Checkpoints of random weights in any shape, as a Hugging Face directory: in bfloat16, or in 4 bits as AutoAWQ lays
them out. They say nothing, and compute as long as real ones."""

import json
from pathlib import Path

from penstock.perf.planning.shape import ModelShape

GROUP = 128
PER_INT = 8


def write_random_checkpoint(shape: ModelShape, folder: Path, *, in_4_bits: bool = False) -> None:
    """Write config.json and model.safetensors; needs torch, and seconds. Shapes without biases and head norms only."""
    import torch  # noqa: PLC0415 (seconds that only this needs)
    from safetensors.torch import save_file  # noqa: PLC0415
    from torch import Tensor  # noqa: PLC0415

    assert shape.intermediate_size is not None
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(5)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, shared = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16) * 0.02

    def matrix(name: str, outputs: int, inputs: int) -> dict[str, Tensor]:
        if not in_4_bits:
            return {f"{name}.weight": draw(outputs, inputs)}
        integers = (
            torch.randint(-(2**31), 2**31 - 1, (rows, outputs // PER_INT)) for rows in (inputs, inputs // GROUP)
        )
        words, zeros = (drawn.to(torch.int32) for drawn in integers)
        scales = torch.full((inputs // GROUP, outputs), 0.004, dtype=torch.float16)
        return {f"{name}.qweight": words, f"{name}.qzeros": zeros, f"{name}.scales": scales}

    tensors = {"model.embed_tokens.weight": draw(shape.vocab_size, hidden), "model.norm.weight": ones(hidden)}
    if not shape.is_tied:
        tensors["lm_head.weight"] = draw(shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        own = f"model.layers.{layer}"
        tensors |= {f"{own}.{name}.weight": ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, outputs, inputs in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", shared, hidden),
            ("self_attn.v_proj", shared, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors |= matrix(f"{own}.{name}", outputs, inputs)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape, in_4_bits=in_4_bits)), encoding="utf-8")


def _config(shape: ModelShape, *, in_4_bits: bool) -> dict[str, object]:
    settings: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 2,
        "max_position_embeddings": shape.max_context or 8192,
        "tie_word_embeddings": shape.is_tied,
    }
    if in_4_bits:
        awq = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "group_size": GROUP}
        settings["quantization_config"] = awq
    return settings
