"""Paged attention on a GPU as its plan says: single queries by the kernel, pieces of prompts by torch's fused attention over the gathered context."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.triton.decode import decode
from penstock.workers.triton.plan import Piece, Plan


def attend_planned(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, scale: float) -> Tensor:
    """[T, num_heads, head_dim], of q's shape; arguments as of `penstock.workers.attention.attend`, all on one device."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.rows is not None:
        decode(q, k_cache, v_cache, plan.block_tables, plan.rows, scale, out)
    for piece in plan.pieces:
        out[piece.start : piece.end] = _attend_piece(q[piece.start : piece.end], k_cache, v_cache, piece, scale)
    return out


def _attend_piece(q: Tensor, k_cache: Tensor, v_cache: Tensor, piece: Piece, scale: float) -> Tensor:
    """q [n, num_heads, head_dim]. The query heads that share a key/value head are taken as so many more queries of it."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    keys, values = (cache[piece.blocks, :, piece.offsets].transpose(0, 1).to(q.dtype) for cache in (k_cache, v_cache))
    queries = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, group * num_queries, head_dim)
    mask = piece.is_visible.repeat(group, 1)
    result = functional.scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=mask[None, None], scale=scale)[0]
    return result.view(num_kv_heads, group, num_queries, head_dim).permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
