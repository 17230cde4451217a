"""What a cache of keyed blocks gained and lost since that was last told.

Invariant: a key is in one of the two lists or in none; one that came and went in between is in none.
"""

from collections.abc import Sequence
from typing import NamedTuple


class KeyChanges(NamedTuple):
    """Keys that a cache gained and lost since they were last drained, net: a key is in one of the two lists, never in
    both."""

    stored: list[bytes]
    removed: list[bytes]


class KeyLog:
    """Collects the changes of one cache, in the order in which they came."""

    def __init__(self) -> None:
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def store(self, key: bytes) -> None:
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = None

    def remove(self, key: bytes) -> None:
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None

    def store_all(self, keys: Sequence[bytes]) -> None:
        """Note several different keys at once, as `store` does one."""
        if self._removed.keys().isdisjoint(keys):
            self._stored.update(dict.fromkeys(keys))
        else:
            for key in keys:
                self.store(key)

    def remove_all(self, keys: Sequence[bytes]) -> None:
        """Note several different keys at once, as `remove` does one."""
        if self._stored.keys().isdisjoint(keys):
            self._removed.update(dict.fromkeys(keys))
        else:
            for key in keys:
                self.remove(key)

    def drain(self) -> KeyChanges | None:
        """Changes since the last call. Returns None if there are none."""
        if not self._stored and not self._removed:
            return None
        changes = KeyChanges(list(self._stored), list(self._removed))
        self._stored.clear()
        self._removed.clear()
        return changes
