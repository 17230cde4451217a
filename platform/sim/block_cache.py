"""The KV blocks of a modelled replica: how many are free, which keys they cache, and the order in which those are
given up.

The same cache as `penstock.workers.engine.blocks`, counted instead of numbered. Its free list always has the blocks
without a key in front of those with one, so a count and an ordered map hold all that can be seen of it. Blocks that no
other request can have (`private`) are kept as a run for each sequence, without keys. Invariant: free blocks are blank
or in the order; a cached key that nobody holds is in the order.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from penstock.sim.sequence import ModelledSequence


class KeyChanges(NamedTuple):
    """Keys the cache gained and lost, net."""

    stored: list[bytes]
    removed: list[bytes]


class BlockCache:
    """The blocks of one replica."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        """Blocks that nobody holds, cached ones included."""
        self._num_blank = num_blocks
        """Free blocks without a key."""
        self._holders: dict[bytes, int] = {}
        """Sequences that hold each cached key."""
        self._order: OrderedDict[bytes | ModelledSequence, int] = OrderedDict()
        """Free blocks with a key, and runs of private ones with their lengths, the first to be given up first."""
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def match(self, keys: Sequence[bytes], limit: int) -> int:
        """Number of leading `keys` that are cached, at most `limit`."""
        holders, count = self._holders, 0
        for key in keys[:limit]:
            if key not in holders:
                break
            count += 1
        return count

    def private_run(self, seq: ModelledSequence) -> int:
        """Private blocks that a sequence has left behind."""
        return self._order.get(seq, 0)

    def num_free_among(self, keys: Sequence[bytes]) -> int:
        """Cached keys that nobody holds, among these."""
        holders = self._holders
        return sum([not holders[key] for key in keys])

    def take(self, keys: Sequence[bytes]) -> None:
        """Hold cached keys."""
        holders, order = self._holders, self._order
        for key in keys:
            if not holders[key]:
                del order[key]
                self.num_free -= 1
            holders[key] += 1

    def take_private(self, seq: ModelledSequence) -> None:
        """Hold the private blocks that a sequence has left behind."""
        self.num_free -= self._order.pop(seq, 0)

    def allocate(self, count: int) -> None:
        """Take free blocks, those longest unused first; there must be as many."""
        assert count <= self.num_free, f"{count} blocks are needed, {self.num_free} are free"
        self.num_free -= count
        blank = min(count, self._num_blank)
        self._num_blank -= blank
        count -= blank
        order = self._order
        while count:
            entry = next(iter(order))
            if isinstance(entry, bytes):
                del order[entry]
                self._forget(entry)
                count -= 1
            elif order[entry] > count:
                order[entry] -= count
                return
            else:
                count -= order.pop(entry)

    def publish(self, key: bytes) -> bool:
        """Offer a held block under its key. Returns False if another block has that key already."""
        if key in self._holders:
            return False
        self._holders[key] = 1
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = None
        return True

    def free(self, seq: ModelledSequence, num_private: int, num_blank: int) -> None:
        """Free a sequence's blocks, its last one first. num_private: full ones without a key of others. num_blank:
        those that nobody finds again; `seq.held_keys` are in front of both."""
        order, holders = self._order, self._holders
        if seq in order:  # computed again, because what stood before them was given up: their keys are taken
            num_private, num_blank = 0, num_blank + num_private
        self.num_free += num_private + num_blank
        self._num_blank += num_blank
        if num_private:
            order[seq] = num_private
        for key in reversed(seq.held_keys):
            if key is None:
                self._num_blank += 1
                self.num_free += 1
                continue
            holders[key] -= 1
            if not holders[key]:
                order[key] = 1
                self.num_free += 1
        seq.held_keys = []

    def drain_changes(self) -> KeyChanges | None:
        """Changes of the cached keys since the last call. Returns None if there are none."""
        if not self._stored and not self._removed:
            return None
        changes = KeyChanges(list(self._stored), list(self._removed))
        self._stored.clear()
        self._removed.clear()
        return changes

    def cached_keys(self) -> list[bytes]:
        """Every key the cache holds; private blocks have none."""
        return list(self._holders)

    def check(self) -> None:
        """Assert the invariants that can be seen without the sequences. O(blocks)."""
        in_order = sum(self._order.values())
        assert self.num_free == self._num_blank + in_order, (
            f"{self.num_free} blocks are free, {self._num_blank} blank and {in_order} in order"
        )
        free_keys = {key for key, count in self._holders.items() if not count}
        assert free_keys == {entry for entry in self._order if isinstance(entry, bytes)}, "a free key is not in order"

    def _forget(self, key: bytes) -> None:
        del self._holders[key]
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None
