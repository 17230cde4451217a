"""Matrices of 4- and 8-bit integers in groups, as they lie on a GPU. The order of the bytes only; the kernels are those
of `products`.

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

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.quant.quantized import QuantizedTensor

TILE_ROWS = 64
_RUNS = (128, 64, 32)
_MOST_FILL = 1.125
"""Columns with those that fill the last block, for each column, beyond which a shorter run is better."""
SMALL_ROWS = 64
"""Up to so many rows of activations are multiplied with the packed matrix; for more of them it is dequantized, a slice
at a time, and torch multiplies."""
SLICE_ELEMENTS = 1 << 26
"""Of the dequantized slice: 128 MiB in bfloat16."""

Second = Literal["none", "zero", "offset"]
"""What is kept beside the scale: nothing, zero points (w = (q - zero) * scale) or offsets (w = q * scale + offset)."""


class GroupedMatrix:
    """A quantized [N, K] matrix on a device, for products with activations of one dtype."""

    def __init__(self, groups: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> None:
        """groups: on any device; `is_covered` of them."""
        assert is_covered(groups)
        self.shape = groups.q.shape
        self.dtype = dtype
        self.device = device
        self.bits = groups.bits
        self.group_size = groups.group_size
        self.run = _run(groups)
        self.q = _tiled(groups.q.to(device), self.run, self.bits)
        self.scale = _transposed(groups.scale.to(device))
        self.second_kind, second = _second(groups)
        self.second = self.scale if second is None else _transposed(second.to(device))

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes + (0 if self.second_kind == "none" else self.second.nbytes)

    def multiply(self, x: Tensor) -> Tensor:
        """x [T, K] times the transpose: [T, N] in x's dtype."""
        from penstock.workers.compute.triton.matmul import (
            multiply,
        )  # Triton is there only where torch is made for a GPU

        if x.shape[0] <= SMALL_ROWS:
            return multiply(x, self)
        step = max(1, SLICE_ELEMENTS // (TILE_ROWS * self.shape[1])) * TILE_ROWS
        if step >= self.shape[0]:
            return functional.linear(x, self.dense(0, self.shape[0]))
        out = x.new_empty(x.shape[0], self.shape[0])
        for start in range(0, self.shape[0], step):
            end = min(start + step, self.shape[0])
            out[:, start:end] = functional.linear(x, self.dense(start, end))
        return out

    def dense(self, start: int, end: int) -> Tensor:
        """Rows [start, end), of which the first begins a tile: [end - start, K] in the matrix's dtype."""
        from penstock.workers.compute.triton.matmul import (
            dequantize,
        )  # Triton is there only where torch is made for a GPU

        return dequantize(self, start, end)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows by number, int64 [R]: [R, K]."""
        from penstock.workers.compute.triton.matmul import (
            read_rows,
        )  # Triton is there only where torch is made for a GPU

        return read_rows(self, ids)


def is_covered(groups: QuantizedTensor) -> bool:
    """Whether the groups are of a whole number of runs, or a row is one group."""
    return groups.group_size % _RUNS[-1] == 0 or groups.scale.shape[1] == 1


def _run(groups: QuantizedTensor) -> int:
    """The longest that a group is a multiple of and that needs little to fill its last block up."""
    columns, runs = groups.q.shape[1], 2 if groups.bits == 4 else 1
    fitting = [run for run in _RUNS if groups.group_size % run == 0 or groups.scale.shape[1] == 1]
    return next((run for run in fitting if _up(columns, runs * run) <= _MOST_FILL * columns), fitting[-1])


def _tiled(q: Tensor, run: int, bits: int) -> Tensor:
    """See above; q [N, K]."""
    rows, columns = q.shape
    runs = 2 if bits == 4 else 1
    filled = functional.pad(
        q.view(torch.uint8), (0, _up(columns, runs * run) - columns, 0, _up(rows, TILE_ROWS) - rows)
    )
    parts = filled.view(-1, TILE_ROWS, filled.shape[1] // (runs * run), runs, run).permute(3, 0, 2, 1, 4)
    return (parts[0] | parts[1] << 4 if bits == 4 else parts[0]).contiguous()


def _transposed(values: Tensor) -> Tensor:
    """[G, N], N filled up to whole tiles with zeros."""
    filled = functional.pad(values, (0, 0, 0, _up(len(values), TILE_ROWS) - len(values)))
    return _shortest(filled.t().contiguous())


def _second(groups: QuantizedTensor) -> tuple[Second, Tensor | None]:
    if groups.offset is None:
        return "none", None
    zero = groups.zero
    is_kept = torch.equal(zero.round(), zero) and torch.equal(-zero * groups.scale, groups.offset)
    return ("zero", zero) if is_kept else ("offset", groups.offset)


def _shortest(values: Tensor) -> Tensor:
    return next((short for short in (values.half(), values.bfloat16()) if torch.equal(short.float(), values)), values)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
