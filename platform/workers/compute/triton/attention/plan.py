"""How a step's queries are attended to on a GPU: which of them one by one, which as runs that are split over the
context, which as pieces of prompts. Tensors and sizes, no kernels.

Made once for a step, on the host, by numpy over sequences and tiles, never over the tokens of a context; and sent with
the step's other arrays (`staging`): no layer has to wait for the GPU to learn a length.

Invariant: how a sequence's queries are taken depends on their number and its context alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.workers.compute.triton.staging import Array, send_once

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

Integers = NDArray[np.integer[Any]]


class Rows(NamedTuple):
    """N queries, each by itself."""

    tokens: Tensor
    """int32 [N]: flat index of the query."""
    owners: Tensor
    """int32 [N]: its sequence's row of the block tables."""
    visible: Tensor
    """int32 [N]: tokens of its sequence that it sees, its own included."""
    max_visible: int


class Tiles(NamedTuple):
    """N tiles, each of consecutive queries of one sequence."""

    tokens: Tensor
    """int32 [N]: flat index of the tile's first query."""
    owners: Tensor
    """int32 [N]: its sequence's row of the block tables."""
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
    """int32 [N, max_blocks]."""
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


class HostPlan(NamedTuple):
    """The queries of a step's plan, before they are on the device."""

    rows: _Cut
    runs: _Cut
    pieces: _Cut

    @property
    def arrays(self) -> list[Array]:
        """What the device needs of it, int32."""
        return [array.astype(np.int32) for array in (*self.rows[:3], *self.runs, *self.pieces)]

    def on_device(self, block_tables: Tensor, arrays: Sequence[Tensor]) -> Plan:
        """The plan, with tables and arrays that are where the kernels run."""
        tokens, owners, visible = arrays[:3]
        return Plan(
            block_tables,
            Rows(tokens, owners, visible, int(self.rows.visible.max())) if len(self.rows.tokens) else None,
            _tiles(self.runs, arrays[3:8]),
            _tiles(self.pieces, arrays[8:]),
        )


def plan_queries(starts: Integers, contexts: Integers, owners: Integers, exact: bool) -> HostPlan:
    """How the queries of a step's sequences are taken. starts, contexts: `query_start` and `context_len` of
    `AttentionBatch`. owners: row of each sequence in the block tables. exact: all queries one by one, so that a result
    does not depend on how a chunk is cut."""
    news = np.diff(starts)
    is_row = np.full(len(news), exact) | (news == 1)
    is_run = ~is_row & (news <= np.maximum(FEW_TOKENS, np.minimum(MOST_TOKENS, contexts // TOKENS_PER_QUERY)))
    cuts = (
        _cut(is_row, 1, starts, news, contexts),
        _cut(is_run, FEW_TOKENS, starts, news, contexts),
        _longest_first(_cut(~is_row & ~is_run, PIECE_TOKENS, starts, news, contexts)),
    )
    return HostPlan(*(cut._replace(owners=owners[cut.owners]) for cut in cuts))


def make_plan(
    query_start: Tensor, context_len: Tensor, block_tables: Tensor, block_size: int, exact: bool, device: torch.device
) -> Plan:
    """The plan of a step that brings its tables with it; query_start, context_len and block_tables are the tensors of
    `AttentionBatch`, on the host. exact: as of `plan_queries`."""
    contexts = context_len.numpy()
    check_contexts(contexts, block_tables, block_size)
    queries = plan_queries(query_start.numpy(), contexts, np.arange(len(contexts)), exact)
    tables, *moved = send_once([block_tables.numpy(), *queries.arrays], device)
    return queries.on_device(tables, moved)


def check_contexts(contexts: Integers, block_tables: Tensor, block_size: int) -> None:
    """Assert that tables of such a shape can hold the blocks of all contexts."""
    assert contexts.max(initial=0) <= block_tables.shape[1] * block_size, "a query sees tokens that no block holds"


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
