"""Products with the matrices of `grouped`: few rows of activations by the packed matrix, and the matrix, or rows of it,
dequantized. For some hundred rows there is `tiled`.

With few rows a product takes as long as the matrix is read. A program reads one tile of it, or a part of its columns
where there are too few tiles to keep a GPU busy; the parts are added by a second kernel, in order. How a matrix is cut
depends on its shape alone.

Integers are multiplied as they are, and the sum of a run is scaled: sum of x * (q * scale + offset) = scale * sum of x
* q + offset * sum of x. So each element costs a conversion and nothing else. In bfloat16 not even that: the bits of 128
with q in the last places are those of 128 + q, and 128 times the sum of x is taken off with the offset. Sums are in
float32, where that costs 4 of 24 bits, far below what rounding to bfloat16 does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.products.grouped import TILE_ROWS, GroupedTensor
from penstock.workers.compute.triton.products.tiling import (
    DEFAULT_SMALL,
    INTERPRETED,
    SMALL_ROWS,
    Small,
    bucket_of,
    small_part_blocks,
    stages_of,
)

BASE = 128
"""What is added to 4-bit integers that become numbers of bfloat16 by their bits alone."""
UNPACK = tl.constexpr("""{
    .reg .b32 low, high;
    and.b32 low, $4, 0x0F0F0F0F;
    shr.b32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, 0x43434343, 0x4140;
    prmt.b32 $1, low, 0x43434343, 0x4342;
    prmt.b32 $2, high, 0x43434343, 0x4140;
    prmt.b32 $3, high, 0x43434343, 0x4342;
}""")
"""Four bytes to four low and four high halves, each behind a byte of 0x43: numbers of bfloat16, 128 too large (PTX ISA,
prmt). Seven instructions for eight weights; what is compiled from shifts of single bytes takes several for each."""
LEAST_BLOCKS = 4
"""Blocks of a row that one program reads, at least, where the row has as many."""
SUM_LANES = 1024


@triton.jit
def unpack(packed, base: tl.constexpr, operand: tl.constexpr):
    """Low and high halves of bytes, as integers or, with `base` added, as numbers of bfloat16."""
    if base == 0:
        low, high = packed & 15, packed >> 4
    elif operand == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            UNPACK, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low = ((packed & 15).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        high = ((packed >> 4).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def _offset(scale, second, places, kind: tl.constexpr):
    if kind == "zero":
        return -tl.load(second + places).to(tl.float32) * scale
    if kind == "offset":
        return tl.load(second + places).to(tl.float32)
    return tl.zeros_like(scale)


@triton.jit
def _read_scales(
    scale, second, start, places, num_groups, group_size, num_outputs, base: tl.constexpr, kind: tl.constexpr
):
    """Scales and offsets of a run, whose integers are `base` too large."""
    group = tl.minimum(start // group_size, num_groups - 1) * num_outputs + places
    scales = tl.load(scale + group).to(tl.float32)
    return scales, _offset(scales, second, group, kind) - base * scales


@triton.jit
def _add_run(
    sums, x, q, scales, offsets, rows, num_rows, x_stride, start, columns,
    run: tl.constexpr, bits: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """Sums [rows, outputs], with the products with one run, q [outputs, run], added."""
    lanes = start + tl.arange(0, run)
    values = tl.load(
        x + rows[:, None] * x_stride + lanes[None, :],
        mask=(rows < num_rows)[:, None] & (lanes < columns)[None, :],
        other=0.0,
    )
    products = tl.dot(values.to(operand), tl.trans(q.to(operand)), input_precision="ieee")
    sums += products * scales[None, :]
    if bits == 4:
        sums += tl.sum(values.to(tl.float32), 1)[:, None] * offsets[None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    x, q, scale, second, out, num_rows, x_stride, columns, num_groups, group_size, num_outputs, num_blocks, part_blocks,
    out_columns, row_lanes: tl.constexpr, tile_rows: tl.constexpr, run: tl.constexpr, bits: tl.constexpr,
    kind: tl.constexpr, base: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tl.arange(0, row_lanes)
    places = tile * tile_rows + tl.arange(0, tile_rows)
    within = tl.arange(0, tile_rows)[:, None] * run + tl.arange(0, run)[None, :]
    first = part * part_blocks
    sums = tl.zeros((row_lanes, tile_rows), tl.float32)
    width: tl.constexpr = 2 * run if bits == 4 else run
    scales, offsets = _read_scales(
        scale, second, first * width, places, num_groups, group_size, num_outputs, base, kind
    )  # fmt: skip
    for block in range(first, tl.minimum(first + part_blocks, num_blocks)):
        start = block * width
        packed = tl.load(q + (tile.to(tl.int64) * num_blocks + block) * (tile_rows * run) + within)
        # scales are read a run before they are used, because what is read of them is too little to be pipelined
        next_scales, next_offsets = _read_scales(
            scale, second, start + run, places, num_groups, group_size, num_outputs, base, kind
        )  # fmt: skip
        if bits == 4:
            low, high = unpack(packed, base, operand)
            sums = _add_run(
                sums, x, low, scales, offsets, rows, num_rows, x_stride, start, columns, run, bits, operand
            )  # fmt: skip
            scales, offsets = _read_scales(
                scale, second, start + width, places, num_groups, group_size, num_outputs, base, kind
            )  # fmt: skip
            sums = _add_run(
                sums, x, high, next_scales, next_offsets, rows, num_rows, x_stride, start + run, columns, run, bits,
                operand,
            )  # fmt: skip
        else:
            sums = _add_run(
                sums, x, packed.to(tl.int8, bitcast=True), scales, offsets, rows, num_rows, x_stride, start, columns,
                run, bits, operand,
            )  # fmt: skip
            scales, offsets = next_scales, next_offsets
    target = out + (part * num_rows + rows).to(tl.int64)[:, None] * out_columns + places[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & (places < out_columns)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _sum_parts(parts, out, num_rows, columns, num_parts, lanes: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * lanes + tl.arange(0, lanes)
    is_real = places < columns
    total = tl.zeros((lanes,), tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + (part * num_rows + row) * columns + places, mask=is_real, other=0.0)
    tl.store(out + row * columns + places, total.to(out.dtype.element_ty), mask=is_real)


@triton.jit
def _store_run(q, scale, second, out, place, start, columns, group, run: tl.constexpr, kind: tl.constexpr):
    """Dequantize one row's run and store it. place: where its scale lies."""
    lanes = start + tl.arange(0, run)
    scales = tl.load(scale + group + place).to(tl.float32)
    weights = q.to(tl.float32) * scales + _offset(scales, second, group + place, kind)
    tl.store(out + lanes, weights.to(out.dtype.element_ty), mask=lanes < columns)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _read_rows(
    q, scale, second, ids, out, columns, num_groups, group_size, num_outputs, num_blocks,
    tile_rows: tl.constexpr, run: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(ids + place)
    packed = tl.load(
        q + ((row // tile_rows * num_blocks + block) * tile_rows + row % tile_rows) * run + tl.arange(0, run)
    )
    out += place * columns
    start = block * run if bits == 8 else block * 2 * run
    group = tl.minimum(start // group_size, num_groups - 1) * num_outputs
    if bits == 4:
        _store_run(packed & 15, scale, second, out, row, start, columns, group, run, kind)
        group = tl.minimum((start + run) // group_size, num_groups - 1) * num_outputs
        _store_run(packed >> 4, scale, second, out, row, start + run, columns, group, run, kind)
    else:
        _store_run(packed.to(tl.int8, bitcast=True), scale, second, out, row, start, columns, group, run, kind)


@triton.jit
def _dequantize_run(
    q, scale, second, out, rows, places, num_rows, start, columns, group, run: tl.constexpr, kind: tl.constexpr
):
    """Dequantize a run, q [outputs, run], and store it. rows: where its rows go, places: where their scales lie."""
    lanes = start + tl.arange(0, run)
    scales = tl.load(scale + group + places).to(tl.float32)
    weights = q.to(tl.float32) * scales[:, None] + _offset(scales, second, group + places, kind)[:, None]
    target = out + rows.to(tl.int64)[:, None] * columns + lanes[None, :]
    tl.store(target, weights.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & (lanes < columns)[None, :])


@triton.jit(do_not_specialize=["first_tile", "num_rows"])
def _dequantize(
    q, scale, second, out, first_tile, num_rows, columns, num_groups, group_size, num_outputs, num_blocks,
    tile_rows: tl.constexpr, run: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    tile = first_tile + tl.program_id(0)
    block = tl.program_id(1)
    within = tl.arange(0, tile_rows)[:, None] * run + tl.arange(0, run)[None, :]
    packed = tl.load(q + (tile.to(tl.int64) * num_blocks + block) * (tile_rows * run) + within)
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    places = tile * tile_rows + tl.arange(0, tile_rows)
    start = block * run if bits == 8 else block * 2 * run
    group = tl.minimum(start // group_size, num_groups - 1) * num_outputs
    if bits == 4:
        _dequantize_run(packed & 15, scale, second, out, rows, places, num_rows, start, columns, group, run, kind)
        group = tl.minimum((start + run) // group_size, num_groups - 1) * num_outputs
        _dequantize_run(packed >> 4, scale, second, out, rows, places, num_rows, start + run, columns, group, run, kind)
    else:
        _dequantize_run(
            packed.to(tl.int8, bitcast=True), scale, second, out, rows, places, num_rows, start, columns, group, run,
            kind,
        )  # fmt: skip


def multiply(
    x: Tensor,
    matrix: GroupedTensor,
    small: Small = DEFAULT_SMALL,
    *,
    keeps_parts: bool = False,
    capability: tuple[int, int] = INTERPRETED,
) -> Tensor:
    """x [T, K] times the transpose: [T, N] in x's dtype, T up to `tiling.SMALL_ROWS`. keeps_parts: where columns are
    cut into several parts, their products instead, float32 [P, T, N], to be added in order. capability: of the GPU."""
    num_rows, (num_outputs, columns) = len(x), matrix.shape
    bucket = bucket_of(num_rows)
    assert x.shape[1] == columns
    assert bucket is not None
    assert bucket <= SMALL_ROWS
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles, blocks = matrix.q.shape[:2]
    part_blocks = small_part_blocks(small, LEAST_BLOCKS, tiles, blocks)
    num_parts = triton.cdiv(blocks, part_blocks)
    parts = out if num_parts == 1 else x.new_empty(num_parts, num_rows, num_outputs, dtype=torch.float32)
    _multiply[(tiles, num_parts)](
        x, matrix.q, matrix.scale, matrix.second, parts, num_rows, x.stride(0), columns, len(matrix.scale),
        matrix.group_size, matrix.scale.shape[1], blocks, part_blocks, num_outputs,
        row_lanes=bucket, tile_rows=TILE_ROWS, run=matrix.run,
        bits=matrix.bits, kind=matrix.second_kind, base=base_of(matrix.bits, x.dtype), operand=operand_type(x.dtype),
        num_warps=small.num_warps,
        num_stages=stages_of(small, bucket, block_columns(matrix.run, matrix.bits), x.element_size(), capability),
    )  # fmt: skip
    return parts if num_parts == 1 or keeps_parts else sum_parts(parts, out)


def block_columns(run: int, bits: int) -> int:
    """Columns of a block of packed integers: two runs in 4 bits, one in 8."""
    return 2 * run if bits == 4 else run


def sum_parts(parts: Tensor, out: Tensor) -> Tensor:
    """The sum of parts [P, T, N], float32, in order, in out [T, N]."""
    num_parts, num_rows, columns = parts.shape
    _sum_parts[(num_rows, triton.cdiv(columns, SUM_LANES))](parts, out, num_rows, columns, num_parts, lanes=SUM_LANES)
    return out


def dequantize(matrix: GroupedTensor, start: int, end: int) -> Tensor:
    """Rows [start, end): [end - start, K] in the matrix's dtype. start: where a tile begins."""
    assert start % TILE_ROWS == 0
    out = torch.empty(end - start, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    blocks = matrix.q.shape[1]
    _dequantize[(triton.cdiv(end - start, TILE_ROWS), blocks)](
        matrix.q, matrix.scale, matrix.second, out, start // TILE_ROWS, end - start, matrix.shape[1],
        len(matrix.scale), matrix.group_size, matrix.scale.shape[1], blocks,
        tile_rows=TILE_ROWS, run=matrix.run, bits=matrix.bits, kind=matrix.second_kind,
    )  # fmt: skip
    return out


def read_rows(matrix: GroupedTensor, ids: Tensor) -> Tensor:
    """Rows of a quantized matrix, dequantized: [R, K] in `matrix.dtype`. ids: numbers of the rows, int64 [R]."""
    out = torch.empty(len(ids), matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    if not len(ids):
        return out
    blocks = matrix.q.shape[1]
    _read_rows[(len(ids), blocks)](
        matrix.q, matrix.scale, matrix.second, ids, out, matrix.shape[1], len(matrix.scale), matrix.group_size,
        matrix.scale.shape[1], blocks, tile_rows=TILE_ROWS, run=matrix.run, bits=matrix.bits, kind=matrix.second_kind,
    )  # fmt: skip
    return out


def base_of(bits: int, dtype: torch.dtype) -> int:
    """What is added to a matrix's integers when they are unpacked for activations of this type."""
    return BASE if bits == 4 and dtype == torch.bfloat16 else 0


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """Type in which numbers of this dtype are multiplied. Triton's interpreter takes bfloat16 for integers there; in
    float32 the products are the same."""
    return tl.bfloat16 if dtype == torch.bfloat16 and not triton.knobs.runtime.interpret else tl.float32
