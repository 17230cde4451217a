"""Paged attention on a GPU by its plan: single queries and runs split over the context, pieces of prompts in one
launch. Nothing is gathered, and there is no mask in memory.

How kernels are compiled depends on the model, its cache and the GPU, and on which of the three a query is: after a step
with a sequence of 1 new token, one of 2 and one of 17 nothing is left to compile.
"""

import torch
from torch import Tensor

from penstock.workers.compute.triton.attention.decode import decode
from penstock.workers.compute.triton.attention.plan import Plan
from penstock.workers.compute.triton.attention.prefill import prefill


def attend_planned(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    scale: float,
    scales: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[T, num_heads, head_dim], of q's shape; arguments as of `penstock.workers.compute.attention.attend`, all on one
    device. scales: see `store`. Rows that are no query of the plan are not written."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for queries in (plan.rows, plan.runs):
        if queries is not None:
            decode(q, k_cache, v_cache, plan.block_tables, queries, scale, out, scales)
    if plan.pieces is not None:
        prefill(q, k_cache, v_cache, plan.block_tables, plan.pieces, scale, out, scales)
    return out
