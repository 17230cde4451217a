"""The holders of a request, as a look-up found them: a mapping that is made when it is read, and an array over the
replicas of a pool without making it.

Not the index. Invariant: both say the same.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_FEW = 4
"""Replicas for which naming them takes less than an array of all."""


class Slots:
    """The slots of an index: which replica has which. version: another number whenever that has changed."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Replica by slot; empty where a slot never had any."""
        self.version = 0

    def give(self, slot: int, replica_id: str) -> None:
        self.version += 1
        self.names.extend([""] * (slot + 1 - len(self.names)))
        self.names[slot] = replica_id

    def take(self) -> None:
        """A replica has lost its slot."""
        self.version += 1


class SlotDepths(Mapping[str, int]):
    """Leading keys that each replica holds, by its id; those that hold none are left out. To be read before the index
    changes. slots, depths: as the index found them. find_slot: slot of a replica, None where it has none."""

    __slots__ = ("_by_id", "_depths", "_found", "find_slot", "slots")

    def __init__(
        self,
        slots: Slots,
        found: "array[int]",
        depths: "array[int]",
        find_slot: Callable[[str], int | None],
    ) -> None:
        self.slots = slots
        self.find_slot = find_slot
        self._found = found
        self._depths = depths
        self._by_id: dict[str, int] | None = None

    def __getitem__(self, replica_id: str) -> int:
        return self.by_id()[replica_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_id())

    def __len__(self) -> int:
        return len(self._found)

    def over(self, slots: NDArray[np.intp]) -> Floats:
        """Array [replicas] of the leading keys that each holds. slots: of the replicas, -1: none."""
        dense = np.zeros(len(self.slots.names) + 1)
        dense[np.frombuffer(self._found, np.uint32)] = self._depths
        return dense[slots]

    def by_id(self) -> dict[str, int]:
        """The same as a dict."""
        if self._by_id is None:
            names = self.slots.names
            self._by_id = {names[slot]: depth for slot, depth in zip(self._found, self._depths, strict=True)}
        return self._by_id


class HolderRows:
    """Reads what look-ups found as arrays over the same replicas."""

    def __init__(self, replica_ids: Sequence[str]) -> None:
        self._rows = {replica_id: row for row, replica_id in enumerate(replica_ids)}
        self._slots: Slots | None = None
        self._version = 0
        self._by_row: NDArray[np.intp] = np.empty(0, np.intp)

    def read(self, found: Mapping[str, int]) -> Floats:
        """Array [replicas] of the leading blocks that each holds."""
        rows = self._rows
        if isinstance(found, SlotDepths):
            if len(found) > _FEW:
                return found.over(self._find_slots(found))
            found = found.by_id()
        if 2 * len(found) > len(rows):
            return np.fromiter(map(found.get, rows, repeat(0)), float, len(rows))
        held = np.zeros(len(rows))
        for replica_id, count in found.items():
            row = rows.get(replica_id)
            if row is not None:
                held[row] = count
        return held

    def _find_slots(self, found: SlotDepths) -> NDArray[np.intp]:
        """Array [replicas] of their slots, -1 where one has none."""
        if found.slots is not self._slots or found.slots.version != self._version:
            slots = [found.find_slot(replica_id) for replica_id in self._rows]
            self._by_row = np.array([-1 if slot is None else slot for slot in slots], np.intp)
            self._slots, self._version = found.slots, found.slots.version
        return self._by_row
