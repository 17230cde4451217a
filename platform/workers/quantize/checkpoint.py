"""Writes a quantized model as a safetensors directory: AutoAWQ's layout, float16 elsewhere, a shard a layer. Others
read it too, if groups divide its columns.

The directory appears whole or not at all, and a layer that is written is not computed again: see
`penstock.workers.quantize.partial_checkpoint`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.text.export import save_tokenizer
from penstock.text.source import ModelSource
from penstock.workers.compute.model_config import ModelConfig, to_hf
from penstock.workers.compute.quant import awq
from penstock.workers.compute.weights import Piece, layout
from penstock.workers.quantize.calibrate import Load, QuantizedLayer, Weights
from penstock.workers.quantize.partial_checkpoint import Recipe, open_partial_checkpoint, save_whole, writing

Layers = Callable[[int], Iterable[QuantizedLayer]]
"""The layers from the given one on, in order."""
_TYPE_BYTES = {"I32": 4, "F16": 2}


def write_checkpoint(
    out: Path, source: ModelSource, config: ModelConfig, recipe: Recipe, layers: Layers, load: Load
) -> None:
    """Write the whole checkpoint to `out`. load: reads what is outside the layers. Raises ConfigError with a sentence;
    layers that were written by then are kept for the next call."""
    plan = layout(config)
    with open_partial_checkpoint(out, recipe) as folder:
        shards = [
            folder / f"model-{index + 1:05d}-of-{config.num_layers + 1:05d}.safetensors"
            for index in range(config.num_layers + 1)
        ]
        for layer in layers(_num_written(shards[:-1])):
            prefix = f"layers.{layer.index}."
            own = {name: _within(piece, prefix) for name, piece in plan.items() if piece.target.startswith(prefix)}
            _save_shard(shards[layer.index], _layer_tensors(own, layer))
        rest = {name: piece for name, piece in plan.items() if not piece.target.startswith("layers.")}
        _save_shard(shards[-1], {name: _dense(load(piece.target), piece) for name, piece in rest.items()})
        _save_json(folder / "model.safetensors.index.json", _index(shards))
        quantization = {
            "quant_method": "awq",
            "bits": awq.BITS,
            "group_size": recipe.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
        _save_json(
            folder / "config.json",
            {**_config_of(source, config), "dtype": "float16", "quantization_config": quantization},
        )
        _save_json(folder / "generation_config.json", {"eos_token_id": sorted(config.eos_token_ids)})
        with writing(folder):
            save_tokenizer(source, folder)


def _num_written(shards: Iterable[Path]) -> int:
    """Leading shards that an earlier run completed."""
    count = 0
    for path in shards:
        if not path.exists() or _tensor_bytes(path) is None:
            break
        count += 1
    return count


def _within(piece: Piece, prefix: str) -> Piece:
    return piece._replace(target=piece.target.removeprefix(prefix))


def _layer_tensors(plan: Mapping[str, Piece], layer: QuantizedLayer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, piece in plan.items():
        quantized = layer.matrices.get(piece.target)
        if quantized is None:
            tensors[name] = _dense(layer.dense, piece)
            continue
        own = awq.tensors_of(quantized.rows(piece.start, piece.start + piece.shape[0]))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in own.items()}
    return tensors


def _dense(weights: Weights, piece: Piece) -> Tensor:
    return weights[piece.target][piece.start : piece.start + piece.shape[0]].to(torch.float16).contiguous()


def _save_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ConfigError(
                f"tensor {name} can't be kept in float16: it holds numbers above 65504, or none at all (NaN)"
            )
    save_whole(path, lambda file: save_file(tensors, file, metadata={"format": "pt"}))


def _index(shards: Iterable[Path]) -> dict[str, object]:
    """Content of model.safetensors.index.json for these shards."""
    total = 0
    weight_map: dict[str, str] = {}
    for path in shards:
        sizes = _tensor_bytes(path) or {}
        total += sum(sizes.values())
        weight_map |= dict.fromkeys(sizes, path.name)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _tensor_bytes(path: Path) -> dict[str, int] | None:
    """Bytes of each tensor of a shard; None for a file that is cut short."""
    sizes: dict[str, int] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 no mapping
                view = file.get_slice(name)
                sizes[name] = torch.Size(view.get_shape()).numel() * _TYPE_BYTES[view.get_dtype()]
    except SafetensorError:
        return None
    return sizes


def _config_of(source: ModelSource, config: ModelConfig) -> dict[str, object]:
    """Content of config.json: the source directory's own, or one made from the metadata of a GGUF file."""
    if source.format == "gguf":
        return to_hf(config)
    return {key: value for key, value in source.config.items() if key not in ("torch_dtype", "quantization_config")}


def _save_json(path: Path, value: object) -> None:
    save_whole(path, lambda file: file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8"))
