"""LoRA's two small products on a GPU, each for all adapters of a step in one launch: shrink x A^T, expand onto B^T,
added to the base's output.

Rows are grouped by adapter (SGMV: Chen et al. 2023, Punica, arXiv 2310.18547; ranks that differ: Sheng et al. 2023,
S-LoRA, arXiv 2311.03285). A program takes some rows of one adapter and learns from its table where the matrices lie and
what their rank is; one of a tile that has none ends at once, so a recorded step may have as many tiles as it could need
(`recordings`). With few rows shrink has few programs and long sums, so the columns are cut into parts, which expand
adds, in order. How they are cut depends on the model alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.products.matmul import operand_type
from penstock.workers.compute.triton.segments import FIELDS, PARTS, Segments

RANK_LANES = 16
TILE_COLUMNS = 128
SPLIT_COLUMNS = 1024
"""Columns that one program of a shrink sums up."""
TILE_OUTPUTS = 64


@triton.jit(do_not_specialize=["place", "num_rows", "max_rank"])
def _shrink(
    x, rows, tiles, tables, inner, place, table_stride, x_stride, columns, num_rows, max_rank,
    row_lanes: tl.constexpr, rank_lanes: tl.constexpr, tile_columns: tl.constexpr, split_columns: tl.constexpr,
    fields: tl.constexpr, element: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * 3
    count = tl.load(tile + 2)
    if count == 0:
        return
    split = tl.program_id(2)
    entry = tables + tl.load(tile).to(tl.int64) * table_stride + place * fields
    ranks = tl.program_id(1) * rank_lanes + tl.arange(0, rank_lanes)
    rank = tl.load(entry + 1)
    if tl.program_id(1) * rank_lanes >= rank:
        return
    a = tl.load(entry).to(tl.pointer_type(element))
    members = tl.arange(0, row_lanes)
    is_row = members < count
    places = tl.load(tile + 1) + members
    tokens = tl.load(rows + places, mask=is_row, other=0)
    sums = tl.zeros((row_lanes, rank_lanes), tl.float32)
    for start in range(split * split_columns, tl.minimum((split + 1) * split_columns, columns), tile_columns):
        lanes = start + tl.arange(0, tile_columns)
        is_column = (lanes < columns)[None, :]
        values = tl.load(x + tokens[:, None] * x_stride + lanes[None, :], mask=is_row[:, None] & is_column, other=0.0)
        weights = tl.load(
            a + ranks[:, None] * columns + lanes[None, :], mask=(ranks < rank)[:, None] & is_column, other=0.0
        )
        sums += tl.dot(values.to(operand), tl.trans(weights.to(operand)), input_precision="ieee")
    target = inner + (split * num_rows + places).to(tl.int64)[:, None] * max_rank + ranks[None, :]
    tl.store(target, sums, mask=is_row[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["place", "num_rows", "max_rank"])
def _expand(
    inner, rows, tiles, tables, out, place, table_stride, out_stride, num_outputs, num_rows, max_rank, num_splits,
    row_lanes: tl.constexpr, rank_lanes: tl.constexpr, tile_outputs: tl.constexpr, fields: tl.constexpr,
    parts: tl.constexpr, element: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * 3
    count = tl.load(tile + 2)
    if count == 0:
        return
    entry = tables + tl.load(tile).to(tl.int64) * table_stride + place * fields
    if tl.load(entry + 1) == 0:
        return
    first = tl.program_id(1) * tile_outputs
    outputs = first + tl.arange(0, tile_outputs)
    members = tl.arange(0, row_lanes)
    is_row = members < count
    places = tl.load(tile + 1) + members
    sums = tl.zeros((row_lanes, tile_outputs), tl.float32)
    for part in range(parts):
        field = entry + 2 + part * 5
        start = tl.load(field)
        end = tl.load(field + 1)
        b = tl.load(field + 2).to(tl.pointer_type(element))
        begin = tl.load(field + 3)
        rank = tl.load(field + 4)
        if (start < first + tile_outputs) & (end > first):
            is_own = (outputs >= start) & (outputs < end)
            for step in range(0, rank, rank_lanes):
                ranks = step + tl.arange(0, rank_lanes)
                is_rank = (ranks < rank)[None, :]
                low = tl.zeros((row_lanes, rank_lanes), tl.float32)
                for split in range(num_splits):
                    source = (
                        inner + (split * num_rows + places).to(tl.int64)[:, None] * max_rank + (begin + ranks)[None, :]
                    )
                    low += tl.load(source, mask=is_row[:, None] & is_rank, other=0.0)
                weights = tl.load(
                    b + (outputs - start)[:, None] * rank + ranks[None, :], mask=is_own[:, None] & is_rank, other=0.0
                )
                sums += tl.dot(low.to(operand), tl.trans(weights.to(operand)), input_precision="ieee")
    tokens = tl.load(rows + places, mask=is_row, other=0)
    target = out + tokens[:, None] * out_stride + outputs[None, :]
    is_real = is_row[:, None] & (outputs < num_outputs)[None, :]
    tl.store(
        target, (tl.load(target, mask=is_real, other=0.0).to(tl.float32) + sums).to(out.dtype.element_ty), mask=is_real
    )


def add_low_rank(out: Tensor, x: Tensor, segments: Segments, layer: int, matrix: int) -> None:
    """Add to out [T, N] what the step's adapters add to a matrix, given its input x [T, K], of the adapters' dtype.
    matrix: its place in their tables."""
    assert out.stride(1) == x.stride(1) == 1
    num_rows, num_tiles, columns = len(segments.rows), len(segments.tiles), x.shape[1]
    num_splits = triton.cdiv(columns, SPLIT_COLUMNS)
    inner = torch.empty(num_splits, num_rows, segments.max_rank, dtype=torch.float32, device=x.device)
    place = layer * segments.tables.shape[2] + matrix
    element = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[x.dtype]
    _shrink[(num_tiles, triton.cdiv(segments.max_rank, RANK_LANES), num_splits)](
        x, segments.rows, segments.tiles, segments.tables, inner, place, segments.tables.stride(0), x.stride(0),
        columns, num_rows, segments.max_rank, row_lanes=segments.tile_rows, rank_lanes=RANK_LANES,
        tile_columns=TILE_COLUMNS, split_columns=SPLIT_COLUMNS, fields=FIELDS, element=element,
        operand=operand_type(x.dtype),
    )  # fmt: skip
    _expand[(num_tiles, triton.cdiv(out.shape[1], TILE_OUTPUTS))](
        inner, segments.rows, segments.tiles, segments.tables, out, place, segments.tables.stride(0), out.stride(0),
        out.shape[1], num_rows, segments.max_rank, num_splits, row_lanes=segments.tile_rows, rank_lanes=RANK_LANES,
        tile_outputs=TILE_OUTPUTS, fields=FIELDS, parts=PARTS, element=element, operand=operand_type(x.dtype),
    )  # fmt: skip
