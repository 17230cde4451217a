"""Safetensors in a Hugging Face directory: plain tensors, or layers quantized by AutoAWQ or compressed-tensors.

Files are mapped, or read straight to a device.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.quant import awq, compressed
from penstock.workers.compute.quant.float8 import Float8Tensor
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.quantization_config import Awq, FloatQuantized, PackQuantized
from penstock.workers.compute.readers.device_reader import DeviceFile, DeviceReader, TensorFile
from penstock.workers.compute.readers.entry import Entry, Quantized, Window, float8_entry, quantized_entry

FLOATS = ("F32", "F16", "BF16")
FLOAT8 = "F8_E4M3"


_Holders = Mapping[str, TensorFile]
"""File that holds a tensor, by the tensor's name."""


def directory_entries(
    source: ModelSource, files: ExitStack, config: ModelConfig, reader: DeviceReader | None = None
) -> dict[str, Entry]:
    """Entries of a checkpoint's tensors by Hugging Face name; a quantized layer is one entry, `.weight`. Raises
    ConfigError.

    reader: what reads tensors to a device, where they are then copied; None: files are mapped.
    """
    holders: dict[str, TensorFile] = {}
    for path in weight_files(source):
        try:
            file: TensorFile = files.enter_context(safe_open(path, framework="pt"))
            if reader is not None:
                file = files.enter_context(DeviceFile(path, file, reader))
            holders |= dict.fromkeys(file.keys(), file)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"can't read {path}: {error}") from error
    packed = {} if config.quantization is None else _packed_layers(holders, config.quantization)
    taken = {name for layer in packed.values() for name in layer.names.values()}
    entries = {name: _plain_entry(file, name) for name, file in holders.items() if name not in taken}
    return entries | {f"{name}.weight": layer.entry() for name, layer in packed.items()}


def weight_files(source: ModelSource) -> list[Path]:
    """Files with a checkpoint's tensors: those that the index names; without an index the only file, or
    model.safetensors. Raises ConfigError where none of these says which to read."""
    index = source.read_json("model.safetensors.index.json")
    if index is not None:
        weight_map = index.get("weight_map")
        names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not names or any(Path(str(name)).name != name for name in names):
            raise ConfigError(
                f"the weight_map in {source.path / 'model.safetensors.index.json'} does not name files of that "
                "directory"
            )
        return [source.path / name for name in sorted(names)]
    found = sorted(source.path.glob("*.safetensors"))
    usual = source.path / "model.safetensors"
    if usual not in found and len(found) != 1:
        raise ConfigError(
            f"{source.path} holds {len(found)} *.safetensors and neither model.safetensors nor "
            "model.safetensors.index.json says which to read"
        )
    return [usual] if usual in found else found


def _plain_entry(file: TensorFile, name: str) -> Entry:
    view = file.get_slice(name)
    kind = view.get_dtype()
    if kind not in FLOATS:
        raise ConfigError(f"tensor {name} has the type {kind}, which is not supported; these are: {', '.join(FLOATS)}")
    return Entry(tuple(view.get_shape()), partial(_copy_stored, file, name))


def _copy_stored(file: TensorFile, name: str, out: Tensor, window: Window) -> None:
    out.copy_(_read(file, name, window.rows, *(() if window.columns is None else (window.columns,))))


def _read(file: TensorFile, name: str, *ranges: range) -> Tensor:
    """A tensor, or a part of it, of which nothing else is read: a range for each dimension."""
    view = file.get_slice(name)
    if [len(part) for part in ranges] == list(view.get_shape()):
        return file.get_tensor(name)
    return view[tuple(slice(part.start, part.stop) for part in ranges)]


def _per(part: range, unit: int) -> range:
    """Numbers of the units that a range is in."""
    return range(part.start // unit, -(-part.stop // unit))


# layers of several tensors


class _Layer(NamedTuple):
    """The tensors that a packed matrix consists of."""

    holders: _Holders
    names: dict[str, str]
    """Name of each tensor, by what it is of the layer (`qweight`, `scales`, ...)."""
    entry_of: "Callable[[_Layer], Entry]"

    def entry(self) -> Entry:
        for name in self.names.values():
            if name not in self.holders:
                raise ConfigError(f"the checkpoint has no tensor {name}, which belongs to its quantized layer")
        return self.entry_of(self)

    def shape(self, part: str) -> tuple[int, ...]:
        return tuple(self.holders[self.names[part]].get_slice(self.names[part]).get_shape())

    def read(self, part: str, *ranges: range) -> Tensor:
        """One of the tensors; with a range for each dimension, that part of it."""
        file, name = self.holders[self.names[part]], self.names[part]
        return _read(file, name, *ranges) if ranges else file.get_tensor(name)

    def check_types(self, layout: str, kinds: Mapping[str, tuple[str, ...]]) -> None:
        for part, wanted in kinds.items():
            found = self.holders[self.names[part]].get_slice(self.names[part]).get_dtype()
            if found not in wanted:
                raise ConfigError(
                    f"tensor {self.names[part]} of the checkpoint has the type {found}; "
                    f"{layout} has {' or '.join(wanted)} there"
                )

    def check_shapes(self, group_size: int, wanted: Mapping[str, tuple[int, ...]]) -> None:
        for part, shape in wanted.items():
            if self.shape(part) != shape:
                raise ConfigError(
                    f"tensor {self.names[part]} of the checkpoint has the shape {list(self.shape(part))}; "
                    f"groups of {group_size} ask for {list(shape)}"
                )


def _packed_layers(holders: _Holders, quantization: Awq | PackQuantized | FloatQuantized) -> dict[str, _Layer]:
    """Layers whose weights are quantized, by name."""
    if isinstance(quantization, FloatQuantized):
        return _float8_layers(holders, quantization)
    if isinstance(quantization, Awq):
        mark, parts, entry_of = "qweight", ("qweight", "qzeros", "scales"), partial(_awq_entry, quantization)
    else:
        mark, entry_of = "weight_packed", partial(_compressed_entry, quantization)
        parts = (
            "weight_packed",
            "weight_scale",
            "weight_shape",
            *(() if quantization.is_symmetric else ("weight_zero_point",)),
        )
    layers = [name.removesuffix(f".{mark}") for name in holders if name.endswith(f".{mark}")]
    return {layer: _Layer(holders, {part: f"{layer}.{part}" for part in parts}, entry_of) for layer in layers}


def _awq_entry(quantization: Awq, layer: _Layer) -> Entry:
    layer.check_types("AWQ", {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS})
    shape = layer.shape("qweight")
    columns, words = shape if len(shape) == 2 else (0, 0)
    groups, rows = -(-columns // quantization.group_size), words * awq.PER_INT
    layer.check_shapes(
        quantization.group_size, {"qweight": (columns, words), "qzeros": (groups, words), "scales": (groups, rows)}
    )

    def copy_groups(out: QuantizedTensor, window: Window) -> None:
        assert window.columns is not None
        own_words, own_groups = _per(window.rows, awq.PER_INT), _per(window.columns, quantization.group_size)
        awq.copy_groups(
            layer.read("qweight", window.columns, own_words),
            layer.read("qzeros", own_groups, own_words),
            layer.read("scales", own_groups, window.rows),
            out,
        )

    unit = 1 if groups == 1 else quantization.group_size
    quantized = Quantized(awq.BITS, quantization.group_size, copy_groups, row_unit=awq.PER_INT, column_unit=unit)
    return quantized_entry(rows, columns, quantized)


def _compressed_entry(quantization: PackQuantized, layer: _Layer) -> Entry:
    layer.check_types(
        "compressed-tensors", {"weight_packed": ("I32",), "weight_scale": FLOATS, "weight_shape": ("I64", "I32")}
    )
    if layer.shape("weight_shape") != (2,):
        raise ConfigError(
            f"tensor {layer.names['weight_shape']} of the checkpoint has the shape "
            f"{list(layer.shape('weight_shape'))}; two numbers belong there"
        )
    rows, columns = layer.read("weight_shape").tolist()
    bits, group_size = quantization.bits, quantization.group_size or max(1, columns)
    groups = -(-columns // group_size)
    wanted = {"weight_packed": (rows, -(-columns * bits // 32)), "weight_scale": (rows, groups)}
    if not quantization.is_symmetric:
        layer.check_types("compressed-tensors", {"weight_zero_point": ("I32",)})
        wanted["weight_zero_point"] = (-(-rows * bits // 32), groups)
    layer.check_shapes(group_size, wanted)

    per_int = 32 // bits

    def copy_groups(out: QuantizedTensor, window: Window) -> None:
        assert window.columns is not None
        own_groups = _per(window.columns, group_size)
        zero = (
            None
            if quantization.is_symmetric
            else layer.read("weight_zero_point", _per(window.rows, per_int), own_groups)
        )
        packed = layer.read("weight_packed", window.rows, _per(window.columns, per_int))
        compressed.copy_groups(packed, layer.read("weight_scale", window.rows, own_groups), zero, out)

    row_unit = 1 if quantization.is_symmetric else per_int
    column_unit = per_int if groups == 1 else math.lcm(group_size, per_int)
    return quantized_entry(
        rows, columns, Quantized(bits, group_size, copy_groups, row_unit=row_unit, column_unit=column_unit)
    )


def _float8_layers(holders: _Holders, quantization: FloatQuantized) -> dict[str, _Layer]:
    names = [name for name in holders if name.endswith(".weight")]
    layers = [name.removesuffix(".weight") for name in names if holders[name].get_slice(name).get_dtype() == FLOAT8]
    return {
        layer: _Layer(
            holders,
            {part: f"{layer}.{part}" for part in ("weight", "weight_scale")},
            partial(_float8_entry, quantization),
        )
        for layer in layers
    }


def _float8_entry(quantization: FloatQuantized, layer: _Layer) -> Entry:
    layer.check_types("compressed-tensors", {"weight_scale": FLOATS})
    shape, scales = layer.shape("weight"), layer.shape("weight_scale")
    if len(shape) != 2 or scales not in ((), (1,), (1, 1), (shape[0],), (shape[0], 1)):
        raise ConfigError(
            f"tensor {layer.names['weight_scale']} of the checkpoint has the shape {list(scales)}, its weight "
            f"{list(shape)}; a number for each row belongs there, or one"
        )

    def copy_into(out: Float8Tensor, window: Window) -> None:
        assert window.columns is not None
        # one for all, or one for each row
        of_rows = [window.rows] if scales[:1] == shape[:1] else [range(count) for count in scales[:1]]
        scale = layer.read("weight_scale", *of_rows, *(range(1) for _ in scales[1:]))
        out.copy_(layer.read("weight", window.rows, window.columns), scale)

    return float8_entry(*shape, copy_into, rounds_activations=quantization.rounds_activations)
