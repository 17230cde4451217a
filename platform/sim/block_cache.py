"""The KV blocks of a modelled replica: how many are free, which keys they cache, and the order in which those are
given up.

The same cache as `penstock.workers.engine.blocks`, counted instead of numbered. Its free list always has the blocks
without a key in front of those with one, so a count and an ordered map hold all that can be seen of it. Blocks that no
other request can have (`private`) are kept as a run for each sequence, without keys. What a sequence frees is one entry
of the order; keys of it that are held again stay there and are passed over, because their marks have changed.
Invariant: free blocks are blank or in the order; a cached key that nobody holds is marked with one entry of the order,
which has it.
"""

from collections import deque
from collections.abc import Sequence

from penstock.sim.sequence import ModelledSequence
from penstock.workers.engine.key_changes import KeyChanges, KeyLog

_MAX_PASSED_OVER = 4
"""Keys in the order, as a multiple of all blocks, from which on those that are to be passed over are taken out."""


class _Freed:
    """What one sequence freed: keys, of which the last is given up first, or a run of private blocks."""

    __slots__ = ("keys", "mark", "num_private", "seq")

    def __init__(self, mark: int, keys: list[bytes], seq: ModelledSequence | None = None, num_private: int = 0) -> None:
        self.mark = mark
        self.keys = keys
        self.seq = seq
        self.num_private = num_private


class BlockCache:
    """The blocks of one replica."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        """Blocks that nobody holds, cached ones included."""
        self._num_blank = num_blocks
        """Free blocks without a key."""
        self._holders: dict[bytes, int] = {}
        """Sequences that hold each cached key; of one that nobody holds its entry's mark, below zero."""
        self._order: deque[_Freed] = deque()
        """Free blocks with a key and private runs, those to be given up first in front."""
        self._private: dict[ModelledSequence, _Freed] = {}
        self._num_listed = 0
        """Keys in the order, those to be passed over included."""
        self._last_mark = 0
        self._changes = KeyLog()

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
        entry = self._private.get(seq)
        return 0 if entry is None else entry.num_private

    def num_free_among(self, keys: Sequence[bytes]) -> int:
        """Cached keys that nobody holds, among these."""
        holders = self._holders
        return sum([holders[key] < 0 for key in keys])

    def take(self, keys: Sequence[bytes]) -> None:
        """Hold cached keys."""
        holders = self._holders
        for key in keys:
            count = holders[key]
            if count < 0:
                self.num_free -= 1
                count = 0
            holders[key] = count + 1

    def take_private(self, seq: ModelledSequence) -> None:
        """Hold the private blocks that a sequence has left behind."""
        entry = self._private.pop(seq, None)
        if entry is not None:
            self.num_free -= entry.num_private
            entry.num_private = 0

    def allocate(self, count: int) -> None:
        """Take free blocks, those longest unused first; there must be as many."""
        assert count <= self.num_free, f"{count} blocks are needed, {self.num_free} are free"
        self.num_free -= count
        blank = min(count, self._num_blank)
        self._num_blank -= blank
        count -= blank
        while count:
            entry = self._order[0]
            count -= self._give_up(entry, count)
            if not entry.keys and not entry.num_private:
                self._order.popleft()

    def _give_up(self, entry: _Freed, most: int) -> int:
        """Forget blocks of an entry, at most so many; returns how many they were."""
        if entry.num_private:
            assert entry.seq is not None
            count = min(most, entry.num_private)
            entry.num_private -= count
            if not entry.num_private:
                del self._private[entry.seq]
            return count
        last, holders = entry.keys[-most:], self._holders
        last.reverse()
        del entry.keys[-most:]
        self._num_listed -= len(last)
        given = [key for key in last if holders.get(key) == entry.mark]
        for key in given:
            del holders[key]
        self._changes.remove_all(given)
        return len(given)

    def publish(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Offer held blocks under their keys. Returns the keys, with None where another block has that key already."""
        holders = self._holders
        new = [key for key in keys if key not in holders]
        holders.update(dict.fromkeys(new, 1))
        self._changes.store_all(new)
        if len(new) == len(keys):
            return list(keys)
        stored = set(new)
        return [key if key in stored else None for key in keys]

    def free(self, seq: ModelledSequence, num_private: int, num_blank: int) -> None:
        """Free a sequence's blocks, its last one first. num_private: full ones without a key of others. num_blank:
        those that nobody finds again; `seq.held_keys` are in front of both."""
        if seq in self._private:  # computed again, because what stood before them was given up: their keys are taken
            num_private, num_blank = 0, num_blank + num_private
        self._last_mark -= 1
        mark = self._last_mark
        if num_private:
            self._private[seq] = entry = _Freed(mark, [], seq, num_private)
            self._order.append(entry)
        keys = self._let_go(seq.held_keys, mark)
        if keys:
            self._order.append(_Freed(mark, keys))
            self._num_listed += len(keys)
        num_blank += seq.held_keys.count(None)
        self.num_free += num_private + num_blank + len(keys)
        self._num_blank += num_blank
        seq.held_keys = []
        if self._num_listed > _MAX_PASSED_OVER * self.num_blocks:
            self._compact()

    def _let_go(self, held: Sequence[bytes | None], mark: int) -> list[bytes]:
        """Count one holder less of each key; returns those that nobody holds any more, in order, marked."""
        holders, freed = self._holders, []
        for key in held:
            if key is None:
                continue
            count = holders[key]
            if count == 1:
                holders[key] = mark
                freed.append(key)
            else:
                holders[key] = count - 1
        return freed

    def _compact(self) -> None:
        """Take out of the order what would be passed over. Amortized: as many keys have been freed since."""
        holders = self._holders
        for entry in self._order:
            entry.keys = [key for key in entry.keys if holders.get(key) == entry.mark]
        self._order = deque(entry for entry in self._order if entry.keys or entry.num_private)
        self._num_listed = sum(len(entry.keys) for entry in self._order)

    def drain_changes(self) -> KeyChanges | None:
        """Changes of the cached keys since the last call. Returns None if there are none."""
        return self._changes.drain()

    def cached_keys(self) -> list[bytes]:
        """Every key the cache holds; private blocks have none."""
        return list(self._holders)

    def check(self) -> None:
        """Assert the invariants that can be seen without the sequences. O(blocks)."""
        holders = self._holders
        listed = [key for entry in self._order for key in entry.keys if holders.get(key) == entry.mark]
        num_private = sum(entry.num_private for entry in self._order)
        assert self.num_free == self._num_blank + len(listed) + num_private, (
            f"{self.num_free} blocks are free, {self._num_blank} blank, {len(listed)} keyed and {num_private} private"
        )
        assert sorted(listed) == sorted(key for key, count in holders.items() if count < 0), "a free key is not listed"
        assert all(entry.num_private for entry in self._private.values()), "a private run is empty"
