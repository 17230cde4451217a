"""A tiny random model as AutoAWQ would save it."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from penstock.text.source import ModelSource
from penstock.workers.compute.quant.awq import tensors_of
from penstock.workers.compute.quant.quantized import quantize
from tests.unit.workers.tiny_models import saved


def saved_as_awq(model: PreTrainedModel, folder: Path, group_size: int = 32) -> ModelSource:
    """The model with its linear layers in 4 bits."""
    source = saved(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if "_proj.weight" in name:
            quantized = quantize(tensors.pop(name), group_size)
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.{part}": tensor for part, tensor in tensors_of(quantized).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True,
    }  # fmt: skip
    path.write_text(json.dumps(config), encoding="utf-8")
    return source
