"""Random paged caches with NaN in every slot that is nobody's, and attention as in textbooks, in float32, to compare
with."""

import os
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.triton.attention.plan import FEW_TOKENS, PIECE_TOKENS, Plan, make_plan, plan_queries
from penstock.workers.compute.triton.staging import send_once

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
IS_SHORT = DEVICE.type == "cpu" and not os.environ.get("PENSTOCK_TEST_FULL")
"""Whether the longest tests draw half of their cases: the interpreter is slow."""
NAN = float("nan")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Absolute and relative, for values around 1: half of it is the result's own rounding."""
SHORT, LONG = 40, 300
"""Contexts: most are short, because the interpreter takes a millisecond for each program; long ones have several
splits."""
HEAD_DIMS, GROUPS, BLOCK_SIZES = (16, 64, 96, 128), (1, 2, 3, 4, 7, 8), (8, 16, 32)


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype
    head_dim: int
    num_kv_heads: int
    group: int
    block_size: int
    spans: tuple[tuple[int, int], ...]
    """(context, new tokens) of each sequence."""


@dataclass(frozen=True)
class Case:
    """All on the host."""

    q: Tensor
    k: Tensor
    v: Tensor
    """Values of the new tokens; as their keys `k`, they are in the cache already."""
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch
    expected: Tensor
    """float32."""
    scale: float


def random_shape(seed: int, max_new: int) -> Shape:
    """The dtype goes round with the seed, every tenth shape has one long context, every seventh one of a single token;
    everything else is drawn."""
    draw = random.Random(seed)
    dtype = tuple(TOLERANCE)[seed % len(TOLERANCE)]
    contexts = [draw.randint(1, SHORT) for _ in range(draw.randint(1, 3))]
    if not seed % 10:
        contexts[-1] = draw.randint(LONG - SHORT, LONG)
    if not seed % 7:
        contexts[0] = 1
    spans = tuple((context, draw.randint(1, min(context, max_new))) for context in contexts)
    return Shape(
        dtype,
        draw.choice(HEAD_DIMS),
        draw.choice((1, 1, 2)),
        draw.choice(GROUPS),
        draw.choice(BLOCK_SIZES),
        spans,
    )


def mixed_shape(seed: int) -> Shape:
    """A step with a decode row, a run and a piece, and more of these, in any order. The dtype goes round with the seed;
    every fifth shape has a piece of several tiles, every seventh a whole prompt of it."""
    draw = random.Random(1000 + seed)
    kinds = [(1, 1), (2, FEW_TOKENS), (FEW_TOKENS + 1, 2 * SHORT)]
    kinds += draw.choices(kinds, k=draw.randint(0, 2))
    news = [draw.randint(*kind) for kind in kinds]
    if not seed % 5:
        news[2] = draw.randint(PIECE_TOKENS + 1, PIECE_TOKENS + SHORT)
    spans = [(new + draw.choice((0, draw.randint(1, 2 * SHORT), LONG - SHORT)), new) for new in news]
    if not seed % 7:
        spans[2] = (news[2], news[2])
    draw.shuffle(spans)
    return Shape(
        tuple(TOLERANCE)[seed % len(TOLERANCE)],
        draw.choice(HEAD_DIMS),
        draw.choice((1, 1, 2)),
        draw.choice(GROUPS),
        draw.choice(BLOCK_SIZES),
        tuple(spans),
    )


def make_case(shape: Shape, seed: int) -> Case:
    """What a sequence holds depends on the seed and its place alone."""
    size, heads, dim = shape.block_size, shape.num_kv_heads, shape.head_dim
    counts = [-(-context // size) for context, _ in shape.spans]
    blocks = random.Random(seed).sample(range(1, sum(counts) + 4), sum(counts))
    k_cache, v_cache = (torch.full((sum(counts) + 4, heads, size, dim), NAN, dtype=shape.dtype) for _ in range(2))
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    slots: list[Tensor] = []
    expected: list[Tensor] = []
    scale = dim**-0.5
    for index, (context, new) in enumerate(shape.spans):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        q, k, v = (
            torch.randn(context, count, dim, generator=generator).to(shape.dtype)
            for count in (heads * shape.group, heads, heads)
        )
        table = torch.tensor([blocks.pop() for _ in range(counts[index])])
        tables[index, : counts[index]] = table
        positions = torch.arange(context)
        own = table[positions // size] * size + positions % size
        for cache, x in ((k_cache, k), (v_cache, v)):
            cache[own // size, :, own % size] = x
        expected += [
            textbook(q[place], k[: place + 1], v[: place + 1], scale) for place in range(context - new, context)
        ]
        for parts, x in ((queries, q), (keys, k), (values, v), (slots, own)):
            parts.append(x[context - new :])
    starts = torch.tensor([0, *(new for _, new in shape.spans)]).cumsum(0).int()
    contexts = torch.tensor([context for context, _ in shape.spans], dtype=torch.int32)
    batch = AttentionBatch(starts, contexts, tables, torch.cat(slots))
    inputs = torch.cat(queries), torch.cat(keys), torch.cat(values)
    return Case(*inputs, k_cache, v_cache, batch, torch.stack(expected), scale)


def textbook(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """float32 [H, D]: q [H, D] over keys and values [context, KH, D]."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    return torch.einsum("hc,chd->hd", torch.softmax(scale * torch.einsum("hd,chd->hc", q.float(), keys), dim=1), values)


def planned(batch: AttentionBatch, block_size: int, exact: bool = False) -> AttentionBatch:
    """The batch on DEVICE, with a plan as for a GPU, even where DEVICE is the CPU."""
    plan = make_plan(batch.query_start, batch.context_len, batch.block_tables, block_size, exact, DEVICE)
    return replace(batch, slot_mapping=batch.slot_mapping.to(DEVICE), plan=plan)


def planned_by_rows(batch: AttentionBatch) -> Plan:
    """The plan on DEVICE, of tables that are rows of a larger one, in another order."""
    count, width = batch.block_tables.shape
    rows = torch.arange(count).flip(0) + 2
    table = torch.zeros(count + 3, width + 2, dtype=torch.int32)
    table[rows, :width] = batch.block_tables
    queries = plan_queries(batch.query_start.numpy(), batch.context_len.numpy(), rows.numpy(), exact=False)
    on_device, *arrays = send_once([table.numpy(), *queries.arrays], DEVICE)
    return queries.on_device(on_device, arrays)
