"""A step as tensors: the chunks' tokens and drafts side by side, where their KV lies, and which rows choose a token. No
model, no state."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.engine.sequence import Chunk, Step


class Span(NamedTuple):
    """Tokens to be computed side by side: those at [start, start + len(token_ids)) of the sequence that lies in
    `block_table`."""

    token_ids: list[int]
    start: int
    block_table: list[int]


class Layout(NamedTuple):
    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: place of each token in its sequence."""
    attention: AttentionBatch


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: place of each token in its sequence."""
    attention: AttentionBatch
    rows: Tensor
    """int64 [R]: flat index of the last known token of each chunk that samples and, behind it, of each token of its
    draft."""
    sampled: list[int]
    """Indices of the chunks that sample, ascending; without drafts there are R of them."""


def build_batch(step: Step, block_size: int) -> Batch:
    """The step as tensors. Every chunk has at least one token, and blocks for all of them and its draft."""
    chunks = step.chunks
    token_ids, positions, attention = lay_out([_span(chunk) for chunk in chunks], block_size)
    sampled = [index for index, chunk in enumerate(chunks) if chunk.is_sampled]
    ends = attention.query_start[1:].numpy()
    if any(chunk.draft for chunk in chunks):
        rows = [
            np.arange(ends[index] - 1 - len(chunks[index].draft or ()), ends[index], dtype=np.int64)
            for index in sampled
        ]
        return Batch(token_ids, positions, attention, torch.from_numpy(np.concatenate(rows)), sampled)
    return Batch(token_ids, positions, attention, torch.from_numpy(ends[sampled].astype(np.int64) - 1), sampled)


def _span(chunk: Chunk) -> Span:
    known = chunk.seq.token_ids[chunk.start : chunk.end]
    return Span(known + chunk.draft if chunk.draft else known, chunk.start, chunk.seq.block_table)


def lay_out(spans: list[Span], block_size: int) -> Layout:
    """The spans as one flat batch; every one has at least one token, and blocks for all of them."""
    counts = np.array([len(span.token_ids) for span in spans])
    starts = np.array([span.start for span in spans])
    ends = starts + counts
    query_start = np.concatenate(([0], counts.cumsum()))
    owner = np.repeat(np.arange(len(spans)), counts)
    positions = np.arange(query_start[-1]) - (query_start[:-1] - starts)[owner]
    tables = np.zeros((len(spans), -(-int(ends.max()) // block_size)), dtype=np.int32)
    for row, span, end in zip(tables, spans, ends, strict=True):
        held = span.block_table[: -(-int(end) // block_size)]
        row[: len(held)] = held
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return Layout(
        torch.tensor([token_id for span in spans for token_id in span.token_ids]),
        torch.from_numpy(positions),
        AttentionBatch(
            torch.from_numpy(query_start.astype(np.int32)),
            torch.from_numpy(ends.astype(np.int32)),
            torch.from_numpy(tables),
            torch.from_numpy(slots),
        ),
    )
