"""Random adapters for a checkpoint's shapes, as peft writes them."""

from collections.abc import Collection
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from penstock.workers.compute.model_config import ModelConfig

SIZE = 0.02
"""Spread of the weights: enough to change what the demo model says."""


def write_adapter(
    folder: Path, model: ModelConfig, seed: int, rank: int, modules: Collection[str] | None = None
) -> Path:
    """Write an adapter to a folder that is not there yet; returns the folder. modules: those that are adapted; None:
    all linear layers."""
    targets = [name for name in model.linear_shapes if modules is None or name in modules]
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(model.num_layers):
        for name in targets:
            outputs, inputs = model.linear_shapes[name]
            group = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            place = f"base_model.model.model.layers.{layer}.{group}.{name}"
            tensors[f"{place}.lora_A.weight"] = (torch.randn(rank, inputs, generator=draw) * SIZE).bfloat16()
            tensors[f"{place}.lora_B.weight"] = (torch.randn(outputs, rank, generator=draw) * SIZE).bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
        "bias": "none",
    }
    (folder / CONFIG_FILE).write_bytes(msgspec.json.encode(settings))
    return folder
