"""Random adapters for a checkpoint's shapes, as peft writes them, made without peft."""

from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from penstock.adapters.store import digest_of
from penstock.text.source import ModelSource
from penstock.workers.compute.model_config import read_config
from tests.unit.adapters.files import config

MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
SIZE = 0.06
"""Spread of the weights: enough to change what the demo model says."""


def write_adapter(folder: Path, source: ModelSource, seed: int, rank: int = 4) -> str:
    """An adapter of every layer's MODULES, in a folder named by its digest, which is returned."""
    draw = torch.Generator().manual_seed(seed)
    model = read_config(source)
    tensors = {}
    for layer in range(model.num_layers):
        for name in MODULES:
            rows, columns = model.linear_shapes[name.partition(".")[2]]
            place = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(rank, columns, generator=draw) * SIZE
            tensors[f"{place}.lora_B.weight"] = torch.randn(rows, rank, generator=draw) * SIZE
    written = folder / f"adapter-{seed}"
    written.mkdir()
    save_file(tensors, written / WEIGHTS_FILE)
    names = [name.partition(".")[2] for name in MODULES]
    (written / CONFIG_FILE).write_bytes(msgspec.json.encode(config(r=rank, lora_alpha=2 * rank, target_modules=names)))
    return written.rename(folder / digest_of(written)).name
