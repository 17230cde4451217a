"""The adapters of a step as a GPU's kernels want them (`low_rank`): which rows belong to which adapter, and where each
adapter's matrices lie. Tensors, no kernels.

Adapters come and go and their ranks differ, so nothing is copied together: a table of each says where its matrices are,
and a step's tables side by side are all that a launch needs. Tables are made when adapters are loaded.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.workers.compute.triton.staging import send_once

PARTS = 3
"""Modules in one matrix of the model, at most."""
FIELDS = 2 + 5 * PARTS
"""Fields of a matrix's entry: address of A [rank of all parts, K], its rank; for each part first and last column + 1 of
the output, address of B [columns, rank], first of its ranks in A, rank. Zeros where there is none."""
FEW_ROWS = 128
SHORT_TILE, LONG_TILE = 16, 64
"""Rows that a program takes, of a step with up to FEW_ROWS adapted rows, and with more."""


class AdapterMatrices(NamedTuple):
    """What an adapter adds to one matrix; see `penstock.workers.compute.lora.LowRank`."""

    a: Tensor
    parts: Sequence[tuple[int, int, Tensor]]
    """First column, last + 1, B with the scaling in it."""


class Segments(NamedTuple):
    """The adapted rows of a step, on the device."""

    tables: Tensor
    """int64 [adapters, layers, matrices, FIELDS]."""
    rows: Tensor
    """int64 [R]: tokens, adapter by adapter."""
    tiles: Tensor
    """int32 [P, 3]: adapter, first of its rows in `rows`, how many."""
    tile_rows: int
    max_rank: int
    """Largest rank in the step, of all parts of a matrix together."""


def table_of(layers: Sequence[Sequence[AdapterMatrices | None]], device: torch.device) -> Tensor:
    """int64 [layers, matrices, FIELDS] of contiguous matrices, which must outlive it."""
    return torch.tensor([[_entry(matrix) for matrix in layer] for layer in layers], dtype=torch.int64, device=device)


def make_segments(
    tables: Sequence[Tensor], max_rank: int, rows: Sequence[Tensor | None], num_tokens: int, device: torch.device
) -> Segments:
    """rows: of each adapter, int64; None: all tokens of the step, of which there are num_tokens."""
    of_each = [torch.arange(num_tokens) if own is None else own for own in rows]
    num_rows = sum(len(own) for own in of_each)
    tile_rows = SHORT_TILE if num_rows <= FEW_ROWS else LONG_TILE
    tiles: list[tuple[int, int, int]] = []
    first = 0
    for adapter, own in enumerate(of_each):
        tiles += [(adapter, first + start, min(tile_rows, len(own) - start)) for start in range(0, len(own), tile_rows)]
        first += len(own)
    placed_tiles = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 3)
    placed, cut = send_once([torch.cat(of_each).numpy(), placed_tiles.numpy()], device)
    return Segments(torch.stack(list(tables)), placed, cut, tile_rows, max_rank)


def _entry(matrices: AdapterMatrices | None) -> list[int]:
    if matrices is None:
        return [0] * FIELDS
    assert matrices.a.is_contiguous()
    entry = [matrices.a.data_ptr(), len(matrices.a)]
    begin = 0
    for start, end, b in matrices.parts:
        assert b.is_contiguous()
        entry += [start, end, b.data_ptr(), begin, b.shape[1]]
        begin += b.shape[1]
    return entry + [0] * (FIELDS - len(entry))
