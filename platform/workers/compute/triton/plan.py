"""How a step's queries are attended to on a GPU: which of them row by row, which sequences as dense products. Tensors
and sizes, no kernels.

Made once for a step, on the host, and moved: no layer has to wait for the GPU to learn a length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FEW_TOKENS = 8
"""New tokens of a sequence, at most, that are attended to row by row, the drafts of speculation for instance: each
reads the context again, but the kernel reads it in place, where the dense way first gathers it."""


class Rows(NamedTuple):
    """N queries, each by itself."""

    tokens: Tensor
    """int32 [N]: flat index of the query."""
    owners: Tensor
    """int32 [N]: its sequence, a row of the block tables."""
    visible: Tensor
    """int32 [N]: tokens of its sequence that it sees, its own included."""
    max_visible: int


class Piece(NamedTuple):
    """Consecutive queries of one sequence: the tokens [start, end) of the step, the last ones of the sequence's
    context."""

    start: int
    end: int
    blocks: Tensor
    """int64 [context]: block in which each token of the context lies."""
    offsets: Tensor
    """int64 [context]: place of each token in its block."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every query of the step is in `rows` or in one of `pieces`."""

    block_tables: Tensor
    """int32 [B, max_blocks]."""
    rows: Rows | None
    pieces: tuple[Piece, ...]


def make_plan(
    query_start: Tensor, context_len: Tensor, block_tables: Tensor, block_size: int, exact: bool, device: torch.device
) -> Plan:
    """The plan of a step; query_start, context_len and block_tables are the tensors of `AttentionBatch`, on the host.
    exact: all queries row by row, so that a result does not depend on how a chunk is cut."""
    starts, contexts = query_start.tolist(), context_len.tolist()
    tokens: list[int] = []
    owners: list[int] = []
    visible: list[int] = []
    pieces: list[Piece] = []
    for owner, (start, end, context) in enumerate(zip(starts[:-1], starts[1:], contexts, strict=True)):
        if exact or end - start <= FEW_TOKENS:
            tokens += range(start, end)
            owners += [owner] * (end - start)
            visible += range(context - (end - start) + 1, context + 1)
        else:
            pieces.append(_piece(start, end, context, block_tables[owner], block_size, device))
    rows = None
    if tokens:
        flat, owner_of, num_visible = _int32((tokens, owners, visible), device)
        rows = Rows(flat, owner_of, num_visible, max(visible))
    return Plan(block_tables.to(device), rows, tuple(pieces))


def _int32(lists: tuple[list[int], ...], device: torch.device) -> Iterator[Tensor]:
    """Each list as int32 on the device, all in one transfer."""
    yield from torch.tensor(lists, dtype=torch.int32).to(device)


def _piece(start: int, end: int, context: int, block_table: Tensor, block_size: int, device: torch.device) -> Piece:
    positions = torch.arange(context)
    blocks = block_table.long()[positions // block_size]
    return Piece(start, end, blocks.to(device), (positions % block_size).to(device))
