"""Paged attention of single queries: split-KV (Flash-Decoding, Dao et al. 2023), then a reduction over the splits.

A program takes one query, one key/value head with the group of query heads that share it, and a part of the context, in
tiles, with an online softmax (Milakov and Gimelshein 2018) in float32. It leaves its part's normalized result and the
logarithm of its sum of weights; the second kernel weighs the parts by these. A part is SPLIT_TOKENS, or more where
there would be more than MAX_SPLITS of them: so a launch need not know how long the contexts are, only how long they may
be.

Invariants: a slot behind what a query sees is never read, and a query that sees nothing gets zeros. Where a context is
split depends on its length alone, so that a query's result does not depend on its company.

Products are taken of float32 operands: by tf32 where queries and cache are float16 or bfloat16, which it holds exactly;
else in full.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.plan import Rows
from penstock.workers.compute.triton.store import in_bytes

SPLIT_TOKENS = 256
MAX_SPLITS = 32
TILE_TOKENS = 32
LEAST_LANES = 16
"""Size of a matrix product in each dimension, at least."""


@triton.jit
def _split_size(context, split_tokens: tl.constexpr, max_splits: tl.constexpr, tile_tokens: tl.constexpr):
    share = (context + max_splits - 1) // max_splits
    return tl.maximum(split_tokens, (share + tile_tokens - 1) // tile_tokens * tile_tokens)


@triton.jit
def _read(cache, places, mask, is_scaled: tl.constexpr):
    read = tl.load(cache + places, mask=mask, other=0)
    if is_scaled:
        read = read.to(tl.float8e4nv, bitcast=True)
    return read.to(tl.float32)


@triton.jit
def _attend_split(
    q, k_cache, v_cache, k_scales, v_scales, tables, tokens, owners, visible, parts, weights,
    q_token_stride, q_head_stride, table_stride, scale, num_kv_heads, group, block_size, head_dim, num_splits,
    group_lanes: tl.constexpr, dim_lanes: tl.constexpr, split_tokens: tl.constexpr, max_splits: tl.constexpr,
    tile_tokens: tl.constexpr, precision: tl.constexpr, is_scaled: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(visible + row)
    size = _split_size(context, split_tokens, max_splits, tile_tokens)
    first = split * size
    if first >= context:
        return
    last = tl.minimum(first + size, context)
    table = tables + tl.load(owners + row).to(tl.int64) * table_stride
    token = tl.load(tokens + row).to(tl.int64)

    members = tl.arange(0, group_lanes)
    dims = tl.arange(0, dim_lanes)
    heads = kv_head * group + members
    is_query = (members < group)[:, None] & (dims < head_dim)[None, :]
    queries = tl.load(
        q + token * q_token_stride + heads[:, None] * q_head_stride + dims[None, :], mask=is_query, other=0.0
    ).to(tl.float32)

    best = tl.full((group_lanes,), float("-inf"), tl.float32)
    total = tl.full((group_lanes,), 0.0, tl.float32)
    result = tl.full((group_lanes, dim_lanes), 0.0, tl.float32)
    for start in range(first, last, tile_tokens):
        places = start + tl.arange(0, tile_tokens)
        is_seen = places < last
        blocks = tl.load(table + places // block_size, mask=is_seen, other=0).to(tl.int64)
        slots = (blocks * num_kv_heads + kv_head) * block_size + places % block_size
        is_real = is_seen[:, None] & (dims < head_dim)[None, :]
        keys = _read(k_cache, slots[:, None] * head_dim + dims[None, :], is_real, is_scaled)
        values = _read(v_cache, slots[:, None] * head_dim + dims[None, :], is_real, is_scaled)
        scores = tl.dot(queries, tl.trans(keys), input_precision=precision)
        if is_scaled:
            scores *= tl.load(k_scales + slots, mask=is_seen, other=0.0)[None, :]
        scores = tl.where(is_seen[None, :], scores * scale, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - new_best)
        shares = tl.exp(scores - new_best[:, None])
        total = total * shrink + tl.sum(shares, 1)
        if is_scaled:
            shares *= tl.load(v_scales + slots, mask=is_seen, other=0.0)[None, :]
        result = result * shrink[:, None] + tl.dot(shares, values, input_precision=precision)
        best = new_best

    part = (row * num_kv_heads * group + heads) * num_splits + split
    tl.store(parts + part[:, None] * head_dim + dims[None, :], result / total[:, None], mask=is_query)
    tl.store(weights + part, best + tl.log(total), mask=members < group)


@triton.jit
def _reduce(
    parts, weights, tokens, visible, out, out_token_stride, out_head_stride, num_heads, head_dim, num_splits,
    dim_lanes: tl.constexpr, split_tokens: tl.constexpr, max_splits: tl.constexpr, tile_tokens: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, dim_lanes)
    is_real = dims < head_dim
    context = tl.load(visible + row)
    target = out + tl.load(tokens + row).to(tl.int64) * out_token_stride + head * out_head_stride + dims
    if context == 0:
        tl.store(target, tl.zeros((dim_lanes,), out.dtype.element_ty), mask=is_real)
        return
    size = _split_size(context, split_tokens, max_splits, tile_tokens)
    part = (row * num_heads + head) * num_splits
    best = tl.load(weights + part)
    total = tl.full((), 1.0, tl.float32)
    result = tl.load(parts + part * head_dim + dims, mask=is_real, other=0.0)
    for split in range(1, (context + size - 1) // size):
        weight = tl.load(weights + part + split)
        new_best = tl.maximum(best, weight)
        shrink = tl.exp(best - new_best)
        share = tl.exp(weight - new_best)
        total = total * shrink + share
        result = result * shrink + tl.load(parts + (part + split) * head_dim + dims, mask=is_real, other=0.0) * share
        best = new_best
    tl.store(target, (result / total).to(out.dtype.element_ty), mask=is_real)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    rows: Rows,
    scale: float,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Attention of the queries `rows` of q [T, num_heads, head_dim] over the cache, into the same rows of out, of q's
    shape.

    The last dimension of q and out is contiguous, the caches [num_blocks, num_kv_heads, block_size, head_dim] are
    altogether. scales: see `store`.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    num_rows, group = len(rows.tokens), num_heads // num_kv_heads
    num_splits = min(MAX_SPLITS, triton.cdiv(rows.max_visible, SPLIT_TOKENS))
    assert q.stride(2) == out.stride(2) == 1
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    parts = torch.empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    weights = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=q.device)
    dim_lanes = max(LEAST_LANES, triton.next_power_of_2(head_dim))
    precision = "ieee" if torch.float32 in (q.dtype, k_cache.dtype) else "tf32"
    k_cache, v_cache, k_scales, v_scales = in_bytes(k_cache, v_cache, scales)
    _attend_split[(num_rows, num_kv_heads, num_splits)](
        q, k_cache, v_cache, k_scales, v_scales, block_tables, rows.tokens, rows.owners, rows.visible, parts, weights,
        q.stride(0), q.stride(1), block_tables.stride(0), scale, num_kv_heads, group, block_size, head_dim, num_splits,
        group_lanes=max(LEAST_LANES, triton.next_power_of_2(group)), dim_lanes=dim_lanes, split_tokens=SPLIT_TOKENS,
        max_splits=MAX_SPLITS, tile_tokens=TILE_TOKENS, precision=precision, is_scaled=scales is not None,
    )  # fmt: skip
    _reduce[(num_rows, num_heads)](
        parts, weights, rows.tokens, rows.visible, out, out.stride(0), out.stride(1), num_heads, head_dim, num_splits,
        dim_lanes=dim_lanes, split_tokens=SPLIT_TOKENS, max_splits=MAX_SPLITS, tile_tokens=TILE_TOKENS,
    )  # fmt: skip
