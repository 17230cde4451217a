"""A heap of names whose keys mostly grow. Pure.

A key that has grown is noticed when its name comes to the top, so growing costs nothing; whoever lowers a key calls
`update`. All operations are O(log n), amortized. Invariant: `peek` returns the name with the smallest key there is now,
provided that every lowered key was updated.
"""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=tuple[float | str, ...])
_SLACK = 64
"""Superseded entries that are kept whatever the number of names."""


class LazyHeap(Generic[KeyT]):
    """Names by their keys. key: the key of a name that is in the heap, as it is now."""

    def __init__(self, key: Callable[[str], KeyT]) -> None:
        self._key = key
        self._entries: list[tuple[KeyT, int, str]] = []
        self._valid: dict[str, int] = {}
        """Number of the entry that counts, by name; others of that name are superseded."""
        self._last = 0

    def __len__(self) -> int:
        return len(self._valid)

    @property
    def num_entries(self) -> int:
        """Entries in memory, the superseded ones included."""
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._valid

    def update(self, name: str) -> None:
        """Put a name in, or take note that its key is lower."""
        if len(self._entries) > 2 * len(self._valid) + _SLACK:
            self._entries = [entry for entry in self._entries if self._valid.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)
        self._last += 1
        self._valid[name] = self._last
        heapq.heappush(self._entries, (self._key(name), self._last, name))

    def remove(self, name: str) -> None:
        """Take a name out. Unknown names are ignored."""
        self._valid.pop(name, None)

    def peek(self) -> tuple[KeyT, str] | None:
        """The smallest key and its name. Returns None if the heap is empty."""
        entries = self._entries
        while entries:
            key, number, name = entries[0]
            if self._valid.get(name) != number:
                heapq.heappop(entries)
                continue
            now = self._key(name)
            if now <= key:
                return now, name
            heapq.heapreplace(entries, (now, number, name))
        return None
