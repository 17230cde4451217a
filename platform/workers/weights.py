"""Checkpoints into one normal form: the parameters of `models/llama.py` by name, fused, contiguous, in the engine's dtype.

Each parameter is allocated once and filled piece by piece, so the peak is the model in its final dtype plus one piece in float32. Files are
mapped, not read. Invariant: the mapping that `load_weights` returns has exactly the names and shapes of `layout`; a checkpoint that lacks
a tensor, has one too many or one of another shape is refused with a ConfigError that names it.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.text.gguf_header import GgufHeader, TensorInfo
from penstock.text.source import ModelSource
from penstock.wire.errors import ConfigError
from penstock.workers.models.config import ModelConfig
from penstock.workers.quant import awq
from penstock.workers.quant.int4 import Groups, Int4Matrix, Matrix

GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
SAFETENSORS_TYPES = ("F32", "F16", "BF16")
ROPE_FACTORS = "rope_factors"
"""Parameter kept in float32: divisors of the RoPE frequencies."""

CHUNK_ELEMENTS = 1 << 20
"""Elements dequantized at once, at most (of a tensor with longer rows, one row)."""


class Piece(NamedTuple):
    """Where a checkpoint's tensor goes: rows [start, start + shape[0]) of the parameter `target`."""

    target: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint: its shape, rows first, and how to copy it into a tensor of that shape."""

    shape: tuple[int, ...]
    copy_into: Callable[[Tensor], None]
    copy_groups: Callable[[Groups], None] | None = None
    """Of a quantized matrix: how to copy it into the normal form, undequantized."""
    group_size: int = 0


def load_weights(source: ModelSource, config: ModelConfig, dtype: torch.dtype, prefix: str = "") -> dict[str, Matrix]:
    """Those whose names begin with `prefix`. Raises ConfigError for a checkpoint that does not fit `config` or has a type that is not supported."""
    plan = layout(config)
    with ExitStack() as files:
        entries = _gguf_entries(source.path, source.gguf, config) if source.format == "gguf" else _safetensors_entries(source, files, config)
        _check(plan, entries, config)
        pieces: dict[str, list[tuple[Piece, Entry]]] = {}
        for name, piece in plan.items():
            pieces.setdefault(piece.target, []).append((piece, entries[name]))
        return {target: _parameter(target, shape, pieces[target], dtype) for target, shape in parameter_shapes(plan).items() if target.startswith(prefix)}


def _parameter(target: str, shape: tuple[int, ...], pieces: list[tuple[Piece, Entry]], dtype: torch.dtype) -> Matrix:
    """Stays quantized where all its pieces are, alike."""
    if all(entry.copy_groups is not None for _, entry in pieces) and len({entry.group_size for _, entry in pieces}) == 1:
        rows, columns = shape
        groups = Groups.empty(rows, columns, pieces[0][1].group_size)
        for piece, entry in pieces:
            assert entry.copy_groups is not None
            entry.copy_groups(groups.rows(piece.start, piece.start + piece.shape[0]))
        return Int4Matrix(groups, dtype)
    parameter = _allocate(target, shape, dtype)
    for piece, entry in pieces:
        entry.copy_into(parameter[piece.start : piece.start + piece.shape[0]])
    return parameter


def layout(config: ModelConfig) -> dict[str, Piece]:
    """For each tensor of a checkpoint, by its Hugging Face name, the place where it goes."""
    hidden, inner = config.hidden_size, config.intermediate_size
    plan = {
        "model.embed_tokens.weight": Piece("embed", 0, (config.vocab_size, hidden)),
        "model.norm.weight": Piece("norm", 0, (hidden,)),
    }
    if not config.is_tied:
        plan["lm_head.weight"] = Piece("lm_head", 0, (config.vocab_size, hidden))
    if config.has_rope_factors:
        plan[ROPE_FACTORS] = Piece(ROPE_FACTORS, 0, (config.head_dim // 2,))
    for index in range(config.num_layers):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        plan[f"{theirs}.input_layernorm.weight"] = Piece(f"{ours}.input_norm", 0, (hidden,))
        plan[f"{theirs}.post_attention_layernorm.weight"] = Piece(f"{ours}.post_norm", 0, (hidden,))
        plan |= _attention_layout(config, f"{theirs}.self_attn", ours)
        for fused, parts in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
            rows, columns = (hidden, inner) if fused == "down" else (inner, hidden)
            plan |= _fused(f"{theirs}.mlp", dict.fromkeys(parts, rows), f"{ours}.{fused}", columns, config.has_mlp_bias)
    return plan


def _attention_layout(config: ModelConfig, theirs: str, ours: str) -> dict[str, Piece]:
    query, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    plan = _fused(theirs, {"q_proj": query, "k_proj": shared, "v_proj": shared}, f"{ours}.qkv", config.hidden_size, config.has_qkv_bias)
    plan |= _fused(theirs, {"o_proj": config.hidden_size}, f"{ours}.o", query, config.has_o_bias)
    if config.has_qk_norm:
        for name in ("q_norm", "k_norm"):
            plan[f"{theirs}.{name}.weight"] = Piece(f"{ours}.{name}", 0, (config.head_dim,))
    return plan


def _fused(theirs: str, rows: Mapping[str, int], target: str, columns: int, has_bias: bool) -> dict[str, Piece]:
    """Matrices (and biases) stacked in order: `rows` of each."""
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


def _allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=torch.float32 if name == ROPE_FACTORS else dtype)


def _check(plan: Mapping[str, Piece], entries: Mapping[str, Entry], config: ModelConfig) -> None:
    for name, piece in plan.items():
        if name not in entries:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        if entries[name].shape != piece.shape:
            raise ConfigError(f"tensor {name} of the checkpoint has the shape {list(entries[name].shape)}; its configuration asks for {list(piece.shape)}")
    for name in entries:
        if name not in plan and not _is_redundant(name, config):
            raise ConfigError(f"the checkpoint has a tensor {name}, for which a model of its configuration has no use")


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Old checkpoints store the RoPE frequencies, some tied ones the embedding twice."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.is_tied)


# safetensors


class _TensorFile(Protocol):
    """What is used of safetensors.safe_open, whose methods have no types."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> "_TensorView": ...
    def get_tensor(self, name: str) -> Tensor: ...


class _TensorView(Protocol):
    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...


def _safetensors_entries(source: ModelSource, files: ExitStack, config: ModelConfig) -> dict[str, Entry]:
    holders: dict[str, _TensorFile] = {}
    for path in _safetensors_files(source):
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
            holders |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"can't read {path}: {error}") from error
    if config.quantization is None:
        return {name: _safetensors_entry(file, name) for name, file in holders.items()}
    layers = [name.removesuffix(".qweight") for name in holders if name.endswith(".qweight")]
    packed = {f"{layer}.{part}" for layer in layers for part in ("qweight", "qzeros", "scales")}
    entries = {name: _safetensors_entry(file, name) for name, file in holders.items() if name not in packed}
    return entries | {f"{layer}.weight": _awq_entry(holders, layer, config.quantization.group_size) for layer in layers}


def _awq_entry(holders: Mapping[str, _TensorFile], layer: str, group_size: int) -> Entry:
    names = {part: f"{layer}.{part}" for part in ("qweight", "qzeros", "scales")}
    for name in names.values():
        if name not in holders:
            raise ConfigError(f"the checkpoint has no tensor {name}, which belongs to its quantized layer")
    views = {part: holders[name].get_slice(name) for part, name in names.items()}
    for part, kinds in (("qweight", ("I32",)), ("qzeros", ("I32",)), ("scales", SAFETENSORS_TYPES)):
        if views[part].get_dtype() not in kinds:
            raise ConfigError(f"tensor {names[part]} of the checkpoint has the type {views[part].get_dtype()}; AWQ has {' or '.join(kinds)} there")
    shapes = {part: tuple(view.get_shape()) for part, view in views.items()}
    columns, words = shapes["qweight"] if len(shapes["qweight"]) == 2 else (0, 0)
    groups, rows = -(-columns // group_size), words * awq.PER_INT
    for part, wanted in (("qweight", (columns, words)), ("qzeros", (groups, words)), ("scales", (groups, rows))):
        if shapes[part] != wanted:
            raise ConfigError(f"tensor {names[part]} of the checkpoint has the shape {list(shapes[part])}; groups of {group_size} ask for {list(wanted)}")

    def read(part: str) -> Tensor:
        return holders[names[part]].get_tensor(names[part])

    def copy_groups(out: Groups) -> None:
        awq.copy_groups(read("qweight"), read("qzeros"), read("scales"), out)

    def copy_into(out: Tensor) -> None:
        whole = Groups.empty(rows, columns, group_size)
        copy_groups(whole)
        out.copy_(whole.dequantized())

    return Entry((rows, columns), copy_into, copy_groups, group_size)


def _safetensors_files(source: ModelSource) -> list[Path]:
    """Those that the index names; without one the only file, or model.safetensors."""
    index = source.read_json("model.safetensors.index.json")
    if index is not None:
        weight_map = index.get("weight_map")
        names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not names or any(Path(str(name)).name != name for name in names):
            raise ConfigError(f"the weight_map in {source.path / 'model.safetensors.index.json'} does not name files of that directory")
        return [source.path / name for name in sorted(names)]
    found = sorted(source.path.glob("*.safetensors"))
    usual = source.path / "model.safetensors"
    if usual not in found and len(found) != 1:
        raise ConfigError(f"{source.path} holds {len(found)} *.safetensors and neither model.safetensors nor model.safetensors.index.json says which to read")
    return [usual] if usual in found else found


def _safetensors_entry(file: _TensorFile, name: str) -> Entry:
    view = file.get_slice(name)
    kind = view.get_dtype()
    if kind not in SAFETENSORS_TYPES:
        raise ConfigError(f"tensor {name} has the type {kind}, which is not supported; these are: {', '.join(SAFETENSORS_TYPES)}")
    return Entry(tuple(view.get_shape()), partial(_copy_stored, file, name))


def _copy_stored(file: _TensorFile, name: str, out: Tensor) -> None:
    out.copy_(file.get_tensor(name))


# GGUF

_GGUF_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gguf_entries(path: Path, header: GgufHeader, config: ModelConfig) -> dict[str, Entry]:
    data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="c").view(np.ndarray)  # writable copies: torch warns of what it may not write to
    return {_hf_name(tensor.name): _gguf_entry(data, tensor, config) for tensor in header.tensors}


def _hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor (`blk.3.attn_q.weight`); an unknown name stays as it is."""
    if name == "rope_freqs.weight":
        return ROPE_FACTORS
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _GGUF_PARTS:
        return f"model.layers.{parts[1]}.{_GGUF_PARTS[parts[2]]}.{parts[3]}"
    return _GGUF_NAMES.get(name, name)


def _gguf_entry(data: NDArray[np.uint8], tensor: TensorInfo, config: ModelConfig) -> Entry:
    kind = _gguf_type(tensor)
    shape = tuple(reversed(tensor.shape))
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ConfigError(f"tensor {tensor.name} has rows of {shape[-1]} elements, which {kind.name} can't hold: they are no multiple of {block}")
    row_bytes = shape[-1] // block * block_bytes
    end = tensor.offset + math.prod(shape[:-1]) * row_bytes
    if end > len(data):
        raise ConfigError(f"the GGUF file is cut short: tensor {tensor.name} ends at byte {end} of {len(data)}")
    rows = data[tensor.offset : end].reshape(-1, row_bytes)
    num_heads = _permuted_heads(tensor.name, config)
    return Entry(shape, partial(_copy_dequantized, rows, kind, num_heads))


def _gguf_type(tensor: TensorInfo) -> gguf.GGMLQuantizationType:
    try:
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        name = kind.name
    except ValueError:
        name = f"type {tensor.ggml_type}"
    if name not in GGUF_TYPES:
        raise ConfigError(f"tensor {tensor.name} has the GGUF type {name}, which is not supported; these are: {', '.join(GGUF_TYPES)}")
    return kind


def _permuted_heads(name: str, config: ModelConfig) -> int | None:
    """GGUF files of the llama architecture keep q and k with the two halves of each head interleaved, for another form of RoPE."""
    if config.family != "llama":
        return None
    part = name.split(".")[-2]
    return {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part)


def _copy_dequantized(rows: NDArray[np.uint8], kind: gguf.GGMLQuantizationType, num_heads: int | None, out: Tensor) -> None:
    """rows: uint8 [rows, bytes of a row]; a vector is one row."""
    if num_heads is not None:
        whole = torch.from_numpy(gguf.dequantize(rows, kind))
        out.copy_(whole.view(num_heads, -1, 2, *out.shape[1:]).transpose(1, 2).reshape(out.shape))
        return
    table = out.view(len(rows), -1)
    step = max(1, CHUNK_ELEMENTS // table.shape[1])
    for start in range(0, len(rows), step):
        table[start : start + step] = torch.from_numpy(gguf.dequantize(rows[start : start + step], kind))
