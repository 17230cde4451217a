"""Products with the matrices of `grouped`: few rows of activations by the packed matrix, and the matrix, or rows of it,
dequantized.

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

from penstock.workers.compute.triton.grouped import TILE_ROWS, GroupedTensor

LEAST_LANES = 16
"""Size of a matrix product in each dimension, at least."""
PROGRAMS = 384
"""Programs that keep a GPU of about 130 multiprocessors busy."""
LEAST_BLOCKS = 4
"""Blocks of a row that one program reads, at least, where the row has as many."""
SUM_LANES = 1024
STAGES = 4
"""Tiles that are loaded for a program ahead of their use."""


@triton.jit
def _offset(scale, second, places, kind: tl.constexpr):
    if kind == "zero":
        return -tl.load(second + places).to(tl.float32) * scale
    if kind == "offset":
        return tl.load(second + places).to(tl.float32)
    return tl.zeros_like(scale)


@triton.jit
def _add_run(
    sums, x, q, scale, second, rows, num_rows, x_stride, start, columns, places, num_groups, group_size, num_outputs,
    run: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """Sums [rows, outputs], with the products with one run, q [outputs, run], added."""
    lanes = start + tl.arange(0, run)
    values = tl.load(
        x + rows[:, None] * x_stride + lanes[None, :],
        mask=(rows < num_rows)[:, None] & (lanes < columns)[None, :],
        other=0.0,
    )
    group = tl.minimum(start // group_size, num_groups - 1) * num_outputs
    scales = tl.load(scale + group + places).to(tl.float32)
    offsets = _offset(scales, second, group + places, kind)
    if bits == 4 and values.dtype == tl.bfloat16:
        weights = (q.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        offsets -= 128.0 * scales
    else:
        weights = q.to(operand)
    products = tl.dot(values.to(operand), tl.trans(weights.to(operand)), input_precision="ieee")
    sums += products * scales[None, :]
    if bits == 4:
        sums += tl.sum(values.to(tl.float32), 1)[:, None] * offsets[None, :]
    return sums


@triton.jit
def _multiply(
    x, q, scale, second, out, num_rows, x_stride, columns, num_groups, group_size, num_outputs, num_blocks, part_blocks,
    out_columns, row_lanes: tl.constexpr, tile_rows: tl.constexpr, run: tl.constexpr, bits: tl.constexpr,
    kind: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tl.arange(0, row_lanes)
    places = tile * tile_rows + tl.arange(0, tile_rows)
    within = tl.arange(0, tile_rows)[:, None] * run + tl.arange(0, run)[None, :]
    first = part * part_blocks
    sums = tl.zeros((row_lanes, tile_rows), tl.float32)
    for block in range(first, tl.minimum(first + part_blocks, num_blocks)):
        packed = tl.load(q + (tile.to(tl.int64) * num_blocks + block) * (tile_rows * run) + within)
        if bits == 4:
            start = block * 2 * run
            sums = _add_run(
                sums, x, packed & 15, scale, second, rows, num_rows, x_stride, start, columns, places, num_groups,
                group_size, num_outputs, run, bits, kind, operand,
            )  # fmt: skip
            sums = _add_run(
                sums, x, packed >> 4, scale, second, rows, num_rows, x_stride, start + run, columns, places, num_groups,
                group_size, num_outputs, run, bits, kind, operand,
            )  # fmt: skip
        else:
            sums = _add_run(
                sums, x, packed.to(tl.int8, bitcast=True), scale, second, rows, num_rows, x_stride, block * run,
                columns, places, num_groups, group_size, num_outputs, run, bits, kind, operand,
            )  # fmt: skip
    target = out + (part * num_rows + rows).to(tl.int64)[:, None] * out_columns + places[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & (places < out_columns)[None, :])


@triton.jit
def _sum_parts(parts, out, size, num_parts, lanes: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    is_real = places < size
    total = tl.zeros((lanes,), tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + part * size + places, mask=is_real, other=0.0)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_real)


@triton.jit
def _store_run(q, scale, second, out, place, start, columns, group, run: tl.constexpr, kind: tl.constexpr):
    """Dequantize one row's run and store it. place: where its scale lies."""
    lanes = start + tl.arange(0, run)
    scales = tl.load(scale + group + place).to(tl.float32)
    weights = q.to(tl.float32) * scales + _offset(scales, second, group + place, kind)
    tl.store(out + lanes, weights.to(out.dtype.element_ty), mask=lanes < columns)


@triton.jit
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


@triton.jit
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
            packed.to(tl.int8, bitcast=True),
            scale,
            second,
            out,
            rows,
            places,
            num_rows,
            start,
            columns,
            group,
            run,
            kind,
        )


def multiply(x: Tensor, matrix: GroupedTensor, *, keeps_parts: bool = False) -> Tensor:
    """x [T, K] times the transpose: [T, N] in x's dtype, T not more than a few dozen. keeps_parts: where columns are
    cut into several parts, their products instead, float32 [P, T, N], to be added in order."""
    num_rows, (num_outputs, columns) = len(x), matrix.shape
    assert x.shape[1] == columns
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles, blocks = matrix.q.shape[:2]
    part_blocks = _part_blocks(tiles, blocks)
    num_parts = triton.cdiv(blocks, part_blocks)
    parts = (
        out if num_parts == 1 else torch.empty(num_parts, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    )
    _multiply[(tiles, num_parts)](
        x, matrix.q, matrix.scale, matrix.second, parts, num_rows, x.stride(0), columns, len(matrix.scale),
        matrix.group_size, matrix.scale.shape[1], blocks, part_blocks, num_outputs,
        row_lanes=max(LEAST_LANES, triton.next_power_of_2(num_rows)), tile_rows=TILE_ROWS, run=matrix.run,
        bits=matrix.bits, kind=matrix.second_kind, operand=operand_type(x.dtype), num_stages=STAGES,
    )  # fmt: skip
    if num_parts == 1:
        return out
    if keeps_parts:
        return parts
    _sum_parts[(triton.cdiv(out.numel(), SUM_LANES),)](parts, out, out.numel(), num_parts, lanes=SUM_LANES)
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


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """Type in which numbers of this dtype are multiplied. Triton's interpreter takes bfloat16 for integers there; in
    float32 the products are the same."""
    return tl.bfloat16 if dtype == torch.bfloat16 and not triton.knobs.runtime.interpret else tl.float32


def _part_blocks(tiles: int, blocks: int) -> int:
    """Blocks of a row that one program takes."""
    wanted = -(-PROGRAMS // tiles)
    return min(blocks, max(LEAST_BLOCKS, -(-blocks // wanted)))
