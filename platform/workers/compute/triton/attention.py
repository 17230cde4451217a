"""Paged attention on a GPU by its plan: single queries by the kernel, pieces of prompts by torch's fused attention
over the gathered context.

Torch takes what each query sees as a whole matrix; so a piece of a prompt is taken in slices whose matrix is bounded.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.triton.decode import decode
from penstock.workers.compute.triton.plan import Piece, Plan

MAX_MASK = 2**27
"""Entries of a mask, at most: a byte for each, and in torch as many numbers of the queries' type. A thousand queries in
groups of 8 over a context of 128 thousand are 8 slices, each of which still keeps a GPU busy."""


def attend_planned(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, scale: float, scales: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """[T, num_heads, head_dim], of q's shape; arguments as of `penstock.workers.compute.attention.attend`, all on one
    device. scales: see `store`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.rows is not None:
        decode(q, k_cache, v_cache, plan.block_tables, plan.rows, scale, out, scales)
    for piece in plan.pieces:
        keys, values = (
            _gather(cache, piece, None if scales is None else scales[index], q.dtype)
            for index, cache in enumerate((k_cache, v_cache))
        )
        _attend_piece(q, keys, values, piece, scale, out)
    return out


def _gather(cache: Tensor, piece: Piece, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The piece's context out of the cache: [num_kv_heads, context, head_dim]."""
    if scales is None:
        return cache[piece.blocks, :, piece.offsets].transpose(0, 1).to(dtype)
    found = cache.view(torch.uint8)[piece.blocks, :, piece.offsets].view(cache.dtype).float()
    return (found * scales[piece.blocks, :, piece.offsets][..., None]).transpose(0, 1).to(dtype)


def _attend_piece(q: Tensor, keys: Tensor, values: Tensor, piece: Piece, scale: float, out: Tensor) -> None:
    """Attend to the piece's queries, and write the result into their rows of `out`."""
    num_kv_heads, context, _ = keys.shape
    positions = torch.arange(context, device=q.device)
    most = max(1, MAX_MASK // (context * (q.shape[1] // num_kv_heads)))
    for start in range(piece.start, piece.end, most):
        end = min(start + most, piece.end)
        own = positions[context - (piece.end - start) : context - (piece.end - end)]
        out[start:end] = _attend_dense(q[start:end], keys, values, positions <= own[:, None], scale)


def _attend_dense(q: Tensor, keys: Tensor, values: Tensor, is_visible: Tensor, scale: float) -> Tensor:
    """q [n, num_heads, head_dim], keys and values [num_kv_heads, context, head_dim], is_visible [n, context].

    The query heads that share a key/value head are taken as so many more queries of it.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    queries = (
        q.view(num_queries, num_kv_heads, group, head_dim)
        .permute(1, 2, 0, 3)
        .reshape(num_kv_heads, group * num_queries, head_dim)
    )
    mask = is_visible.repeat(group, 1)
    result = functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=mask[None, None], scale=scale
    )[0]
    return (
        result.view(num_kv_heads, group, num_queries, head_dim)
        .permute(2, 0, 1, 3)
        .reshape(num_queries, num_heads, head_dim)
    )
