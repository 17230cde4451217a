"""GGUF files: Q4_0, Q4_1 and Q8_0 into the normal form, other types dequantized by the gguf package.

A tensor is read in pieces that are dropped at once: pages of a mapped file would count as resident memory, and stay.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.text.gguf_header import GgufHeader, TensorInfo
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.quant.gguf_blocks import BLOCK, UNPACK
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.readers.entry import Entry, Quantized, Window


class Type(NamedTuple):
    """A type of elements (ggml.h, ggml-common.h)."""

    name: str
    block: int
    """Elements that are stored together."""
    block_bytes: int


TYPES = {
    0: Type("F32", 1, 4),
    1: Type("F16", 1, 2),
    30: Type("BF16", 1, 2),
    2: Type("Q4_0", 32, 18),
    3: Type("Q4_1", 32, 20),
    8: Type("Q8_0", 32, 34),
    6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    12: Type("Q4_K", 256, 144),
    13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
}
"""Types by the number that files have for them."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK_ELEMENTS = 1 << 20
"""Elements read and unpacked at once, at most (of a tensor with longer rows, one row; of one whose rows change places,
all)."""

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
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
_Bytes = NDArray[np.uint8]


class _File(NamedTuple):
    path: Path
    size: int


class _Rows(NamedTuple):
    """Rows of a tensor, as bytes of the file."""

    path: Path
    offset: int
    num_rows: int
    row_bytes: int

    def read(self, start: int, end: int) -> _Bytes:
        """uint8 [end - start, row_bytes]."""
        data = np.fromfile(
            self.path, np.uint8, (end - start) * self.row_bytes, offset=self.offset + start * self.row_bytes
        )
        return data.reshape(end - start, self.row_bytes)

    def part(self, rows: range) -> "_Rows":
        """Some of the rows."""
        return self._replace(offset=self.offset + rows.start * self.row_bytes, num_rows=len(rows))

    def chunks(self, num_heads: int | None, row_elements: int) -> Iterator[tuple[int, _Bytes]]:
        """Rows in their places, and where the first of them goes."""
        if num_heads is not None:
            yield 0, _straighten(self.read(0, self.num_rows), num_heads)
            return
        step = max(1, CHUNK_ELEMENTS // row_elements)
        for start in range(0, self.num_rows, step):
            yield start, self.read(start, min(self.num_rows, start + step))


def gguf_entries(path: Path, header: GgufHeader, config: ModelConfig) -> dict[str, Entry]:
    """Entries of the file's tensors by Hugging Face name. Raises ConfigError."""
    file = _File(path, path.stat().st_size)
    return {_hf_name(tensor.name): _entry(file, tensor, config) for tensor in header.tensors}


def _hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor (`blk.3.attn_q.weight`); an unknown name stays as it is."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PARTS:
        return f"model.layers.{parts[1]}.{_PARTS[parts[2]]}.{parts[3]}"
    return _NAMES.get(name, name)


def _entry(file: _File, tensor: TensorInfo, config: ModelConfig) -> Entry:
    kind = _type(tensor)
    shape = tuple(reversed(tensor.shape))
    if shape[-1] % kind.block:
        raise ConfigError(
            f"tensor {tensor.name} has rows of {shape[-1]} elements, which {kind.name} can't hold: "
            f"they are no multiple of {kind.block}"
        )
    row_bytes = shape[-1] // kind.block * kind.block_bytes
    rows = _Rows(file.path, tensor.offset, math.prod(shape[:-1]), row_bytes)
    end = tensor.offset + rows.num_rows * row_bytes
    if end > file.size:
        raise ConfigError(f"the GGUF file is cut short: tensor {tensor.name} ends at byte {end} of {file.size}")
    num_heads = _permute_heads(tensor.name, config)
    head_rows = None if num_heads is None else shape[0] // num_heads
    quantized = None
    if kind.name in UNPACK and len(shape) == 2:
        copy_groups = partial(_copy_groups, rows, kind.name, head_rows)
        quantized = Quantized(UNPACK[kind.name][0], BLOCK, copy_groups, row_unit=head_rows or 1, column_unit=BLOCK)
    return Entry(shape, partial(_copy_dequantized, rows, kind, head_rows), quantized)


def _type(tensor: TensorInfo) -> Type:
    if tensor.ggml_type not in TYPES:
        supported = ", ".join(kind.name for kind in TYPES.values())
        raise ConfigError(
            f"tensor {tensor.name} has the GGUF type {_name(tensor.ggml_type)}, which is not supported; "
            f"these are: {supported}"
        )
    return TYPES[tensor.ggml_type]


def _name(ggml_type: int) -> str:
    import gguf  # noqa: PLC0415 (imports much beside itself, and few files need it)

    try:
        return gguf.GGMLQuantizationType(ggml_type).name
    except ValueError:
        return f"type {ggml_type}"


def _permute_heads(name: str, config: ModelConfig) -> int | None:
    """GGUF files of the llama architecture keep q and k with the two halves of each head interleaved, for another form
    of RoPE."""
    if config.family != "llama":
        return None
    part = name.split(".")[-2:][0]
    return {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part)


def _straighten(rows: _Bytes, num_heads: int) -> _Bytes:
    """Rows in the order that halves-form RoPE wants."""
    return rows.reshape(num_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _copy_dequantized(rows: _Rows, kind: Type, head_rows: int | None, out: Tensor, window: Window) -> None:
    """Copy a window into `out` as floats. head_rows: rows of a head, where these change places; then the window has
    whole heads."""
    if window.columns is None:
        _copy_vector(rows, kind, head_rows, out, window.rows)
        return
    num_heads = None if head_rows is None else len(window.rows) // head_rows
    row_elements = rows.row_bytes // kind.block_bytes * kind.block
    for start, chunk in rows.part(window.rows).chunks(num_heads, row_elements):
        values = _dequantize(torch.from_numpy(chunk), kind)
        out[start : start + len(chunk)] = values[:, window.columns.start : window.columns.stop]


def _copy_vector(rows: _Rows, kind: Type, head_rows: int | None, out: Tensor, window: range) -> None:
    """Copy elements of a vector, which is a row of the file, into `out` as floats."""
    values = _dequantize(torch.from_numpy(rows.read(0, rows.num_rows)), kind).view(-1)
    if head_rows is not None:
        values = values.view(-1, head_rows // 2, 2).transpose(1, 2).reshape(-1)
    out.copy_(values[window.start : window.stop])


def _dequantize(rows: Tensor, kind: Type) -> Tensor:
    """Elements of rows, uint8 [R, row bytes], as floats [R, row elements]."""
    if kind.name in _FLOATS:
        return rows.view(_FLOATS[kind.name])
    import gguf  # noqa: PLC0415 (imports much beside itself, and few files need it)

    return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind.name]))


def _copy_groups(rows: _Rows, kind: str, head_rows: int | None, out: QuantizedTensor, window: Window) -> None:
    assert window.columns is not None
    unpack = UNPACK[kind][1]
    own = slice(window.columns.start // BLOCK, -(-window.columns.stop // BLOCK))
    num_heads = None if head_rows is None else len(window.rows) // head_rows
    block_bytes = next(kept.block_bytes for kept in TYPES.values() if kept.name == kind)
    for start, chunk in rows.part(window.rows).chunks(num_heads, rows.row_bytes // block_bytes * BLOCK):
        blocks = torch.from_numpy(chunk).view(len(chunk), -1, block_bytes)[:, own].to(out.q.device)
        unpack(blocks, out.rows(start, start + len(chunk)))
