"""Block tables that stay on the device from step to step: a row for each sequence, of which a step sends what has
changed.

The host knows what every row holds (`TableRows`, no tensors), so a decode step sends an entry for a sequence whose last
block has become full, and nothing for the others. Kernels find a sequence's blocks by its row, in whatever order the
rows of a step come. A row belongs to its sequence until that ends or another one needs it; a sequence that has lost its
row or its blocks gets all of its entries sent.

Invariant: after `StepTables.change` the entries that a step reads are those of its sequences' own tables. Whoever can't
know whether it came to that calls `clear`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Wanted(NamedTuple):
    """What a step reads of a sequence's table."""

    owner: object
    """The sequence, by identity."""
    version: int
    """A number that changes when the sequence's blocks are taken away."""
    blocks: list[int]
    first: int
    """First entry that may differ from what the same version had before. Those before it hold computed tokens, so they
    stay what they are."""
    num_read: int
    """Leading entries that are read."""


class Changes(NamedTuple):
    """Where a step's sequences are in the table, and what changes there before it."""

    rows: NDArray[np.int32]
    """[B]: row of each sequence."""
    places: NDArray[np.int64]
    """[C]: row * width + entry, each once."""
    blocks: NDArray[np.int32]
    """[C]: what stands there from now on."""


@dataclass(slots=True)
class _Row:
    number: int
    version: int
    blocks: list[int] = field(default_factory=list)
    """Leading entries, as they were sent."""


class TableRows:
    """The rows of a table: whose each of them is, and what it holds."""

    def __init__(self, num_rows: int, width: int) -> None:
        """num_rows: at least as many as a step has sequences. width: entries of a row."""
        self._num_rows = num_rows
        self._width = width
        self.clear()

    def clear(self) -> None:
        """Forget all rows: every entry is sent again."""
        self._rows: dict[object, _Row] = {}
        self._free = list(range(self._num_rows))[::-1]

    def forget(self, owner: object) -> None:
        """Give back the row of a sequence that has ended, if it has one."""
        row = self._rows.pop(owner, None)
        if row is not None:
            self._free.append(row.number)

    def update(self, wanted: Sequence[Wanted]) -> Changes:
        """Bring the rows of a step's sequences up to date."""
        self._make_room(wanted)
        numbers: list[int] = []
        places: list[int] = []
        blocks: list[int] = []
        for owner, version, table, first, count in wanted:
            assert count <= min(len(table), self._width), "a step reads entries that its table does not have"
            row = self._rows.get(owner)
            if row is None or row.version != version:
                number = self._free.pop() if row is None else row.number
                row = self._rows[owner] = _Row(number, version)
            numbers.append(row.number)
            known, begin = row.blocks, min(first, len(row.blocks))
            if known[begin:count] != table[begin:count]:
                changed = [
                    place for place in range(begin, count) if place >= len(known) or known[place] != table[place]
                ]
                places += [row.number * self._width + place for place in changed]
                blocks += [table[place] for place in changed]
                known[begin:count] = table[begin:count]
        return Changes(
            np.array(numbers, dtype=np.int32), np.array(places, dtype=np.int64), np.array(blocks, dtype=np.int32)
        )

    def _make_room(self, wanted: Sequence[Wanted]) -> None:
        """Take rows from sequences that are not in the step, if there are too few for those that have none."""
        rows = self._rows
        num_missing = sum([each.owner not in rows for each in wanted]) - len(self._free)
        if num_missing > 0:
            going = {each.owner for each in wanted}
            others = [owner for owner in rows if owner not in going]
            assert len(others) >= num_missing, f"a step has {len(wanted)} sequences, the table {self._num_rows} rows"
            for owner in others[:num_missing]:
                self.forget(owner)


class StepTables(NamedTuple):
    """A device's table, and `Changes` for a step; arrays are tensors on the host."""

    table: Tensor
    """int32 [rows, width], on the device."""
    rows: Tensor
    """int32 [B]."""
    places: Tensor
    """int64 [C]."""
    blocks: Tensor
    """int32 [C]."""

    def change(self, places: Tensor, blocks: Tensor) -> None:
        """Write the changes, which are on the device now."""
        if len(places):
            self.table.view(-1).index_copy_(0, places, blocks)

    def unchanged(self) -> "StepTables":
        """The same rows for a step that changes nothing."""
        return self._replace(places=self.places[:0], blocks=self.blocks[:0])


class BlockTables:
    """The rows, and the table on its device. One thread at a time."""

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        """A table of zeros; arguments as of `TableRows`."""
        self.table = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._rows = TableRows(num_rows, width)

    def update(self, wanted: Sequence[Wanted]) -> StepTables:
        """What a step has to change before it reads the table."""
        return StepTables(self.table, *map(torch.from_numpy, self._rows.update(wanted)))

    def replace(self, block_tables: Tensor) -> StepTables:
        """The changes that put whole tables, int32 [B, at most width], into the first rows; no sequence keeps its
        row."""
        self._rows.clear()
        count, width = block_tables.shape
        rows = torch.arange(count, dtype=torch.int32)
        places = rows.long()[:, None] * self.table.shape[1] + torch.arange(width)
        return StepTables(self.table, rows, places.flatten(), block_tables.flatten())

    def forget(self, owner: object) -> None:
        """Give back the row of a sequence that has ended, if it has one."""
        self._rows.forget(owner)

    def clear(self) -> None:
        """Send every entry again: a step that was to change some has failed."""
        self._rows.clear()
