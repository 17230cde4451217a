"""A step as tensors: the chunks' tokens side by side, where their KV lies, and which rows choose a token. No model, no state."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.workers.attention import AttentionBatch
from penstock.workers.sequence import Step


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: place of each token in its sequence."""
    attention: AttentionBatch
    rows: Tensor
    """int64 [R]: flat index of the last token of each chunk that samples."""
    sampled: list[int]
    """[R]: which chunks those are."""


def build_batch(step: Step, block_size: int) -> Batch:
    """Every chunk has at least one token, and blocks for all of them."""
    chunks = step.chunks
    counts = np.array([chunk.num_tokens for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    ends = starts + counts
    query_start = np.concatenate(([0], counts.cumsum()))
    token_ids = [token_id for chunk in chunks for token_id in chunk.seq.token_ids[chunk.start : chunk.end]]
    owner = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(query_start[-1]) - (query_start[:-1] - starts)[owner]
    tables = np.zeros((len(chunks), -(-int(ends.max()) // block_size)), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        held = chunk.seq.block_table[: -(-chunk.end // block_size)]
        row[: len(held)] = held
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    sampled = [index for index, chunk in enumerate(chunks) if chunk.is_sampled]
    return Batch(
        torch.tensor(token_ids),
        torch.from_numpy(positions),
        AttentionBatch(
            torch.from_numpy(query_start.astype(np.int32)),
            torch.from_numpy(ends.astype(np.int32)),
            torch.from_numpy(tables),
            torch.from_numpy(slots),
        ),
        torch.from_numpy(query_start[1:][sampled] - 1),
        sampled,
    )
