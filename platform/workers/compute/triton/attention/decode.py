"""Paged attention of single queries and of short runs of them: split-KV (Flash-Decoding, Dao et al. 2023), then a
reduction over the splits.

A program takes one query, or a run of them from one sequence, with the group of query heads that share a key/value head
(see `attention_tile`), and parts of the context, each in tiles. It leaves each part's normalized result and the
logarithm of its sum of weights; the second kernel weighs the parts by these. A part is SPLIT_TOKENS, or more where
there would be more than MAX_SPLITS of them: so a launch need not know how long the contexts are, only how long they may
be. With few queries each part has a program of its own; with many a program takes every second part, or every third,
and so on: parts stay what they are, so results do, and no program is started for nothing.

Invariants: a slot behind what a query sees is never read, and a query that sees nothing gets zeros. Where a context is
split depends on its length alone, and single queries are never compiled together with runs, so that a query's result
does not depend on its company: a single one's not on anything, a run's only on how its sequence's new tokens are cut.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.attention.plan import FEW_TOKENS, Rows, Tiles
from penstock.workers.compute.triton.attention.store import in_bytes
from penstock.workers.compute.triton.attention.tile import (
    LEAST_LANES,
    absorb,
    begin,
    heads_of_a_token,
    number_bytes,
    places_of,
    tile_constants,
)
from penstock.workers.compute.triton.early import begin_early, early

SPLIT_TOKENS = 128
"""Two tiles. With 4 heads of 128 numbers a part's result is 2 KiB to write and to read again, its keys and values are
64."""
MAX_SPLITS = 32
SPLIT_STEP = 64
"""Longer parts are multiples of it; tiles divide it."""
ROW_LANES = 64
"""Rows of a program, at most: a run of more has several."""
ROW_BYTES = 2**15
"""Bytes of the queries of a program, at most: so that they fit into 99 KiB beside keys, values and results."""
PROGRAMS = 4096
"""Programs of a launch, about: ten for each place that some 130 multiprocessors have, so that the last ones to end keep
few others waiting."""
NUM_WARPS = 4


@triton.jit
def _split_size(context, split_tokens: tl.constexpr, max_splits: tl.constexpr, split_step: tl.constexpr):
    share = (context + max_splits - 1) // max_splits
    return tl.maximum(split_tokens, (share + split_step - 1) // split_step * split_step)


@triton.jit(
    do_not_specialize=["q_heads", "table_stride", "num_kv_heads", "num_splits"],
    do_not_specialize_on_alignment=["tokens", "owners", "visible", "counts", "places"],
)
def _attend_split(
    q, k_cache, v_cache, k_scales, v_scales, tables, tokens, owners, visible, counts, places, parts, weights,
    q_heads, table_stride, num_kv_heads, num_splits, scale, is_single: tl.constexpr, row_lanes: tl.constexpr,
    tile_tokens: tl.constexpr, split_tokens: tl.constexpr, max_splits: tl.constexpr, split_step: tl.constexpr,
    group: tl.constexpr, block_size: tl.constexpr, head_dim: tl.constexpr, dim_lanes: tl.constexpr,
    operand: tl.constexpr, value_operand: tl.constexpr, precision: tl.constexpr, is_scaled: tl.constexpr,
    is_early: tl.constexpr,
):  # fmt: skip
    begin_early(is_early)
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) % num_kv_heads
    first_row = tl.program_id(1) // num_kv_heads * row_lanes
    if is_single:
        count = 1
        place = tile
    else:
        count = tl.load(counts + tile)
        place = tl.load(places + tile)
    if first_row >= count * group:
        return
    context = tl.load(visible + tile)
    size = _split_size(context, split_tokens, max_splits, split_step)
    token = tl.load(tokens + tile)
    table = tables + tl.load(owners + tile).to(tl.int64) * table_stride
    rows = first_row + tl.arange(0, row_lanes)
    seen = context - count + 1 + rows // group

    places_read, is_query = places_of(rows, token, count, kv_head, q_heads, group, head_dim, dim_lanes)
    queries = tl.load(q + places_read, mask=is_query, other=0.0).to(operand)
    num_heads = num_kv_heads * group
    heads = (place.to(tl.int64) + rows // group) * num_heads + kv_head * group + rows % group
    dims = tl.arange(0, dim_lanes)
    for split in range(tl.program_id(2), (context + size - 1) // size, tl.num_programs(2)):
        first = split * size
        last = tl.minimum(first + size, context)
        best, total, result = begin(row_lanes, dim_lanes)
        for start in range(first, last, tile_tokens):
            best, total, result = absorb(
                best, total, result, queries, k_cache, v_cache, k_scales, v_scales, table, start, last, seen, kv_head,
                num_kv_heads, scale, block_size, head_dim, dim_lanes, tile_tokens, operand, value_operand, precision,
                is_scaled, False,
            )  # fmt: skip
        # an early query of a run may see nothing of a part
        total = tl.where(total > 0, total, 1.0)
        part = heads * num_splits + split
        tl.store(parts + part[:, None] * head_dim + dims[None, :], result / total[:, None], mask=is_query)
        tl.store(weights + part, best + tl.log2(total), mask=rows < count * group)


@triton.jit(
    do_not_specialize=["out_heads", "num_heads", "num_splits"],
    do_not_specialize_on_alignment=["tokens", "visible", "counts", "places"],
)
def _reduce(
    parts, weights, tokens, visible, counts, places, out, out_heads, num_heads, num_splits, is_single: tl.constexpr,
    head_dim: tl.constexpr, dim_lanes: tl.constexpr, split_tokens: tl.constexpr, max_splits: tl.constexpr,
    split_step: tl.constexpr, is_early: tl.constexpr,
):  # fmt: skip
    begin_early(is_early)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    query = tl.program_id(2)
    if is_single:
        place = tile
    else:
        if query >= tl.load(counts + tile):
            return
        place = tl.load(places + tile)
    context = tl.load(visible + tile)
    size = _split_size(context, split_tokens, max_splits, split_step)
    dims = tl.arange(0, dim_lanes)
    splits = tl.arange(0, max_splits)
    is_part = splits < (context + size - 1) // size
    part = ((place.to(tl.int64) + query) * num_heads + head) * num_splits + splits
    weight = tl.load(weights + part, mask=is_part, other=-1.0e30)
    shares = tl.where(is_part, tl.exp2(weight - tl.max(weight, 0)), 0.0)
    found = tl.load(
        parts + part[:, None] * head_dim + dims[None, :], mask=is_part[:, None] & (dims < head_dim)[None, :], other=0.0
    )
    total = tl.sum(shares, 0)
    result = tl.sum(found * shares[:, None], 0) / tl.where(total > 0, total, 1.0)
    target = ((tl.load(tokens + tile).to(tl.int64) + query) * out_heads + head) * head_dim
    tl.store(out + target + dims, result.to(out.dtype.element_ty), mask=dims < head_dim)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    rows: Rows | Tiles,
    scale: float,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Attention of the queries `rows` of q [T, num_heads, head_dim] over the cache, into the same rows of out, of q's
    shape. Tiles have FEW_TOKENS queries at most.

    Heads of a token lie side by side in q and out, the caches [num_blocks, num_kv_heads, block_size, head_dim] are
    contiguous. scales: see `store`.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    group, num_tiles = num_heads // num_kv_heads, len(rows.tokens)
    most, num_queries = (FEW_TOKENS, rows.num_queries) if isinstance(rows, Tiles) else (1, num_tiles)
    # single queries are not counted: nothing reads what stands in
    counts, places = (rows.counts, rows.places) if isinstance(rows, Tiles) else (rows.tokens, rows.tokens)
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    num_splits = min(MAX_SPLITS, triton.cdiv(rows.max_visible, SPLIT_TOKENS))
    parts = torch.empty(num_queries, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    weights = torch.empty(num_queries, num_heads, num_splits, dtype=torch.float32, device=q.device)
    constants, options = split_constants(
        q.dtype, k_cache.dtype, head_dim, group, block_size, is_single=isinstance(rows, Rows)
    )
    k_cache, v_cache, k_scales, v_scales = in_bytes(k_cache, v_cache, scales)
    columns = num_kv_heads * triton.cdiv(most * group, constants["row_lanes"])
    _attend_split[(num_tiles, columns, num_programs(num_tiles * num_kv_heads, num_splits))](
        q, k_cache, v_cache, k_scales, v_scales, block_tables, rows.tokens, rows.owners, rows.visible, counts, places,
        parts, weights, heads_of_a_token(q), block_tables.stride(0), num_kv_heads, num_splits,
        scale * math.log2(math.e), **constants, **options, **early(q),
    )  # fmt: skip
    _reduce[(num_tiles, num_heads, most)](
        parts, weights, rows.tokens, rows.visible, counts, places, out, heads_of_a_token(out), num_heads, num_splits,
        **reduce_constants(constants), **early(q),
    )  # fmt: skip


def split_constants(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, group: int, block_size: int, *, is_single: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """What the first kernel is compiled for, and with which options. dtype: of queries. is_single: not runs."""
    constants = tile_constants(dtype, cache_dtype, head_dim, group, block_size)
    wanted = triton.next_power_of_2(group * (1 if is_single else FEW_TOKENS))
    row_bytes = number_bytes(constants) * constants["dim_lanes"]
    constants |= {
        "is_single": is_single,
        "row_lanes": max(LEAST_LANES, min(ROW_LANES, wanted, ROW_BYTES // row_bytes)),
        "tile_tokens": _tile_tokens(row_bytes),
        "split_tokens": SPLIT_TOKENS,
        "max_splits": MAX_SPLITS,
        "split_step": SPLIT_STEP,
    }
    return constants, {"num_warps": NUM_WARPS, "num_stages": 3 if number_bytes(constants) == 2 else 2}


def reduce_constants(constants: dict[str, Any]) -> dict[str, Any]:
    """What the second kernel is compiled for, where the first is for `constants`."""
    names = ("is_single", "head_dim", "dim_lanes", "split_tokens", "max_splits", "split_step")
    return {name: constants[name] for name in names}


def num_programs(num_columns: int, num_splits: int) -> int:
    """Programs that share the splits of a query. num_columns: queries times key/value heads."""
    return min(num_splits, -(-PROGRAMS // num_columns))


def _tile_tokens(row_bytes: int) -> int:
    """Tokens of a tile: 16 KiB of keys, within the bounds of a product and of a split's step. row_bytes: of a token's
    keys."""
    return max(LEAST_LANES, min(SPLIT_STEP, 2**14 // row_bytes))
