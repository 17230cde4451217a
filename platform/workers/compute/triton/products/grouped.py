"""Matrices of 4- and 8-bit integers in groups, as they lie on a GPU: the order of the bytes only. The kernels that read
them are those of `matmul`, and `grouped_matrix` has the matrix that a model's layers hold.

A matrix [N, K] is cut into tiles of TILE_ROWS rows, and these into chunks of CHUNK_BYTES bytes: 64 columns in 4 bits,
32 in 8. In a chunk the bytes lie as tensor cores take their first operand from registers (PTX ISA, fragments of
mma.m16n8k16 and of wgmma.m64nNk16), 16 bytes for each thread of four warps, one behind the other:

    q       uint8 [N / TILE_ROWS, chunks, THREADS, 16]
            thread 32 w + 4 r + c, byte 8 j + 4 i + 2 h + p (p, h, i, j: 0 or 1) is of
                row 16 w + 8 h + r and column 16 j + 8 i + 2 c + p of 32
            4 bits: its low half is of the chunk's first 32 columns, its high half of the others
            8 bits: it is an int8
    scale   [G, N], offset or zero point likewise

So a warp reads a piece of memory of 512 bytes at once, each byte once, and what it has read is what it multiplies:
half a byte becomes an element, and nothing is exchanged between threads. Kernels take `width` columns at a time, which
is a whole number of chunks and of runs, the columns that have one scale. N and K are filled up with zeros, which the
kernels never multiply by anything that is not finite.

Scales, and the offsets or zero points, are kept in the shortest of float16, bfloat16 and float32 that loses nothing.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.quant.quantized import QuantizedTensor

TILE_ROWS = 64
THREADS = 128
"""Threads that take a chunk."""
THREAD_BYTES = 16
CHUNK_BYTES = THREADS * THREAD_BYTES
_RUNS = (128, 64, 32)
_FRAGMENT = (4, 2, 8, 2, 2, 4, 2)
"""Lengths of w, h, r, j, i, c and p, in the order in which they make up the rows and the columns of 32."""
MOST_ZERO = 64
"""Largest zero point, either way, that is kept as one: with it and 128 added, all are whole numbers of bfloat16."""
_MOST_FILL = 1.125
"""Columns with those that fill them up, for each column, beyond which a shorter run is better."""

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
    """Columns that have one scale, as kernels go by: 32, 64 or 128."""
    width: int
    """What the columns are filled up to a multiple of, and kernels take at a time, at least: 32, 64 or 128."""
    q: Tensor
    """uint8 [N / TILE_ROWS, chunks, THREADS, THREAD_BYTES]."""
    scale: Tensor
    """[G, N], N filled up to whole tiles."""
    second: Tensor
    """Zero points or offsets, of the same shape; the scales themselves where there is neither."""
    second_kind: Second

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def num_tiles(self) -> int:
        return self.q.shape[0]

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a tile's rows."""
        return self.q.shape[1]

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes + (0 if self.second_kind == "none" else self.second.nbytes)


def lay_out_groups(quantized: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> GroupedTensor:
    """The matrix, which lies on any device, in the kernels' order on this one. `is_covered` holds for it."""
    assert is_covered(quantized)
    assert quantized.bits == 8 or quantized.offset is not None  # a half byte is never negative
    run, width = _run_and_width(quantized)
    scale = _transpose(quantized.scale.to(device))
    second_kind, second = _offset_or_zero(quantized)
    return GroupedTensor(
        quantized.q.shape,
        dtype,
        quantized.bits,
        quantized.group_size,
        run,
        width,
        _tile(quantized.q.to(device), width, quantized.bits),
        scale,
        scale if second is None else _transpose(second.to(device)),
        second_kind,
    )


def read_back(matrix: GroupedTensor) -> QuantizedTensor:
    """The matrix that `lay_out_groups` was given, on the matrix's device."""
    rows, columns = matrix.shape
    num_tiles, num_chunks = matrix.q.shape[:2]
    halves = torch.stack((matrix.q & 15, matrix.q >> 4)) if matrix.bits == 4 else matrix.q.view(torch.int8)[None]
    # halves, tiles, chunks, w, r, c, j, i, h, p
    parts = halves.view(len(halves), num_tiles, num_chunks, 4, 8, 4, 2, 2, 2, 2).permute(1, 3, 8, 4, 2, 0, 6, 7, 5, 9)
    q = parts.reshape(num_tiles * TILE_ROWS, -1)[:rows, :columns].contiguous()
    scale, second = (values.t()[:rows].float().contiguous() for values in (matrix.scale, matrix.second))
    offset = {"none": None, "zero": -second * scale, "offset": second}[matrix.second_kind]
    return QuantizedTensor(q, scale, offset, matrix.group_size)


def is_covered(quantized: QuantizedTensor) -> bool:
    """Whether the groups are of a whole number of runs, or a row is one group."""
    return quantized.group_size % _RUNS[-1] == 0 or quantized.scale.shape[1] == 1


def chunk_columns(bits: int) -> int:
    """Columns of a chunk."""
    return CHUNK_BYTES * 8 // bits // TILE_ROWS


def _run_and_width(quantized: QuantizedTensor) -> tuple[int, int]:
    """Columns of a run, as many as a group is a multiple of, and columns that are taken at a time; both as many as need
    little to fill the last ones up."""
    columns, least = quantized.q.shape[1], chunk_columns(quantized.bits)
    widths = [width for width in _RUNS if width >= least]
    width = next((width for width in widths if _round_up(columns, width) <= _MOST_FILL * columns), widths[-1])
    is_row = quantized.scale.shape[1] == 1
    return next(run for run in _RUNS if run <= width and (is_row or quantized.group_size % run == 0)), width


def _tile(q: Tensor, width: int, bits: int) -> Tensor:
    """The elements q [N, K] in the order of the module's docstring."""
    rows, columns = q.shape
    filled = functional.pad(
        q.view(torch.uint8), (0, _round_up(columns, width) - columns, 0, _round_up(rows, TILE_ROWS) - rows)
    )
    # tiles, w, h, r, chunks, halves, j, i, c, p
    w, h, r, *rest = _FRAGMENT
    parts = filled.view(-1, w, h, r, filled.shape[1] // chunk_columns(bits), 8 // bits, *rest)
    halves = parts.permute(5, 0, 4, 1, 3, 8, 6, 7, 2, 9)
    packed = halves[0] | halves[1] << 4 if bits == 4 else halves[0]
    return packed.reshape(*packed.shape[:2], THREADS, THREAD_BYTES).contiguous()


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
