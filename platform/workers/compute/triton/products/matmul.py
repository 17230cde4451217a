"""Products with the matrices of `grouped`, by the packed matrix; and the matrix, or rows of it, dequantized.

A program computes a tile of outputs times rows. It reads chunks of the packed matrix as they lie, makes the integers
numbers in registers, which is where tensor cores take their first operand from, and multiplies them with activations
that come by way of shared memory. So of a matrix no byte goes through shared memory twice, and with few rows a product
takes as long as the matrix is read. With many it is read once for each tile of rows, all but the first time from the
GPU's cache: the grid's fastest axis goes through the tiles of rows, which read the same chunks at the same time.

Integers are multiplied as they are, less their zero point, and the sum of a run is scaled: sum of x * (q * scale +
offset) = scale * sum of x * q + offset * sum of x. In bfloat16 integers are made by their bits (`FOUR_BITS`,
`EIGHT_BITS`), and all of this is exact; sums are in float32.

Where a matrix has few outputs its columns are divided among programs, and the parts added in order. How that is cut
depends on the matrix and the bucket of rows (`tiling`), so equal steps give equal results.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.early import LINE_BYTES, begin_early, early, let_next_begin, prefetch, wait
from penstock.workers.compute.triton.products.grouped import (
    CHUNK_BYTES,
    THREAD_BYTES,
    THREADS,
    TILE_ROWS,
    GroupedTensor,
    chunk_columns,
)
from penstock.workers.compute.triton.products.tiling import Tile, bucket_of, part_blocks_of

BASE = 128
"""What is added to 4-bit integers that become numbers of bfloat16 by their bits alone."""
FOUR_BITS = tl.constexpr("""{
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
EIGHT_BITS = tl.constexpr("""{
    .reg .b32 rest, sign;
    and.b32 rest, $4, 0x7F7F7F7F;
    and.b32 sign, $4, 0x80808080;
    prmt.b32 $0, rest, 0x43434343, 0x4140;
    prmt.b32 $1, rest, 0x43434343, 0x4342;
    prmt.b32 $2, sign, 0x43434343, 0x4140;
    prmt.b32 $3, sign, 0x43434343, 0x4342;
}""")
"""Four int8 to 128 + their last seven bits, and to 128, or 256 where they are negative, both in bfloat16: the
difference is the integer."""
CHUNK = {"chunk_bytes": CHUNK_BYTES, "threads": THREADS, "thread_bytes": THREAD_BYTES, "line_bytes": LINE_BYTES}
"""Constants of `_multiply` that are the same for every matrix."""
MOST_RUNS = 4
"""Runs that are taken at a time, at most."""
SUM_LANES = 1024


@triton.jit
def halves_of(packed, base: tl.constexpr, operand: tl.constexpr):
    """Low and high halves of bytes, as integers or, with `base` added, as numbers of bfloat16."""
    if base == 0:
        low, high = packed & 15, packed >> 4
    elif operand == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            FOUR_BITS, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low = ((packed & 15).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        high = ((packed >> 4).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def wholes_of(packed, operand: tl.constexpr):
    """Bytes as the int8 that they are, in `operand`."""
    if operand == tl.bfloat16:
        rest, sign = tl.inline_asm_elementwise(
            EIGHT_BITS, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        return rest - sign
    return packed.to(tl.int8, bitcast=True).to(operand)


@triton.jit
def in_columns(values, outputs: tl.constexpr):
    """[outputs, 32] of values [2 * outputs, 16] that lie as a chunk's bytes."""
    split = tl.reshape(values, (outputs // 64, 4, 8, 4, 2, 2, 2, 2))  # tiles, w, r, c, j, i, h, p
    return tl.reshape(tl.permute(split, (0, 1, 6, 2, 4, 5, 3, 7)), (outputs, 32))


@triton.jit
def in_columns_of_both(low, high, outputs: tl.constexpr):
    """[outputs, 64] of the low and high halves [2 * outputs, 16] of a chunk's bytes."""
    split = tl.reshape(tl.join(low, high), (outputs // 64, 4, 8, 4, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(split, (0, 1, 6, 2, 8, 4, 5, 3, 7)), (outputs, 64))


@triton.jit
def _offset(scale, second, places, kind: tl.constexpr):
    if kind == "zero":
        return -tl.load(second + places).to(tl.float32) * scale
    if kind == "offset":
        return tl.load(second + places).to(tl.float32)
    return tl.zeros_like(scale)


@triton.jit
def _read_scales(
    scale, second, start, places, num_groups, group_size: tl.constexpr, num_outputs,
    width: tl.constexpr, run: tl.constexpr, base: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Scales of the runs of `width` columns and, as they are used, their zero points or offsets; `base` was added to
    the integers."""
    found, seconds = (), ()
    for index in tl.static_range(width // run):
        group = tl.minimum((start + index * run) // group_size, num_groups - 1) * num_outputs + places
        scales = tl.load(scale + group).to(tl.float32)
        found += (scales,)  # type: ignore[assignment]
        if kind == "zero":
            seconds += (tl.load(second + group).to(tl.float32) + base,)  # type: ignore[assignment]
        elif kind == "offset":
            seconds += (tl.load(second + group).to(tl.float32) - base * scales,)  # type: ignore[assignment]
    return found, seconds


@triton.jit
def _add_products(
    sums, products, weights, x, rows, num_rows, x_stride, start, columns, scales, seconds,
    at: tl.constexpr, span: tl.constexpr, run: tl.constexpr, is_whole: tl.constexpr, kind: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    """Sums and products [outputs, rows] when the products with weights [outputs, span] are added, whose first column is
    start + at: where a run begins, products begin anew, and where it ends they are scaled and added to the sums."""
    own: tl.constexpr = at // run
    lanes = start + at + tl.arange(0, span)
    is_real = (rows < num_rows)[:, None]
    if not is_whole:
        is_real &= (lanes < columns)[None, :]
    values = tl.load(x + rows[:, None] * x_stride + lanes[None, :], mask=is_real, other=0.0)
    weights = weights.to(operand)
    if kind == "zero":
        weights -= seconds[own].to(operand)[:, None]
    if at % run == 0:
        products = tl.zeros_like(sums)
    products = tl.dot(weights, tl.trans(values.to(operand)), products, input_precision="ieee")
    if kind == "offset":
        sums += seconds[own][:, None] * tl.sum(values.to(tl.float32), 1)[None, :]
    if (at + span) % run == 0:
        sums += products * scales[own][:, None]
    return sums, products


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _multiply(
    x, q, scale, second, out, num_rows, x_stride, columns, num_groups, num_outputs, num_tiles, num_blocks, part_blocks,
    out_columns, row_lanes: tl.constexpr, output_lanes: tl.constexpr, chunk_bytes: tl.constexpr,
    threads: tl.constexpr, thread_bytes: tl.constexpr, line_bytes: tl.constexpr, group_size: tl.constexpr,
    width: tl.constexpr, run: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, base: tl.constexpr,
    operand: tl.constexpr, is_whole: tl.constexpr, is_early: tl.constexpr,
):  # fmt: skip
    let_next_begin(is_early)
    part = tl.program_id(2)
    rows = tl.program_id(0) * row_lanes + tl.arange(0, row_lanes)
    outputs = tl.program_id(1) * output_lanes + tl.arange(0, output_lanes)
    # tiles that are not there repeat the last one: read like others, and not stored
    places = tl.minimum(outputs, num_outputs - 1)
    members = tl.program_id(1) * (output_lanes * 2) + tl.arange(0, output_lanes * 2)
    tiles = tl.minimum(members // threads, num_tiles - 1)
    chunks: tl.constexpr = width * bits // 256  # of `width` columns: 64 in 4 bits, 32 in 8
    span: tl.constexpr = 256 // bits if run * bits >= 256 else 32
    bytes_of_chunk = (
        q
        + (tiles.to(tl.int64) * num_blocks * (chunks * chunk_bytes) + members % threads * thread_bytes)[:, None]
        + tl.arange(0, thread_bytes)[None, :]
    )
    sums = tl.zeros((output_lanes, row_lanes), tl.float32)
    products = sums
    first = part * part_blocks
    if is_early:  # the first of what this program reads comes nearer while it waits
        end = num_tiles.to(tl.int64) * num_blocks * (chunks * chunk_bytes) - line_bytes
        own = (tiles.to(tl.int64) * num_blocks + first) * (chunks * chunk_bytes) + members % threads * line_bytes
        prefetch(q + tl.minimum(own, end))
    # what a model is loaded with was written long before: `lay_out_groups` waits for it
    scales, seconds = _read_scales(
        scale, second, first * width, places, num_groups, group_size, num_outputs, width, run, base, kind
    )  # fmt: skip
    wait(is_early)
    for block in range(first, tl.minimum(first + part_blocks, num_blocks)):
        start = block * width
        # scales are read before they are used, because what is read of them is too little to be pipelined
        next_scales, next_seconds = _read_scales(
            scale, second, start + width, places, num_groups, group_size, num_outputs, width, run, base, kind
        )  # fmt: skip
        for chunk in tl.static_range(chunks):
            packed = tl.load(bytes_of_chunk + (block * chunks + chunk) * chunk_bytes)
            for half in tl.static_range(256 // bits // span):
                if bits == 8:
                    weights = in_columns(wholes_of(packed, operand), output_lanes)
                else:
                    low, high = halves_of(packed, base, operand)
                    if span == 64:
                        weights = in_columns_of_both(low, high, output_lanes)
                    elif half == 0:
                        weights = in_columns(low, output_lanes)
                    else:
                        weights = in_columns(high, output_lanes)
                sums, products = _add_products(
                    sums, products, weights, x, rows, num_rows, x_stride, start, columns, scales, seconds,
                    chunk * (256 // bits) + half * span, span, run, is_whole, kind, operand,
                )  # fmt: skip
        scales, seconds = next_scales, next_seconds
    target = out + (part * num_rows + rows).to(tl.int64)[None, :] * out_columns + outputs[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(outputs < out_columns)[:, None] & (rows < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _sum_parts(parts, out, num_rows, columns, num_parts, lanes: tl.constexpr, is_early: tl.constexpr):
    begin_early(is_early)
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * lanes + tl.arange(0, lanes)
    is_real = places < columns
    total = tl.zeros((lanes,), tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + (part * num_rows + row) * columns + places, mask=is_real, other=0.0)
    tl.store(out + row * columns + places, total.to(out.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _read_rows(
    q, scale, second, ids, out, columns, num_groups, group_size, num_outputs, num_chunks, tile_rows: tl.constexpr,
    chunk_bytes: tl.constexpr, width: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place)
    lanes = tl.program_id(1) * width + tl.arange(0, width)
    chunk = row // tile_rows * num_chunks + lanes // (256 // bits)
    # where the docstring of `grouped` says that the element lies
    within = lanes % 32
    thread = row % tile_rows // 16 * 32 + row % 8 * 4 + within % 8 // 2
    byte = within // 8 * 4 + row // 8 % 2 * 2 + within % 2
    packed = tl.load(q + chunk * chunk_bytes + thread * 16 + byte)
    groups = tl.minimum(lanes // group_size, num_groups - 1) * num_outputs + row
    scales = tl.load(scale + groups).to(tl.float32)
    half = packed >> (lanes % 64 // 32 * 4).to(tl.uint8) & 15
    integers = half if bits == 4 else packed.to(tl.int8, bitcast=True)
    weights = integers.to(tl.float32) * scales + _offset(scales, second, groups, kind)
    tl.store(out + place * columns + lanes, weights.to(out.dtype.element_ty), mask=lanes < columns)


@triton.jit(do_not_specialize=["first_tile", "num_rows"])
def _dequantize(
    q, scale, second, out, first_tile, num_rows, columns, num_groups, group_size, num_outputs, num_chunks,
    tile_rows: tl.constexpr, chunk_bytes: tl.constexpr, thread_bytes: tl.constexpr, run: tl.constexpr,
    bits: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    tile = first_tile + tl.program_id(0)
    chunk = tl.program_id(1)
    within = tl.arange(0, 2 * tile_rows)[:, None] * thread_bytes + tl.arange(0, thread_bytes)[None, :]
    packed = tl.load(q + (tile.to(tl.int64) * num_chunks + chunk) * chunk_bytes + within)
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    places = tile * tile_rows + tl.arange(0, tile_rows)
    span: tl.constexpr = 256 // bits if run * bits >= 256 else 32
    for half in tl.static_range(256 // bits // span):
        if bits == 8:
            integers = in_columns(packed.to(tl.int8, bitcast=True), tile_rows)
        elif span == 64:
            integers = in_columns_of_both(packed & 15, packed >> 4, tile_rows)
        elif half == 0:
            integers = in_columns(packed & 15, tile_rows)
        else:
            integers = in_columns(packed >> 4, tile_rows)
        start = chunk * (256 // bits) + half * span
        lanes = start + tl.arange(0, span)
        groups = tl.minimum(start // group_size, num_groups - 1) * num_outputs + places
        scales = tl.load(scale + groups).to(tl.float32)
        weights = integers.to(tl.float32) * scales[:, None] + _offset(scales, second, groups, kind)[:, None]
        target = out + rows.to(tl.int64)[:, None] * columns + lanes[None, :]
        tl.store(target, weights.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & (lanes < columns)[None, :])


def multiply(x: Tensor, matrix: GroupedTensor, tile: Tile, *, keeps_parts: bool = False) -> Tensor:
    """x [T, K] times the transpose: [T, N] in x's dtype, T up to `tiling.TILED_ROWS`. keeps_parts: where columns are
    cut into several parts, their products instead, float32 [P, T, N], to be added in order."""
    num_rows, (num_outputs, columns) = len(x), matrix.shape
    bucket = bucket_of(num_rows)
    assert x.shape[1] == columns
    assert bucket is not None
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    width = width_of(tile, matrix)
    num_blocks = matrix.num_chunks * chunk_columns(matrix.bits) // width
    part_blocks = part_blocks_of(tile, bucket, matrix.num_tiles * TILE_ROWS, num_blocks, width)
    num_parts = triton.cdiv(num_blocks, part_blocks)
    parts = out if num_parts == 1 else x.new_empty(num_parts, num_rows, num_outputs, dtype=torch.float32)
    _multiply[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs), num_parts)](
        x, matrix.q, matrix.scale, matrix.second, parts, num_rows, x.stride(0), columns, len(matrix.scale),
        matrix.scale.shape[1], matrix.num_tiles, num_blocks, part_blocks, num_outputs,
        row_lanes=tile.rows, output_lanes=tile.outputs, **CHUNK, group_size=matrix.group_size, width=width,
        run=matrix.run, bits=matrix.bits, kind=matrix.second_kind, base=base_of(matrix.bits, x.dtype),
        operand=operand_type(x.dtype), is_whole=columns % width == 0, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **early(x),
    )  # fmt: skip
    return parts if num_parts == 1 or keeps_parts else sum_parts(parts, out)


def width_of(tile: Tile, matrix: GroupedTensor) -> int:
    """Columns that a program takes at a time."""
    is_fitting = matrix.num_chunks * chunk_columns(matrix.bits) % tile.columns == 0
    return tile.columns if is_fitting and tile.columns <= MOST_RUNS * matrix.run else matrix.width


def sum_parts(parts: Tensor, out: Tensor) -> Tensor:
    """The sum of parts [P, T, N], float32, in order, in out [T, N]."""
    num_parts, num_rows, columns = parts.shape
    _sum_parts[(num_rows, triton.cdiv(columns, SUM_LANES))](
        parts, out, num_rows, columns, num_parts, lanes=SUM_LANES, **early(out)
    )
    return out


def dequantize(matrix: GroupedTensor, start: int, end: int) -> Tensor:
    """Rows [start, end): [end - start, K] in the matrix's dtype. start: where a tile begins."""
    assert start % TILE_ROWS == 0
    out = torch.empty(end - start, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    chunks = triton.cdiv(matrix.shape[1], chunk_columns(matrix.bits))
    _dequantize[(triton.cdiv(end - start, TILE_ROWS), chunks)](
        matrix.q, matrix.scale, matrix.second, out, start // TILE_ROWS, end - start, matrix.shape[1],
        len(matrix.scale), matrix.group_size, matrix.scale.shape[1], matrix.num_chunks,
        tile_rows=TILE_ROWS, chunk_bytes=CHUNK_BYTES, thread_bytes=THREAD_BYTES, run=matrix.run, bits=matrix.bits,
        kind=matrix.second_kind,
    )  # fmt: skip
    return out


def read_rows(matrix: GroupedTensor, ids: Tensor) -> Tensor:
    """Rows of a quantized matrix, dequantized: [R, K] in `matrix.dtype`. ids: numbers of the rows, int64 [R]."""
    out = torch.empty(len(ids), matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    if not len(ids):
        return out
    _read_rows[(len(ids), triton.cdiv(matrix.shape[1], matrix.width))](
        matrix.q, matrix.scale, matrix.second, ids, out, matrix.shape[1], len(matrix.scale), matrix.group_size,
        matrix.scale.shape[1], matrix.num_chunks, tile_rows=TILE_ROWS, chunk_bytes=CHUNK_BYTES, width=matrix.width,
        bits=matrix.bits, kind=matrix.second_kind,
    )  # fmt: skip
    return out


def base_of(bits: int, dtype: torch.dtype) -> int:
    """What is added to a matrix's integers when they are unpacked for activations of this type."""
    return BASE if bits == 4 and dtype == torch.bfloat16 else 0


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """Type in which numbers of this dtype are multiplied. Triton's interpreter takes bfloat16 for integers there; in
    float32 the products are the same."""
    return tl.bfloat16 if dtype == torch.bfloat16 and not triton.knobs.runtime.interpret else tl.float32
