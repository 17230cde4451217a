"""A step as tensors: the chunks' tokens and drafts side by side, where their KV lies, and which rows choose a token. No
model, no state."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.triton.attention.block_tables import BlockTables, Wanted
from penstock.workers.engine.sequence import Chunk, Sequence, Step

Integers = NDArray[np.integer[Any]]

FEW_TOKENS = 512
"""A step of at most so many tokens is laid out in lists, where block tables are on the host. Behind a step, whose
weights have gone through all caches, each function of numpy or torch that is called first has to come from memory;
lists don't."""


class Span(NamedTuple):
    """Tokens to be computed side by side: those at [start, start + len(token_ids)) of the sequence that lies in
    `block_table`."""

    token_ids: list[int]
    start: int
    block_table: list[int]
    seq: Sequence | None = None
    """The sequence, where block tables that stay on the device know it."""


class Layout(NamedTuple):
    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: place of each token in its sequence."""
    attention: AttentionBatch


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor
    """int64 [T]; less than 0: see `before`."""
    positions: Tensor
    """int64 [T]: place of each token in its sequence."""
    attention: AttentionBatch
    rows: Tensor
    """int64 [R]: flat index of the last known token of each chunk that samples and, behind it, of each token of its
    draft."""
    sampled: list[int]
    """Indices of the chunks that sample, ascending; without drafts there are R of them."""
    before: Tensor | None = None
    """Token ids of any type, on the device, chosen by the step before. A token id of -1 - row stands for that of a row;
    None: there is none such."""

    @property
    def least_and_largest_id(self) -> tuple[int, int]:
        if len(self.token_ids) <= FEW_TOKENS:
            token_ids = self.token_ids.tolist()
            return min(token_ids), max(token_ids)
        numbers = self.token_ids.numpy()
        return int(numbers.min()), int(numbers.max())


def build_batch(step: Step, block_size: int, tables: BlockTables | None = None) -> Batch:
    """The step as tensors. Every chunk has at least one token, and blocks for all of them and its draft. tables: as of
    `lay_out`."""
    chunks = step.chunks
    token_ids, positions, attention = lay_out([_span(chunk) for chunk in chunks], block_size, tables)
    sampled = [index for index, chunk in enumerate(chunks) if chunk.is_sampled]
    ends = list(accumulate(chunk.num_tokens + len(chunk.draft or ()) for chunk in chunks))
    rows = [row for index in sampled for row in range(ends[index] - 1 - len(chunks[index].draft or ()), ends[index])]
    return Batch(token_ids, positions, attention, _integers("q", rows), sampled)


def fill_in(token_ids: Tensor, before: Tensor) -> None:
    """Put the tokens that the step before has chosen into the places of a batch's tokens that stand for them. All on
    one device, and nothing is waited for."""
    chosen = before.long()[(-1 - token_ids).clamp_(min=0)]
    token_ids.copy_(torch.where(token_ids < 0, chosen, token_ids))


def _span(chunk: Chunk) -> Span:
    known = chunk.seq.token_ids[chunk.start : chunk.end]
    return Span(known + chunk.draft if chunk.draft else known, chunk.start, chunk.seq.block_table, chunk.seq)


def lay_out(spans: list[Span], block_size: int, tables: BlockTables | None = None) -> Layout:
    """The spans as one flat batch; every one has at least one token, and blocks for all of them. tables: those of the
    device, which are brought up to date before the batch is computed; None: the batch has its own."""
    if tables is None and sum(len(span.token_ids) for span in spans) <= FEW_TOKENS:
        return _lay_out_few(spans, block_size)
    counts = np.array([len(span.token_ids) for span in spans])
    starts = np.array([span.start for span in spans])
    ends = starts + counts
    query_start = np.concatenate(([0], counts.cumsum()))
    owner = np.repeat(np.arange(len(spans)), counts)
    positions = np.arange(query_start[-1]) - (query_start[:-1] - starts)[owner]
    first_blocks, num_blocks = starts // block_size, -(-ends // block_size)
    step_tables = None
    if tables is None:
        block_tables = _pad_tables(spans, num_blocks.tolist())
    else:
        of_spans = zip(spans, first_blocks.tolist(), num_blocks.tolist(), strict=True)
        step_tables = tables.update([_wanted(span, first, count) for span, first, count in of_spans])
        block_tables = np.zeros((len(spans), 0), dtype=np.int32)
    slots = _find_slots(spans, first_blocks, num_blocks, owner, positions, block_size)
    return Layout(
        torch.tensor([token_id for span in spans for token_id in span.token_ids]),
        torch.from_numpy(positions),
        AttentionBatch(
            torch.from_numpy(query_start.astype(np.int32)),
            torch.from_numpy(ends.astype(np.int32)),
            torch.from_numpy(block_tables),
            torch.from_numpy(slots),
            tables=step_tables,
        ),
    )


def _lay_out_few(spans: list[Span], block_size: int) -> Layout:
    token_ids = [token_id for span in spans for token_id in span.token_ids]
    positions: list[int] = []
    slots: list[int] = []
    contexts: list[int] = []
    for span in spans:
        table, end = span.block_table, span.start + len(span.token_ids)
        contexts.append(end)
        places = range(span.start, end)
        positions += places
        slots += [table[place // block_size] * block_size + place % block_size for place in places]
    starts = accumulate((len(span.token_ids) for span in spans), initial=0)
    return Layout(
        _integers("q", token_ids),
        _integers("q", positions),
        AttentionBatch(
            _integers("i", starts),
            _integers("i", contexts),
            _list_tables(spans, [-(-end // block_size) for end in contexts]),
            _integers("q", slots),
        ),
    )


def _list_tables(spans: list[Span], num_blocks: list[int]) -> Tensor:
    """`_pad_tables`, made of lists."""
    width = max(num_blocks)
    blocks: list[int] = []
    for span, count in zip(spans, num_blocks, strict=True):
        blocks += span.block_table[:count]
        blocks += [0] * (width - count)
    return _integers("i", blocks).view(len(spans), width)


def _integers(code: Literal["i", "q"], values: Iterable[int]) -> Tensor:
    """Tensor of integers, "i": int32, "q": int64 (codes of `array`). Code of numpy's would be 4 MB more in memory."""
    found = array(code, values)
    dtype = torch.int32 if code == "i" else torch.int64
    return torch.frombuffer(found, dtype=dtype) if found else torch.empty(0, dtype=dtype)


def _wanted(span: Span, first: int, count: int) -> Wanted:
    assert span.seq is not None
    return Wanted(span.seq, span.seq.num_preemptions, span.block_table, first, count)


def _pad_tables(spans: list[Span], num_blocks: list[int]) -> NDArray[np.int32]:
    """int32 [B, max_blocks] of the blocks that the spans read, padded with 0."""
    tables = np.zeros((len(spans), max(num_blocks)), dtype=np.int32)
    for row, span, count in zip(tables, spans, num_blocks, strict=True):
        row[:count] = span.block_table[:count]
    return tables


def _find_slots(
    spans: list[Span],
    first_blocks: Integers,
    num_blocks: Integers,
    owner: Integers,
    positions: Integers,
    block_size: int,
) -> NDArray[np.int64]:
    """Where each token's key and value go; only the blocks that are written to are looked at."""
    written = [
        span.block_table[first:count]
        for span, first, count in zip(spans, first_blocks.tolist(), num_blocks.tolist(), strict=True)
    ]
    ends = (num_blocks - first_blocks).cumsum()
    blocks = np.fromiter(chain.from_iterable(written), dtype=np.int64, count=int(ends[-1]))
    slots: NDArray[np.int64] = (
        blocks[(ends - num_blocks)[owner] + positions // block_size] * block_size + positions % block_size
    )
    return slots
