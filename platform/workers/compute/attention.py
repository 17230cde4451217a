"""Paged attention: what a step's queries may see, writing its keys and values, and attending to them.

The cache of a layer is two tensors [num_blocks, num_kv_heads, block_size, head_dim] in float32, bfloat16 or 8 bits.
Attention is causal, with grouped queries: query head h reads key/value head h // (num_heads / num_kv_heads). Softmax
and sums are in float32.

Invariant: nothing is read from a slot that the sequence has not written: what lies in foreign blocks, or behind the
context in the last block, may be NaN. What a query gets from the kernel depends on its own context only, so it serves
exact mode as it is.

On a GPU the kernels are those of `penstock.workers.compute.triton`; the batch then comes with their plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.workers.compute.kernels.build import load_kernels
from penstock.workers.compute.kernels.cache_layout import PLAIN, CacheLayout
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.triton.attention.block_tables import StepTables
from penstock.workers.compute.triton.attention.plan import Plan, check_contexts, plan_queries
from penstock.workers.compute.triton.staging import Staging


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the tokens of a step lie. T tokens of B sequences, those of one sequence side by side and in order."""

    query_start: Tensor
    """int32 [B + 1]: tokens [query_start[b], query_start[b + 1]) belong to sequence b."""
    context_len: Tensor
    """int32 [B]: tokens in the sequence's cache, the step's own included."""
    block_tables: Tensor
    """int32 [B, max_blocks], padded with 0; [B, 0] where `tables` say it."""
    slot_mapping: Tensor
    """int64 [T]: block * block_size + offset, where the token's key and value go."""
    plan: Plan | None = None
    """What a GPU's kernels do for the batch; None on the CPU."""
    tables: StepTables | None = None
    """Where the blocks are in the device's own tables, and what changes there; None: `block_tables` are all there
    is."""

    def send(
        self, staging: Staging, block_size: int, exact: bool, others: Sequence[Tensor]
    ) -> tuple["AttentionBatch", list[Tensor]]:
        """The batch, which was made on the host, for a model on the device of `staging`, and other tensors of the step,
        all in one copy that nothing waits for. The device's tables are changed. exact: as of `attend`."""
        contexts, tables = self.context_len.numpy(), self.tables
        check_contexts(contexts, self.block_tables if tables is None else tables.table, block_size)
        owners = np.arange(len(contexts)) if tables is None else tables.rows.numpy()
        queries = plan_queries(self.query_start.numpy(), contexts, owners, exact)
        changes = [self.block_tables] if tables is None else [tables.places, tables.blocks]
        first = [tensor.numpy() for tensor in (*others, self.slot_mapping, *changes)]
        moved = staging.send([*first, *queries.arrays])
        sent, (slots, *changed), arrays = moved[: len(others)], moved[len(others) : len(first)], moved[len(first) :]
        if tables is not None:
            tables.change(*changed)
        on_device = changed[0] if tables is None else tables.table
        if staging.device.type == "cpu":
            own = on_device if tables is None else on_device[tables.rows]
            return AttentionBatch(self.query_start, self.context_len, own, slots), sent
        plan = queries.on_device(on_device, arrays)
        return AttentionBatch(self.query_start, self.context_len, self.block_tables, slots, plan), sent


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    layout: CacheLayout = PLAIN,
    *,
    is_planned: bool = False,
) -> None:
    """Store k and v [T, num_kv_heads, head_dim] in their slots. layout: of this layer of the cache. is_planned: by the
    GPU's kernels.

    In int8 each token's head is kept in units of 1/127 of its largest number, in float8 (on a GPU) of 1/448.
    """
    if is_planned:
        from penstock.workers.compute.triton.attention.store import store  # noqa: PLC0415 (Triton may be absent)

        store(k, v, k_cache, v_cache, slot_mapping, layout.scales)
        return
    kernels = _kernels_for(k, k_cache)
    if kernels is None:
        _write_kv_torch(k, v, k_cache, v_cache, slot_mapping, layout)
    else:
        kernels.write_kv(k, v, k_cache, v_cache, slot_mapping, layout)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    threads: int,
    exact: bool,
    layout: CacheLayout = PLAIN,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, num_heads, head_dim] over the cache, which holds this step's keys and values already: [T,
    num_heads, head_dim].

    threads: at most so many work on it. exact: a query's result is bit-identical whatever else is in the batch.
    layout: of this layer of the cache. out: of q's shape, where a GPU's kernels write the result; None: new memory.
    """
    if batch.plan is not None:
        from penstock.workers.compute.triton.attention.attend import attend_planned  # noqa: PLC0415 (Triton may be absent)

        return attend_planned(q, k_cache, v_cache, batch.plan, scale, layout.scales, out)
    assert out is None, "only a GPU's kernels write to memory that is given"
    kernels = _kernels_for(q, k_cache)
    if kernels is None:
        return _attend_torch(q, k_cache, v_cache, batch, scale, exact, layout)
    return kernels.attend(
        q, k_cache, v_cache, batch.query_start, batch.context_len, batch.block_tables, scale, threads, layout
    )


def _kernels_for(x: Tensor, cache: Tensor) -> Library | None:
    """The kernels, where they were built and cover x [T, heads, head_dim] over this cache."""
    kernels = load_kernels()
    return kernels if kernels is not None and kernels.is_supported(x.shape[1], cache, x.dtype) else None


def _write_kv_torch(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, layout: CacheLayout = PLAIN
) -> None:
    assert not layout.is_tiled, "only the kernels write a tiled cache"
    block_size = k_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for index, (x, cache) in enumerate(((k, k_cache), (v, v_cache))):
        if layout.scales is None:
            cache[blocks, :, offsets] = x.to(cache.dtype)
            continue
        unit = x.float().abs().amax(-1) / 127
        layout.scales[index][blocks, :, offsets] = unit
        cache[blocks, :, offsets] = (
            (x.float() / unit.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round().to(torch.int8)
        )


def _attend_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    exact: bool,
    layout: CacheLayout = PLAIN,
) -> Tensor:
    assert not layout.is_tiled, "only the kernels read a tiled cache"
    out = torch.empty_like(q)
    starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
    for index, context_len in enumerate(contexts):
        start, end = starts[index], starts[index + 1]
        keys, values = (_gather(cache, batch.block_tables[index], context_len) for cache in (k_cache, v_cache))
        if layout.scales is not None:
            key_scales, value_scales = (
                _gather(part[..., None], batch.block_tables[index], context_len) for part in layout.scales
            )
            keys, values = keys * key_scales, values * value_scales
        # exact: each query alone, so that shapes depend on its position only
        spans = [(row, row + 1) for row in range(start, end)] if exact else [(start, end)]
        for first, last in spans:
            visible = context_len - (end - last)
            out[first:last] = _attend_dense(q[first:last], keys[:, :visible], values[:, :visible], scale)
    return out


def _gather(cache: Tensor, block_table: Tensor, num_tokens: int) -> Tensor:
    """float32 [num_kv_heads, num_tokens, head_dim] out of the blocks."""
    block_size = cache.shape[2]
    blocks = cache[block_table[: -(-num_tokens // block_size)].long()]
    return blocks.transpose(0, 1).reshape(cache.shape[1], -1, cache.shape[3])[:, :num_tokens].float()


def _attend_dense(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of q [n, H, D], which stand at the last n positions of keys and values [KH, context, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, context_len, _ = keys.shape
    grouped = q.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped * scale, keys[:, None].transpose(-1, -2))
    if num_queries > 1:
        positions = torch.arange(context_len - num_queries, context_len)
        scores.masked_fill_(positions[:, None] < torch.arange(context_len), float("-inf"))
    out = torch.matmul(torch.softmax(scores, dim=-1), values[:, None])
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim).to(q.dtype)
