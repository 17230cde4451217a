"""Adapters written by hand, without peft or torch: a JSON and a safetensors file of zeros."""

import struct
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, BaseShapes

BASE = BaseShapes(
    2,
    {
        "q_proj": (8, 8),
        "k_proj": (4, 8),
        "v_proj": (4, 8),
        "o_proj": (8, 8),
        "gate_proj": (20, 8),
        "up_proj": (20, 8),
        "down_proj": (8, 20),
    },
)
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}


def name_of(layer: int, module: str, side: str) -> str:
    group = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"base_model.model.model.layers.{layer}.{group}.{module}.lora_{side}.weight"


def tensors_of(
    rank: int = 2, modules: tuple[str, ...] = ("q_proj", "down_proj"), layers: tuple[int, ...] = (0, 1)
) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        for module in modules:
            rows, columns = BASE.modules[module]
            found[name_of(layer, module, "A")] = (rank, columns)
            found[name_of(layer, module, "B")] = (rows, rank)
    return found


def config(**changes: Any) -> dict[str, Any]:
    """The options of adapter_config.json that matter, with the values that peft writes."""
    usual = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "lora_dropout": 0.05, "bias": "none",
        "target_modules": ["q_proj"], "use_dora": False, "use_rslora": False, "modules_to_save": None,
        "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {}, "megatron_core": "megatron.core",
        "qalora_group_size": 16, "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    return usual | changes


def safetensors(tensors: dict[str, tuple[int, ...]], dtype: str = "F32", fill: int = 0) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        size = BYTES[dtype]
        for count in shape:
            size *= count
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    data = msgspec.json.encode(header)
    return struct.pack("<Q", len(data)) + data + bytes([fill]) * end


def write(folder: Path, *, fill: int = 0, tensors: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> Path:
    """fill: the byte of which its weights consist. changes: of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_bytes(msgspec.json.encode(config(**changes)))
    (folder / WEIGHTS_FILE).write_bytes(safetensors(tensors_of() if tensors is None else tensors, fill=fill))
    return folder
