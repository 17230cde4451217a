"""Matrices of 4- and 8-bit integers in groups, as they lie on a GPU: the order of the bytes only. The kernels that read
them are those of `matmul`, and `grouped_matrix` has the matrix that a model's layers hold.

A matrix [N, K] is cut into tiles of TILE_ROWS rows, these into blocks of a whole number of runs; a run is 32, 64 or 128
columns of one group:

    q       uint8 [N / TILE_ROWS, blocks, TILE_ROWS, run]
            4 bits: a block is two runs, column c of the first in the low half of byte c, of the second in the high half
            8 bits: a block is one run, its bytes are int8
    scale   [G, N], offset or zero point likewise

So a program that reads a tile's block reads one piece of memory, of 2 to 8 KiB, each byte once; half a byte becomes an
element without a shuffle; and what is multiplied at a time has one scale a row. N and K are filled up with zeros, which
the kernels never multiply by anything that is not finite.

Scales, and the offsets or zero points, are kept in the shortest of float16, bfloat16 and float32 that loses nothing.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.quant.quantized import QuantizedTensor

TILE_ROWS = 64
_RUNS = (128, 64, 32)
MOST_ZERO = 64
"""Largest zero point, either way, that is kept as one: with it and 128 added, all are whole numbers of bfloat16."""
_MOST_FILL = 1.125
"""Columns with those that fill the last block, for each column, beyond which a shorter run is better."""

Second = Literal["none", "zero", "offset"]
"""What is kept beside the scale: nothing, zero points (w = (q - zero) * scale) or offsets (w = q * scale + offset)."""


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """A quantized [N, K] matrix in that order, on a device."""

    shape: torch.Size
    """Rows N and columns K of the matrix, without what fills it up."""
    dtype: torch.dtype
    """Type of the activations that the matrix is multiplied with, and of its rows where they are dequantized."""
    bits: int
    group_size: int
    run: int
    """Columns of a run: 32, 64 or 128."""
    q: Tensor
    """uint8 [N / TILE_ROWS, blocks, TILE_ROWS, run]."""
    scale: Tensor
    """[G, N], N filled up to whole tiles."""
    second: Tensor
    """Zero points or offsets, of the same shape; the scales themselves where there is neither."""
    second_kind: Second

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes + (0 if self.second_kind == "none" else self.second.nbytes)


def lay_out_groups(quantized: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> GroupedTensor:
    """The matrix, which lies on any device, in the kernels' order on this one. `is_covered` holds for it."""
    assert is_covered(quantized)
    run = _run(quantized)
    scale = _transpose(quantized.scale.to(device))
    second_kind, second = _offset_or_zero(quantized)
    return GroupedTensor(
        quantized.q.shape,
        dtype,
        quantized.bits,
        quantized.group_size,
        run,
        _tile(quantized.q.to(device), run, quantized.bits),
        scale,
        scale if second is None else _transpose(second.to(device)),
        second_kind,
    )


def read_back(matrix: GroupedTensor) -> QuantizedTensor:
    """The matrix that `lay_out_groups` was given, on the matrix's device."""
    rows, columns = matrix.shape
    num_rows = matrix.q.shape[0] * TILE_ROWS
    if matrix.bits == 4:
        parts = torch.stack((matrix.q & 15, matrix.q >> 4)).permute(1, 3, 2, 0, 4)
    else:
        parts = matrix.q.view(torch.int8).permute(0, 2, 1, 3)
    q = parts.reshape(num_rows, -1)[:rows, :columns].contiguous()
    scale, second = (values.t()[:rows].float().contiguous() for values in (matrix.scale, matrix.second))
    offset = {"none": None, "zero": -second * scale, "offset": second}[matrix.second_kind]
    return QuantizedTensor(q, scale, offset, matrix.group_size)


def is_covered(quantized: QuantizedTensor) -> bool:
    """Whether the groups are of a whole number of runs, or a row is one group."""
    return quantized.group_size % _RUNS[-1] == 0 or quantized.scale.shape[1] == 1


def _run(quantized: QuantizedTensor) -> int:
    """Columns of a run: as many as a group is a multiple of and as need little to fill the last block up."""
    columns, runs = quantized.q.shape[1], 2 if quantized.bits == 4 else 1
    fitting = [run for run in _RUNS if quantized.group_size % run == 0 or quantized.scale.shape[1] == 1]
    return next((run for run in fitting if _round_up(columns, runs * run) <= _MOST_FILL * columns), fitting[-1])


def _tile(q: Tensor, run: int, bits: int) -> Tensor:
    """The elements q [N, K] in the order of the module's docstring."""
    rows, columns = q.shape
    runs = 2 if bits == 4 else 1
    filled = functional.pad(
        q.view(torch.uint8), (0, _round_up(columns, runs * run) - columns, 0, _round_up(rows, TILE_ROWS) - rows)
    )
    parts = filled.view(-1, TILE_ROWS, filled.shape[1] // (runs * run), runs, run).permute(3, 0, 2, 1, 4)
    return (parts[0] | parts[1] << 4 if bits == 4 else parts[0]).contiguous()


def _transpose(values: Tensor) -> Tensor:
    """The values [N, G] as [G, N], N filled up to whole tiles with zeros."""
    filled = functional.pad(values, (0, 0, 0, _round_up(len(values), TILE_ROWS) - len(values)))
    return _narrowest_exact(filled.t().contiguous())


def _offset_or_zero(quantized: QuantizedTensor) -> tuple[Second, Tensor | None]:
    """The groups' second numbers and their kind: the zero points where small whole numbers say the same as the offsets,
    else the offsets; None of the kind "none"."""
    if quantized.offset is None:
        return "none", None
    zero = quantized.zero
    is_whole = torch.equal(zero.round().clamp(-MOST_ZERO, MOST_ZERO), zero)
    is_kept = is_whole and torch.equal(-zero * quantized.scale, quantized.offset)
    return ("zero", zero) if is_kept else ("offset", quantized.offset)


def _narrowest_exact(values: Tensor) -> Tensor:
    """The float32 values in a 16-bit type that holds each of them exactly, or as they are where none does."""
    return next((short for short in (values.half(), values.bfloat16()) if torch.equal(short.float(), values)), values)


def _round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple
