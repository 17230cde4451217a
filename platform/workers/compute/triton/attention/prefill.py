"""Paged attention of pieces of prompts: causal, of any lengths, all pieces of a step in one launch, keys and values
read where they lie (FlashAttention-2, Dao 2023, over vLLM's paged cache, Kwon et al. 2023).

A program takes a tile of rows (see `attention_tile`) and all of the context that they see. Queries are the last tokens
of their context: tiles of tokens that all rows see need no mask, and only the last ones, at the diagonal, have one. The
grid's slowest axis goes through the plan's tiles, those that see most first; its fastest one through the rows of a
tile, which read the same keys and values at the same time.

Invariants: a slot behind what a query sees is never read. A query's result depends on its own context and on where its
piece begins, not on other sequences.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.attention.plan import PIECE_TOKENS, Tiles
from penstock.workers.compute.triton.attention.store import in_bytes
from penstock.workers.compute.triton.attention.tile import (
    absorb,
    begin,
    heads_of_a_token,
    number_bytes,
    places_of,
    tile_constants,
)


class Tiling(NamedTuple):
    rows: int
    """Rows of queries of a program: queries times heads of a group. A power of 2 up to PIECE_TOKENS."""
    tokens: int
    """Tokens of the context that are absorbed at once."""
    num_warps: int
    num_stages: int
    """Tiles that are under way from memory, the one in use included."""


ROOMY = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)}
"""Compute capabilities of which a block has 163 KiB of shared memory or more; others have 99 (CUDA C++ Programming
Guide, technical specifications)."""
TILINGS = {
    (True, 2, 64): Tiling(128, 64, 4, 3),
    (True, 2, 128): Tiling(128, 64, 8, 3),
    (True, 2, 256): Tiling(64, 32, 4, 2),
    (False, 2, 64): Tiling(128, 64, 4, 2),
    (False, 2, 128): Tiling(64, 64, 4, 2),
    (False, 2, 256): Tiling(32, 32, 4, 2),
    (True, 4, 64): Tiling(32, 32, 4, 2),
    (True, 4, 128): Tiling(32, 32, 4, 2),
    (True, 4, 256): Tiling(16, 16, 4, 2),
    (False, 4, 64): Tiling(32, 32, 4, 2),
    (False, 4, 128): Tiling(32, 16, 4, 2),
    (False, 4, 256): Tiling(16, 16, 4, 2),
}
"""Tiles by room, bytes of a number in products, and lanes for a head, at most. Those of 2 bytes are FlashAttention-2's
(`flash_fwd_launch_template.h`), narrower where they would not fit beside keys and values of 2 or 3 stages."""
SMALLEST = Tiling(16, 16, 4, 1)
INTERPRETED = (9, 0)
"""Compute capability whose tiles Triton's interpreter takes."""


@triton.jit(do_not_specialize=["q_heads", "out_heads", "table_stride", "num_kv_heads"])
def _attend_piece(
    q, k_cache, v_cache, k_scales, v_scales, tables, tokens, owners, visible, counts, out, q_heads, out_heads,
    table_stride, num_kv_heads, scale, row_lanes: tl.constexpr, tile_tokens: tl.constexpr, group: tl.constexpr,
    block_size: tl.constexpr, head_dim: tl.constexpr, dim_lanes: tl.constexpr, operand: tl.constexpr,
    value_operand: tl.constexpr, precision: tl.constexpr, is_scaled: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * row_lanes
    kv_head = tl.program_id(1)
    tile = tl.program_id(2)
    count = tl.load(counts + tile)
    if first_row >= count * group:
        return
    token = tl.load(tokens + tile)
    table = tables + tl.load(owners + tile).to(tl.int64) * table_stride
    first_seen = tl.load(visible + tile) - count + 1
    rows = first_row + tl.arange(0, row_lanes)
    seen = first_seen + rows // group
    last = first_seen + tl.minimum(count - 1, (first_row + row_lanes - 1) // group)
    whole = (first_seen + first_row // group) // tile_tokens * tile_tokens

    places, is_query = places_of(rows, token, count, kv_head, q_heads, group, head_dim, dim_lanes)
    queries = tl.load(q + places, mask=is_query, other=0.0).to(operand)
    best, total, result = begin(row_lanes, dim_lanes)
    for start in range(0, whole, tile_tokens):
        best, total, result = absorb(
            best, total, result, queries, k_cache, v_cache, k_scales, v_scales, table, start, last, seen, kv_head,
            num_kv_heads, scale, block_size, head_dim, dim_lanes, tile_tokens, operand, value_operand, precision,
            is_scaled, True,
        )  # fmt: skip
    for start in range(whole, last, tile_tokens):
        best, total, result = absorb(
            best, total, result, queries, k_cache, v_cache, k_scales, v_scales, table, start, last, seen, kv_head,
            num_kv_heads, scale, block_size, head_dim, dim_lanes, tile_tokens, operand, value_operand, precision,
            is_scaled, False,
        )  # fmt: skip
    places, is_query = places_of(rows, token, count, kv_head, out_heads, group, head_dim, dim_lanes)
    tl.store(out + places, (result / total[:, None]).to(out.dtype.element_ty), mask=is_query)


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    pieces: Tiles,
    scale: float,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Attention of the queries `pieces` of q [T, num_heads, head_dim] over the cache, into the same rows of out;
    arguments as of `decode`. Tiles have PIECE_TOKENS queries at most."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    constants, options = piece_constants(q.dtype, k_cache.dtype, head_dim, group, block_size, _capability(q.device))
    k_cache, v_cache, k_scales, v_scales = in_bytes(k_cache, v_cache, scales)
    _attend_piece[(PIECE_TOKENS * group // constants["row_lanes"], num_kv_heads, len(pieces.tokens))](
        q, k_cache, v_cache, k_scales, v_scales, block_tables, pieces.tokens, pieces.owners, pieces.visible,
        pieces.counts, out, heads_of_a_token(q), heads_of_a_token(out), block_tables.stride(0), num_kv_heads,
        scale * math.log2(math.e), **constants, **options,
    )  # fmt: skip


def piece_constants(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    capability: tuple[int, int],
) -> tuple[dict[str, Any], dict[str, int]]:
    """What the kernel is compiled for, and with which options. dtype: of queries."""
    constants = tile_constants(dtype, cache_dtype, head_dim, group, block_size)
    tiling = _tiling(capability in ROOMY, number_bytes(constants), constants["dim_lanes"])
    constants |= {"row_lanes": tiling.rows, "tile_tokens": tiling.tokens}
    return constants, {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}


def _tiling(is_roomy: bool, size: int, dim_lanes: int) -> Tiling:
    fitting = (lanes for room, number, lanes in TILINGS if (room, number) == (is_roomy, size) and lanes >= dim_lanes)
    lanes = min(fitting, default=None)
    return SMALLEST if lanes is None else TILINGS[is_roomy, size, lanes]


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETED
