"""Products of some hundred rows of activations with the matrices of `grouped`, without a dequantized copy of them.

A program computes a tile of outputs times rows: it reads a block of the packed matrix and the activations' columns of
it, makes the integers numbers in registers, which is where tensor cores of compute capability 9.0 take their first
operand from, and adds up the block's products, scaled a run at a time. So the matrix is read once for each tile of
rows, all but the first time from the GPU's cache: the grid's fastest axis goes through the tiles of rows, which read
the same block at the same time.

Integers are multiplied as they are, less their zero point: in bfloat16 all of this is exact, and sums are in float32.
Where a matrix has few outputs its columns are divided among programs, and the parts added in order. How that is cut
depends on the matrix and the bucket of rows (`tiling`), so equal steps give equal results.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.products.grouped import TILE_ROWS, GroupedTensor
from penstock.workers.compute.triton.products.matmul import base_of, operand_type, sum_parts, unpack
from penstock.workers.compute.triton.products.tiling import Tile, bucket_of, part_blocks_of


@triton.jit
def _read_scales(
    scale, second, start, places, num_groups, group_size, num_outputs, base: tl.constexpr, kind: tl.constexpr
):
    """Scales of a run and, as they are used, its zero points or offsets; `base` was added to the integers."""
    group = tl.minimum(start // group_size, num_groups - 1) * num_outputs + places
    scales = tl.load(scale + group).to(tl.float32)
    if kind == "none":
        return scales, -base * scales
    seconds = tl.load(second + group).to(tl.float32)
    return scales, seconds + base if kind == "zero" else seconds - base * scales


@triton.jit
def _add_products(
    sums, x, q, scales, seconds, rows, x_stride, start, columns,
    run: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """Sums [outputs, rows], with the products with one run, q [outputs, run], added."""
    lanes = start + tl.arange(0, run)
    values = tl.load(x + rows[:, None] * x_stride + lanes[None, :], mask=(lanes < columns)[None, :], other=0.0)
    weights = q.to(operand)
    if kind == "zero":
        weights -= seconds.to(operand)[:, None]
    products = tl.dot(weights, tl.trans(values.to(operand)), input_precision="ieee")
    sums += products * scales[:, None]
    if bits == 4 and kind != "zero":
        sums += seconds[:, None] * tl.sum(values.to(tl.float32), 1)[None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_tiles(
    x, q, scale, second, out, num_rows, x_stride, columns, num_groups, group_size, num_outputs, num_tiles, num_blocks,
    part_blocks, out_columns, row_lanes: tl.constexpr, output_lanes: tl.constexpr, tile_rows: tl.constexpr,
    run: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, base: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2)
    members = tl.program_id(0) * row_lanes + tl.arange(0, row_lanes)
    # rows and tiles that are not there repeat the last ones: read like others, and not stored
    rows = tl.minimum(members, num_rows - 1)
    lanes = tl.arange(0, output_lanes)
    outputs = tl.program_id(1) * output_lanes + lanes
    tiles = tl.minimum(outputs // tile_rows, num_tiles - 1)
    within = lanes % tile_rows
    packed_rows = q + (tiles.to(tl.int64) * num_blocks * tile_rows + within)[:, None] * run + tl.arange(0, run)[None, :]
    places = tiles * tile_rows + within
    width: tl.constexpr = 2 * run if bits == 4 else run
    sums = tl.zeros((output_lanes, row_lanes), tl.float32)
    first = part * part_blocks
    scales, seconds = _read_scales(
        scale, second, first * width, places, num_groups, group_size, num_outputs, base, kind
    )  # fmt: skip
    for block in range(first, tl.minimum(first + part_blocks, num_blocks)):
        start = block * width
        packed = tl.load(packed_rows + block * (tile_rows * run))
        # scales are read a run before they are used, because what is read of them is too little to be pipelined
        next_scales, next_seconds = _read_scales(
            scale, second, start + run, places, num_groups, group_size, num_outputs, base, kind
        )  # fmt: skip
        if bits == 4:
            low, high = unpack(packed, base, operand)
            sums = _add_products(
                sums, x, low, scales, seconds, rows, x_stride, start, columns, run, bits, kind, operand
            )  # fmt: skip
            scales, seconds = _read_scales(
                scale, second, start + width, places, num_groups, group_size, num_outputs, base, kind
            )  # fmt: skip
            sums = _add_products(
                sums, x, high, next_scales, next_seconds, rows, x_stride, start + run, columns, run, bits, kind, operand
            )  # fmt: skip
        else:
            sums = _add_products(
                sums, x, packed.to(tl.int8, bitcast=True), scales, seconds, rows, x_stride, start, columns, run, bits,
                kind, operand,
            )  # fmt: skip
            scales, seconds = next_scales, next_seconds
    target = out + (part * num_rows + members).to(tl.int64)[None, :] * out_columns + outputs[:, None]
    is_real = (outputs < out_columns)[:, None] & (members < num_rows)[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_real)


def multiply_tiles(x: Tensor, matrix: GroupedTensor, tile: Tile, *, keeps_parts: bool = False) -> Tensor:
    """x [T, K] times the transpose: [T, N] in x's dtype, T up to `tiling.TILED_ROWS`. tile: one of
    `tiling.tiles_of`. keeps_parts: as of `matmul.multiply`."""
    num_rows, (num_outputs, columns) = len(x), matrix.shape
    assert x.shape[1] == columns
    bucket = bucket_of(num_rows)
    assert bucket is not None
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles, blocks = matrix.q.shape[:2]
    part_blocks = part_blocks_of(tile, bucket, num_outputs, blocks)
    num_parts = triton.cdiv(blocks, part_blocks)
    parts = out if num_parts == 1 else x.new_empty(num_parts, num_rows, num_outputs, dtype=torch.float32)
    _multiply_tiles[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs), num_parts)](
        x, matrix.q, matrix.scale, matrix.second, parts, num_rows, x.stride(0), columns, len(matrix.scale),
        matrix.group_size, matrix.scale.shape[1], tiles, blocks, part_blocks, num_outputs,
        row_lanes=tile.rows, output_lanes=tile.outputs, tile_rows=TILE_ROWS, run=matrix.run, bits=matrix.bits,
        kind=matrix.second_kind, base=base_of(matrix.bits, x.dtype),
        operand=operand_type(x.dtype), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return parts if num_parts == 1 or keeps_parts else sum_parts(parts, out)
