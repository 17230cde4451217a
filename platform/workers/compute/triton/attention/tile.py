"""A tile of attention, which `decode` and `prefill` share: tokens out of the paged cache, absorbed into the online
softmax (Milakov and Gimelshein 2018) of a tile of queries, in float32.

A tile's rows are queries with all heads that share a key/value head, side by side: row r is query r // group, head
r % group of the group. So keys and values are read once for the group (FlashInfer, Ye et al. 2025, calls it head group
packing). Scores are in units of log 2, so that weights are powers of 2, which GPUs have an instruction for.

Keys, queries and values are multiplied in their own type where it has 16 bits and they share it, weights rounded to it
(FlashAttention, Dao et al. 2022); values of 8 bits in bfloat16, because a weight times a scale may be too small for
float16; all else in float32, in full.
"""

from typing import Any

import torch
import triton
import triton.language as tl

LEAST_LANES = 16
"""Size of a matrix product in each dimension, at least."""
OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def begin(row_lanes: tl.constexpr, dim_lanes: tl.constexpr):
    """State of rows that have seen nothing: largest score (finite, so that no difference of infinities arises), sum of
    weights, sum of weighted values."""
    best = tl.full((row_lanes,), -1.0e30, tl.float32)
    total = tl.zeros((row_lanes,), tl.float32)
    return best, total, tl.zeros((row_lanes, dim_lanes), tl.float32)


@triton.jit
def places_of(
    rows, token, count, kv_head, token_heads, group: tl.constexpr, head_dim: tl.constexpr, dim_lanes: tl.constexpr
):
    """Where the numbers of rows lie in a tensor with `token_heads` heads from one token to the next, and which are
    there. token: of the tile's first query. count: queries of the tile."""
    queries = rows // group
    dims = tl.arange(0, dim_lanes)
    heads = (token.to(tl.int64) + queries) * token_heads + kv_head * group + rows % group
    return heads[:, None] * head_dim + dims[None, :], (queries < count)[:, None] & (dims < head_dim)[None, :]


@triton.jit
def _read(
    cache, slots, is_place, head_dim: tl.constexpr, dim_lanes: tl.constexpr, is_scaled: tl.constexpr,
    is_whole: tl.constexpr,
):  # fmt: skip
    """Rows of a cache, [tokens, dim_lanes]. is_whole: all of them are there."""
    dims = tl.arange(0, dim_lanes)
    numbers = cache + slots[:, None] * head_dim + dims[None, :]
    if is_whole:
        if head_dim == dim_lanes:
            found = tl.load(numbers)
        else:
            found = tl.load(numbers, mask=(dims < head_dim)[None, :], other=0)
    else:
        found = tl.load(numbers, mask=is_place[:, None] & (dims < head_dim)[None, :], other=0)
    if is_scaled:
        found = found.to(tl.float8e4nv, bitcast=True)
    return found


@triton.jit
def absorb(
    best, total, result, queries, k_cache, v_cache, k_scales, v_scales, table, start, last, seen, kv_head,
    num_kv_heads, scale, block_size: tl.constexpr, head_dim: tl.constexpr, dim_lanes: tl.constexpr,
    tile_tokens: tl.constexpr, operand: tl.constexpr, value_operand: tl.constexpr, precision: tl.constexpr,
    is_scaled: tl.constexpr, is_whole: tl.constexpr,
):  # fmt: skip
    """The state, with the tokens [start, start + tile_tokens) absorbed. is_whole: every row sees all of them; else
    those at `last` and behind are not read, and row r sees those before seen[r]. scale: of scores, times log2(e)."""
    places = start + tl.arange(0, tile_tokens)
    is_place = places < last
    if is_whole:
        blocks = tl.load(table + places // block_size)
    else:
        blocks = tl.load(table + places // block_size, mask=is_place, other=0)
    slots = (blocks.to(tl.int64) * num_kv_heads + kv_head) * block_size + places % block_size
    keys = _read(k_cache, slots, is_place, head_dim, dim_lanes, is_scaled, is_whole).to(operand)
    scores = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale
    if is_scaled:
        if is_whole:
            scores *= tl.load(k_scales + slots)[None, :]
        else:
            scores *= tl.load(k_scales + slots, mask=is_place, other=0.0)[None, :]
    if not is_whole:
        scores = tl.where(places[None, :] < seen[:, None], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp2(best - new_best)
    shares = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(shares, 1)
    if is_scaled:
        if is_whole:
            shares *= tl.load(v_scales + slots)[None, :]
        else:
            shares *= tl.load(v_scales + slots, mask=is_place, other=0.0)[None, :]
    values = _read(v_cache, slots, is_place, head_dim, dim_lanes, is_scaled, is_whole).to(value_operand)
    result = tl.dot(shares.to(value_operand), values, result * shrink[:, None], input_precision=precision)
    return new_best, total, result


def tile_constants(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, group: int, block_size: int
) -> dict[str, Any]:
    """What both kernels are compiled for: types and sizes that a model and its cache have for good. dtype: of queries.

    Triton's interpreter takes bfloat16 for integers in products; there float32 gives the same ones.
    """
    is_scaled = cache_dtype == torch.float8_e4m3fn
    operand = value_operand = tl.float32
    if dtype in OPERANDS and (is_scaled or cache_dtype == dtype) and not triton.knobs.runtime.interpret:
        operand, value_operand = OPERANDS[dtype], tl.bfloat16 if is_scaled else OPERANDS[dtype]
    return {
        "group": group,
        "block_size": block_size,
        "head_dim": head_dim,
        "dim_lanes": max(LEAST_LANES, triton.next_power_of_2(head_dim)),
        "operand": operand,
        "value_operand": value_operand,
        "precision": "ieee",
        "is_scaled": is_scaled,
    }


def number_bytes(constants: dict[str, Any]) -> int:
    """Bytes of a number in the products of a kernel with these constants: 2 or 4."""
    return 4 if constants["operand"] == tl.float32 else 2


def heads_of_a_token(x: torch.Tensor) -> int:
    """Distance of a token from the next, in heads, of x [T, heads, head_dim] whose heads lie side by side."""
    _, num_heads, head_dim = x.shape
    assert x.stride(2) == 1
    assert num_heads == 1 or x.stride(1) == head_dim
    if len(x) < 2:
        return num_heads
    assert x.stride(0) % head_dim == 0
    return x.stride(0) // head_dim
