"""Checkpoints into one normal form: the parameters of `models/llama.py` by name, fused, contiguous; matrices dense or
in groups of small integers.

Parameters are read one after the other, so a caller that packs each at once holds the model in its own form plus one
parameter. GGUF files are read piece by piece, safetensors are mapped or, for a GPU, read straight to it by several
threads, and put together there. Invariant: the names and shapes are exactly those
of `layout`; a checkpoint that lacks a tensor, has one too many or one of another shape is refused with a ConfigError
that names it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.quant.float8 import Float8Tensor
from penstock.workers.compute.quant.quantized import (
    Matrix,
    QuantizedTensor,
    TorchQuantizedMatrix,
    cut_group_size,
    quantize,
    quantize_int8,
)
from penstock.workers.compute.readers.device_reader import DeviceReader
from penstock.workers.compute.readers.directory import directory_entries
from penstock.workers.compute.readers.entry import Entry, Window
from penstock.workers.compute.readers.gguf_file import gguf_entries

ROPE_FACTORS = "rope_factors"
"""Parameter kept in float32: divisors of the RoPE frequencies."""
TABLES = ("embed", "lm_head")
"""The embedding table and the output head, which is often the same."""
HEAD_GROUP = 32
"""Group size of a table that is rounded at loading."""
CHUNK_ELEMENTS = 1 << 20
"""Elements of a table rounded at once."""

Head = Literal["auto", "keep", "int8", "int4"]
"""How the tables are held. keep: as the checkpoint has them. int8, int4: rounded to nearest. auto: int8 where the
checkpoint's other matrices are quantized and the tables are not, else as they are."""


class Piece(NamedTuple):
    """Where a checkpoint's tensor goes: rows [start, start + shape[0]) of the parameter `target`."""

    target: str
    start: int
    shape: tuple[int, ...]


class Taken(NamedTuple):
    """The part of a parameter that is wanted."""

    rows: Sequence[range] | None = None
    """Rows, each range within one tensor of the checkpoint or over several; None: all."""
    columns: range | None = None
    """None: all."""


WHOLE = Taken()
Take = Callable[[str], Taken | None]
"""What is wanted of a parameter, by its name; None: nothing, and it is not read."""


def take_all(_name: str) -> Taken:
    """All of every parameter."""
    return WHOLE


class _Placed(NamedTuple):
    """A window of a tensor of the checkpoint, and where its rows begin in what is made of it."""

    start: int
    entry: Entry
    window: Window

    @property
    def end(self) -> int:
        return self.start + len(self.window.rows)


def read_weights(
    source: ModelSource,
    config: ModelConfig,
    dtype: torch.dtype,
    prefix: str = "",
    head: Head = "keep",
    reader: DeviceReader | None = None,
    take: Take = take_all,
) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
    """Parameters whose names begin with `prefix`, one after the other: in groups where the checkpoint has all of one
    so, else in `dtype`. reader: parameters are on its device; None: on the host. take: parts of them; nothing else of
    safetensors is read, and of GGUF files rows.

    Raises ConfigError for a checkpoint that does not fit `config` or has a type that is not supported.
    """
    for name, value in _read(source, config, dtype, prefix, head, reader, take, keeps_float8=False):
        assert not isinstance(value, Float8Tensor)
        yield name, value


def read_with_float8(
    source: ModelSource,
    config: ModelConfig,
    dtype: torch.dtype,
    head: Head,
    reader: DeviceReader,
    take: Take = take_all,
) -> Iterator[tuple[str, Tensor | QuantizedTensor | Float8Tensor]]:
    """`read_weights`, in which matrices of 8-bit floats that the checkpoint has for activations of 8 bits stay so."""
    return _read(source, config, dtype, "", head, reader, take, keeps_float8=True)


def _read(
    source: ModelSource,
    config: ModelConfig,
    dtype: torch.dtype,
    prefix: str,
    head: Head,
    reader: DeviceReader | None,
    take: Take,
    *,
    keeps_float8: bool,
) -> Iterator[tuple[str, Tensor | QuantizedTensor | Float8Tensor]]:
    plan = layout(config)
    device = None if reader is None else reader.device
    with ExitStack() as files:
        entries = (
            gguf_entries(source.path, source.gguf, config)
            if source.format == "gguf"
            else directory_entries(source, files, config, reader)
        )
        _check(plan, entries, config)
        pieces: dict[str, list[tuple[Piece, Entry]]] = {}
        for name, piece in plan.items():
            pieces.setdefault(piece.target, []).append((piece, entries[name]))
        head_bits = _head_bits(head, entries)
        for target, shape in parameter_shapes(plan).items():
            taken = take(target) if target.startswith(prefix) else None
            if taken is not None:
                placed = list(_place(shape, pieces[target], taken))
                value = _parameter(target, shape, placed, dtype, device, keeps_float8=keeps_float8)
                if target in TABLES and head_bits is not None and not isinstance(value, Float8Tensor):
                    value = round_table(value, head_bits)
                yield target, value


def load_weights(
    source: ModelSource, config: ModelConfig, dtype: torch.dtype, prefix: str = "", head: Head = "keep"
) -> dict[str, Matrix]:
    """`read_weights` for torch's operators: all in `dtype`, but 4-bit matrices of a directory, which stay packed."""
    return place_on_host(read_weights(source, config, dtype, prefix, head), source, dtype)


def place_on_host(
    weights: Iterable[tuple[str, Tensor | QuantizedTensor]], source: ModelSource, dtype: torch.dtype
) -> dict[str, Matrix]:
    """Parameters of a checkpoint, as they come, in the form of `load_weights`."""
    is_packed = source.format != "gguf"
    return {name: _for_torch(name, value, dtype, is_packed) for name, value in weights}


def _for_torch(name: str, value: Tensor | QuantizedTensor, dtype: torch.dtype, is_packed: bool) -> Matrix:
    if isinstance(value, Tensor):
        return value
    if is_packed and value.bits == 4 and name not in TABLES:
        return TorchQuantizedMatrix(value, dtype)
    return value.dequantize_in(dtype)


def _place(shape: tuple[int, ...], pieces: list[tuple[Piece, Entry]], taken: Taken) -> Iterator[_Placed]:
    """What is taken of a parameter's pieces, in order. shape: the whole parameter's."""
    columns = taken.columns or (range(shape[1]) if len(shape) > 1 else None)
    start = 0
    for rows in [range(shape[0])] if taken.rows is None else taken.rows:
        for piece, entry in pieces:
            first, last = max(rows.start, piece.start), min(rows.stop, piece.start + piece.shape[0])
            if first < last:
                yield _Placed(start, entry, Window(range(first - piece.start, last - piece.start), columns))
                start += last - first


def _parameter(
    target: str,
    shape: tuple[int, ...],
    placed: list[_Placed],
    dtype: torch.dtype,
    device: torch.device | None,
    *,
    keeps_float8: bool,
) -> Tensor | QuantizedTensor | Float8Tensor:
    """What is taken of one parameter; quantized where all of it is, in the same way. shape: the whole parameter's."""
    rows, columns = placed[-1].end, placed[0].window.columns
    if keeps_float8 and columns is not None and all(entry.copy_float8 is not None for _, entry, _ in placed):
        float8 = Float8Tensor.empty(rows, len(columns), device)
        for part in placed:
            assert part.entry.copy_float8 is not None
            part.entry.copy_float8(float8.rows(part.start, part.end), part.window)
        return float8
    kinds = {
        None if entry.quantized is None else (entry.quantized.group_size, entry.quantized.bits)
        for _, entry, _ in placed
    }
    kind = kinds.pop()
    if kind is not None and columns is not None and not kinds:
        size = cut_group_size(kind[0], columns, shape[1])
        quantized = QuantizedTensor.empty(rows, len(columns), size, kind[1], device)
        for part in placed:
            assert part.entry.quantized is not None
            part.entry.quantized.copy(quantized.rows(part.start, part.end), part.window, part.entry.shape)
        return quantized
    parameter = _allocate(target, (rows, *placed[0].window.shape[1:]), dtype, device)
    for part in placed:
        part.entry.copy_into(parameter[part.start : part.end], part.window)
    return parameter


def _head_bits(head: Head, entries: Mapping[str, Entry]) -> int | None:
    if head in ("int8", "int4"):
        return {"int8": 8, "int4": 4}[head]
    return 8 if head == "auto" and any(entry.quantized is not None for entry in entries.values()) else None


def round_table(table: Tensor | QuantizedTensor, bits: int) -> Tensor | QuantizedTensor:
    """The table rounded to nearest in `bits` bits; one that has no more bits stays as it is."""
    if isinstance(table, QuantizedTensor) and table.bits <= bits:
        return table
    stored = table.q if isinstance(table, QuantizedTensor) else table
    rows, columns = stored.shape
    out = QuantizedTensor.empty(rows, columns, HEAD_GROUP, bits, stored.device)
    step = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        end = min(rows, start + step)
        dense = table.rows(start, end).dequantize() if isinstance(table, QuantizedTensor) else table[start:end]
        out.rows(start, end).copy_(quantize(dense, HEAD_GROUP) if bits == 4 else quantize_int8(dense, HEAD_GROUP))
    return out


def layout(config: ModelConfig) -> dict[str, Piece]:
    """Place where each tensor of a checkpoint goes, by the tensor's Hugging Face name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    plan = {
        "model.embed_tokens.weight": Piece("embed", 0, (config.vocab_size, hidden)),
        "model.norm.weight": Piece("norm", 0, (hidden,)),
    }
    if not config.is_tied:
        plan["lm_head.weight"] = Piece("lm_head", 0, (config.vocab_size, hidden))
    if config.has_rope_factors:
        plan["rope_freqs.weight"] = Piece(ROPE_FACTORS, 0, (config.head_dim // 2,))
    for index in range(config.num_layers):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        plan[f"{theirs}.input_layernorm.weight"] = Piece(f"{ours}.input_norm", 0, (hidden,))
        plan[f"{theirs}.post_attention_layernorm.weight"] = Piece(f"{ours}.post_norm", 0, (hidden,))
        plan |= _attention_layout(config, f"{theirs}.self_attn", ours)
        for fused, parts in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
            rows, columns = (hidden, inner) if fused == "down" else (inner, hidden)
            plan |= _fuse(f"{theirs}.mlp", dict.fromkeys(parts, rows), f"{ours}.{fused}", columns, config.has_mlp_bias)
    return plan


def _attention_layout(config: ModelConfig, theirs: str, ours: str) -> dict[str, Piece]:
    query, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    plan = _fuse(
        theirs,
        {"q_proj": query, "k_proj": shared, "v_proj": shared},
        f"{ours}.qkv",
        config.hidden_size,
        config.has_qkv_bias,
    )
    plan |= _fuse(theirs, {"o_proj": config.hidden_size}, f"{ours}.o", query, config.has_o_bias)
    if config.has_qk_norm:
        for name in ("q_norm", "k_norm"):
            plan[f"{theirs}.{name}.weight"] = Piece(f"{ours}.{name}", 0, (config.head_dim,))
    return plan


def _fuse(theirs: str, rows: Mapping[str, int], target: str, columns: int, has_bias: bool) -> dict[str, Piece]:
    """Places of matrices (and biases) that are stacked in order, `rows` of each."""
    plan: dict[str, Piece] = {}
    start = 0
    for name, count in rows.items():
        plan[f"{theirs}.{name}.weight"] = Piece(target, start, (count, columns))
        if has_bias:
            plan[f"{theirs}.{name}.bias"] = Piece(f"{target}_bias", start, (count,))
        start += count
    return plan


def parameter_shapes(plan: Mapping[str, Piece]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in plan.values():
        rows = piece.start + piece.shape[0]
        shapes[piece.target] = (max(rows, shapes.get(piece.target, (0,))[0]), *piece.shape[1:])
    return shapes


def _allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    return torch.empty(shape, dtype=torch.float32 if name == ROPE_FACTORS else dtype, device=device)


def _check(plan: Mapping[str, Piece], entries: Mapping[str, Entry], config: ModelConfig) -> None:
    for name, piece in plan.items():
        if name not in entries:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        if entries[name].shape != piece.shape:
            raise ConfigError(
                f"tensor {name} of the checkpoint has the shape {list(entries[name].shape)}; "
                f"its configuration asks for {list(piece.shape)}"
            )
    for name in entries:
        if name not in plan and not _is_redundant(name, config):
            raise ConfigError(f"the checkpoint has a tensor {name}, for which a model of its configuration has no use")


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Old checkpoints store the RoPE frequencies, some tied ones the embedding twice."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.is_tied)
