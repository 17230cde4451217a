"""The adapters of a step as a GPU's kernels want them (`low_rank`): which rows belong to which adapter, and where each
adapter's matrices lie. Tensors, no kernels.

Adapters come and go and their ranks differ, so nothing is copied together: a table of each says where its matrices are.
Tables are made when adapters are loaded; those of the adapters that steps have stay side by side on the device
(`AdapterTables`), where a step changes only what differs from the one before.

Invariants: kernels follow a table's addresses only for rows of a tile, so a table whose adapter is gone is never
followed. Whoever launches a step keeps its adapters until the step has ended.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

PARTS = 3
"""Modules in one matrix of the model, at most."""
FIELDS = 2 + 5 * PARTS
"""Fields of a matrix's entry: address of A [rank of all parts, K], its rank; for each part first and last column + 1 of
the output, address of B [columns, rank], first of its ranks in A, rank. Zeros where there is none."""
FEW_ROWS = 128
SHORT_TILE, LONG_TILE = 16, 64
"""Rows that a program takes, of a step with up to FEW_ROWS tokens, and with more."""


class AdapterMatrices(NamedTuple):
    """What an adapter adds to one matrix; see `penstock.workers.compute.lora.LowRank`."""

    a: Tensor
    parts: Sequence[tuple[int, int, Tensor]]
    """First column, last + 1, B with the scaling in it."""


class Segments(NamedTuple):
    """The adapted rows of a step. Rows and tiles are made on the host and go to the device with the step."""

    tables: Tensor
    """int64 [adapters, layers, matrices, FIELDS], on the device."""
    rows: Tensor
    """int64 [R]: tokens, adapter by adapter."""
    tiles: Tensor
    """int32 [P, 3]: place in `tables`, first of its rows in `rows`, how many; none in tiles that fill up."""
    tile_rows: int
    max_rank: int
    """Largest rank of an adapter, of all parts of a matrix together, or more."""

    def placed(self, rows: Tensor, tiles: Tensor) -> "Segments":
        """The same with rows and tiles that are on the device."""
        return self._replace(rows=rows, tiles=tiles)


class Tabled(Protocol):
    """An adapter; see `penstock.workers.compute.lora.LoraAdapter`."""

    @property
    def table(self) -> Tensor: ...
    @property
    def max_rank(self) -> int: ...


class AdapterTables:
    """Tables of adapters in slots on the device. One thread at a time."""

    def __init__(self, num_slots: int, max_rank: int, num_layers: int, num_matrices: int, device: torch.device) -> None:
        """max_rank: of a module of an adapter."""
        self.table = torch.zeros(num_slots, num_layers, num_matrices, FIELDS, dtype=torch.int64, device=device)
        """int64 [num_slots, layers, matrices, FIELDS]; it stays where it is."""
        self.max_rank = PARTS * max_rank
        """Rank of all modules of a matrix together, at most."""
        self._owners: dict[int, weakref.ref[Tabled]] = {}
        """The adapter whose table is in each slot that is taken, the one used longest ago first."""

    def hold(self, adapters: Sequence[Tabled]) -> bool:
        """Whether there are slots for the adapters of one step, of whatever rank they are."""
        return len(adapters) <= len(self.table) and all(adapter.max_rank <= self.max_rank for adapter in adapters)

    def place(self, adapters: Sequence[Tabled]) -> list[int]:
        """The slots of a step's adapters, to which those that have none are written, behind whatever the device was
        given to do before: over tables that are not in the step, of adapters that are gone first."""
        of_adapter = {id(owner): slot for slot, held in self._owners.items() if (owner := held()) is not None}
        found = [of_adapter.get(id(adapter)) for adapter in adapters]
        free = self._find_free({slot for slot in found if slot is not None})
        slots = []
        for adapter, known in zip(adapters, found, strict=True):
            slot = free.pop(0) if known is None else known
            self._owners.pop(slot, None)
            if known is None:
                self.table[slot].copy_(adapter.table)
            self._owners[slot] = weakref.ref(adapter)
            slots.append(slot)
        return slots

    def _find_free(self, taken: set[int]) -> list[int]:
        """Slots that the step does not need, those first whose tables nobody misses."""
        unused = [slot for slot in range(len(self.table)) if slot not in self._owners]
        others = [slot for slot in self._owners if slot not in taken]
        return unused + sorted(others, key=lambda slot: self._owners[slot]() is not None)


def table_of(layers: Sequence[Sequence[AdapterMatrices | None]], device: torch.device) -> Tensor:
    """int64 [layers, matrices, FIELDS] of contiguous matrices, which must outlive it."""
    return torch.tensor([[_entry(matrix) for matrix in layer] for layer in layers], dtype=torch.int64, device=device)


def make_segments(
    adapters: Sequence[Tabled],
    rows: Sequence[Tensor | None],
    num_tokens: int,
    tables: AdapterTables | None = None,
    tile: int | None = None,
) -> Segments:
    """rows: of each adapter, int64; None: all tokens of the step, of which there are num_tokens. tables: where the
    adapters' own are, or are brought; None, or without slots enough: they are put side by side for this step. tile:
    rows that a program takes; None: by the step's tokens."""
    if tables is not None and tables.hold(adapters):
        places, table, max_rank = tables.place(adapters), tables.table, tables.max_rank
    else:
        places, table = list(range(len(adapters))), torch.stack([adapter.table for adapter in adapters])
        max_rank = max(adapter.max_rank for adapter in adapters)
    of_each = [torch.arange(num_tokens) if own is None else own for own in rows]
    size = tile or tile_rows(num_tokens)
    tiles: list[tuple[int, int, int]] = []
    first = 0
    for place, own in zip(places, of_each, strict=True):
        tiles += [(place, first + start, min(size, len(own) - start)) for start in range(0, len(own), size)]
        first += len(own)
    cut = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 3)
    return Segments(table, torch.cat(of_each), cut, size, max_rank)


def tile_rows(num_tokens: int) -> int:
    """Rows that a program takes, of a step of so many tokens."""
    return SHORT_TILE if num_tokens <= FEW_ROWS else LONG_TILE


def most_tiles(num_tokens: int, num_adapters: int) -> int:
    """Tiles of so many tokens and adapters, at most: each adapter has one that is not full."""
    return num_tokens // tile_rows(num_tokens) + num_adapters


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
