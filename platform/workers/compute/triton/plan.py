"""How a step's queries are attended to on a GPU: which of them one by one, which as runs that are split over the
context, which as pieces of prompts. Tensors and sizes, no kernels.

Made once for a step, on the host, by numpy over sequences and tiles, never over the tokens of a context; and moved in
one transfer: no layer has to wait for the GPU to learn a length.

Invariant: how a sequence's queries are taken depends on their number and its context alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FEW_TOKENS = 16
"""New tokens of a sequence, at most, that are a run whatever the context: drafts of speculation, the ends of prompts. A
run's keys and values are read once for 16 queries, by many programs, each a part of the context; but each part leaves
a result for every query (4 bytes a number), which is read again."""
MOST_TOKENS = 64
"""New tokens of a run, at most, where the context is long."""
TOKENS_PER_QUERY = 256
"""Context for each query of a longer run, at least: so what its parts leave is about as much as keys and values, with
4 query heads to one of them. A piece of few queries keeps few programs busy, each with all of the
context."""
PIECE_TOKENS = 128
"""Queries of a tile of a piece. It is cut again by the rows that a program takes (queries times heads of a group),
which divide 128 times any group."""
ALIGNED = 4
"""Arrays of a transfer begin at multiples of so many numbers, 16 bytes, as kernels are compiled for."""

Integers = NDArray[np.integer[Any]]


class Rows(NamedTuple):
    """N queries, each by itself."""

    tokens: Tensor
    """int32 [N]: flat index of the query."""
    owners: Tensor
    """int32 [N]: its sequence, a row of the block tables."""
    visible: Tensor
    """int32 [N]: tokens of its sequence that it sees, its own included."""
    max_visible: int


class Tiles(NamedTuple):
    """N tiles, each of consecutive queries of one sequence."""

    tokens: Tensor
    """int32 [N]: flat index of the tile's first query."""
    owners: Tensor
    """int32 [N]: its sequence, a row of the block tables."""
    visible: Tensor
    """int32 [N]: tokens of its sequence that its last query sees, that query's own included; each query before sees one
    less."""
    counts: Tensor
    """int32 [N]: its queries."""
    places: Tensor
    """int32 [N]: queries of all tiles before it."""
    num_queries: int
    max_visible: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Every query of the step is in one of `rows`, `runs` and `pieces`."""

    block_tables: Tensor
    """int32 [B, max_blocks]."""
    rows: Rows | None
    runs: Tiles | None = None
    """Tiles of up to FEW_TOKENS queries."""
    pieces: Tiles | None = None
    """Tiles of up to PIECE_TOKENS queries, those that see most first."""


class _Cut(NamedTuple):
    """`Tiles` on the host."""

    tokens: Integers
    owners: Integers
    visible: Integers
    counts: Integers
    places: Integers


def make_plan(
    query_start: Tensor, context_len: Tensor, block_tables: Tensor, block_size: int, exact: bool, device: torch.device
) -> Plan:
    """The plan of a step; query_start, context_len and block_tables are the tensors of `AttentionBatch`, on the host.
    exact: all queries one by one, so that a result does not depend on how a chunk is cut."""
    starts, contexts = query_start.numpy(), context_len.numpy()
    news = np.diff(starts)
    assert contexts.max(initial=0) <= block_tables.shape[1] * block_size, "a query sees tokens that no block holds"
    is_row = np.full(len(news), exact) | (news == 1)
    is_run = ~is_row & (news <= np.maximum(FEW_TOKENS, np.minimum(MOST_TOKENS, contexts // TOKENS_PER_QUERY)))
    rows = _cut(is_row, 1, starts, news, contexts)
    runs = _cut(is_run, FEW_TOKENS, starts, news, contexts)
    pieces = _longest_first(_cut(~is_row & ~is_run, PIECE_TOKENS, starts, news, contexts))
    tables, *moved = _moved((block_tables.numpy(), *rows[:3], *runs, *pieces), device)
    tokens, owners, visible = moved[:3]
    return Plan(
        tables,
        Rows(tokens, owners, visible, int(rows.visible.max())) if len(rows.tokens) else None,
        _tiles(runs, moved[3:8]),
        _tiles(pieces, moved[8:]),
    )


def _cut(is_taken: NDArray[np.bool_], size: int, starts: Integers, news: Integers, contexts: Integers) -> _Cut:
    """New tokens of the sequences that are taken, in tiles of up to `size`."""
    (taken,) = is_taken.nonzero()
    numbers = -(-news[taken] // size)
    owners = taken.repeat(numbers)
    first = size * (np.arange(len(owners)) - (numbers.cumsum() - numbers).repeat(numbers))
    counts = np.minimum(size, news[owners] - first)
    visible = contexts[owners] - news[owners] + first + counts
    return _Cut(starts[owners] + first, owners, visible, counts, counts.cumsum() - counts)


def _longest_first(tiles: _Cut) -> _Cut:
    """Tiles in the order in which programs should start, so that none that takes long is left at the end."""
    order = np.argsort(-tiles.visible, kind="stable")
    return _Cut(*(array[order] for array in tiles))


def _tiles(tiles: _Cut, moved: Sequence[Tensor]) -> Tiles | None:
    if not len(tiles.tokens):
        return None
    tokens, owners, visible, counts, places = moved
    return Tiles(tokens, owners, visible, counts, places, int(tiles.counts.sum()), int(tiles.visible.max()))


def _moved(arrays: Sequence[Integers], device: torch.device) -> list[Tensor]:
    """Arrays as int32 on the device, all in one transfer, which the host does not wait for."""
    starts = list(accumulate((-(-array.size // ALIGNED) * ALIGNED for array in arrays), initial=0))
    staged = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    on_host = staged.numpy()
    for start, array in zip(starts, arrays, strict=False):
        on_host[start : start + array.size] = array.ravel()
    moved = staged.to(device, non_blocking=True)
    return [moved[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=False)]
