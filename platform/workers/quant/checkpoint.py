"""Writes a quantized model as a safetensors directory that others read too: AutoAWQ's layout, float16 elsewhere, a shard a layer.

The directory appears whole or not at all: shards are written beside it, under a name of their own, and that is renamed at the end.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.text.export import save_tokenizer
from penstock.text.source import ModelSource
from penstock.wire.errors import ConfigError
from penstock.workers.models.config import ModelConfig, to_hf
from penstock.workers.quant import awq
from penstock.workers.quant.calibrate import QuantizedLayer, Weights
from penstock.workers.weights import Piece, layout


def write_checkpoint(folder: Path, source: ModelSource, config: ModelConfig, weights: Weights, layers: Iterable[QuantizedLayer], group_size: int) -> None:
    """weights: float32; read again after each layer, since folding scales changes norms. Raises ConfigError where `folder` can't be made."""
    partial = folder.with_name(folder.name + ".partial")
    if folder.exists():
        raise ConfigError(f"{folder} exists already; name a folder that does not")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write(partial, source, config, weights, layers, group_size)
        partial.rename(folder)
    except OSError as error:
        raise ConfigError(f"can't write {error.filename or folder}: {error.strerror}") from error


def _write(folder: Path, source: ModelSource, config: ModelConfig, weights: Weights, layers: Iterable[QuantizedLayer], group_size: int) -> None:
    plan = layout(config)
    shards = config.num_layers + 1
    weight_map: dict[str, str] = {}
    total = 0
    for layer in layers:
        prefix = f"layers.{layer.index}."
        own = {name: piece for name, piece in plan.items() if piece.target.startswith(prefix)}
        total += _shard(folder, layer.index, shards, _layer_tensors(own, layer, weights, prefix), weight_map)
    rest = {name: _dense(weights, piece) for name, piece in plan.items() if not piece.target.startswith("layers.")}
    total += _shard(folder, config.num_layers, shards, rest, weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", {**_config_of(source, config), "dtype": "float16", "quantization_config": _quantization(group_size)})
    _write_json(folder / "generation_config.json", {"eos_token_id": sorted(config.eos_token_ids)})
    save_tokenizer(source, folder)


def _layer_tensors(plan: Mapping[str, Piece], layer: QuantizedLayer, weights: Weights, prefix: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, piece in plan.items():
        groups = layer.matrices.get(piece.target.removeprefix(prefix))
        if groups is None:
            tensors[name] = _dense(weights, piece)
            continue
        own = awq.tensors_of(groups.rows(piece.start, piece.start + piece.shape[0]))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in own.items()}
    return tensors


def _dense(weights: Weights, piece: Piece) -> Tensor:
    return weights[piece.target][piece.start : piece.start + piece.shape[0]].to(torch.float16).contiguous()


def _shard(folder: Path, index: int, count: int, tensors: dict[str, Tensor], weight_map: dict[str, str]) -> int:
    """Writes one file, notes what is in it, returns its bytes."""
    name = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map.update(dict.fromkeys(tensors, name))
    return sum(tensor.nbytes for tensor in tensors.values())


def _config_of(source: ModelSource, config: ModelConfig) -> dict[str, object]:
    """The directory's own, or one made from what a GGUF file says."""
    if source.format == "gguf":
        return to_hf(config)
    return {key: value for key, value in source.config.items() if key not in ("torch_dtype", "quantization_config")}


def _quantization(group_size: int) -> dict[str, object]:
    return {"quant_method": "awq", "bits": awq.BITS, "group_size": group_size, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
