"""The pool of KV blocks: reference counts, the prefix cache over them, and the order in which cached blocks are given
up.

Not the KV itself, which the runner holds: a block here is a number. A block is free when no block table contains it. A
freed block keeps its key and stays cached until it is allocated again; a request with the same prefix can take it from
the free list before that. The free list is therefore the LRU: blocks are allocated from its front and freed to its end,
the deepest of a chain first, so that a chain is never evicted from its root. A freed block without a key goes to the
front, because nobody can find it again.

Invariants (`check`): held + free = all; a block's reference count is the number of block tables that contain it; every
key names one block.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from penstock.workers.engine.key_changes import KeyChanges, KeyLog
from penstock.workers.engine.sequence import Sequence


class BlockPool:
    """The blocks of one replica's KV cache, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._changes = KeyLog()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free)

    def cached_keys(self) -> list[bytes]:
        """Every key the cache holds, parents before their children."""
        return list(self._cached)

    def num_holders(self, block: int) -> int:
        """Block tables that contain the block."""
        return self._refs[block]

    def garbage(self) -> Iterator[int]:
        """Blocks that nobody holds and no key names: their KV must not matter, and a test may poison it."""
        return (block for block in self._free if self._keys[block] is None)

    def match(self, keys: list[bytes], limit: int) -> list[int]:
        """The cached blocks of the longest leading run of `keys`, at most `limit`; changes nothing."""
        blocks: list[int] = []
        cached = self._cached
        for key in keys[:limit]:
            block = cached.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_take(self, hits: list[int], count: int, freed: Iterable[list[int]] = ()) -> bool:
        """Whether `take(hits)` and then `allocate(count)` succeed: a hit that lies in the free list can't be allocated
        as well. freed: block tables that would be freed before."""
        refs, given = self._refs, Counter(block for table in freed for block in table)
        num_freed = sum(refs[block] == num for block, num in given.items())
        return count + sum(refs[block] == given[block] for block in hits) <= len(self._free) + num_freed

    def take(self, hits: Iterable[int]) -> None:
        """Hold cached blocks."""
        refs = self._refs
        for block in hits:
            if not refs[block]:
                del self._free[block]
            refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of arbitrary content, those longest unused first; there must be as many free. What they cached
        is forgotten."""
        assert count <= len(self._free), f"{count} blocks are needed, {len(self._free)} are free"
        return [self._allocate_one() for _ in range(count)]

    def _allocate_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._refs[block] = 1
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            self._forget(key)
        return block

    def free(self, table: list[int]) -> None:
        """Free a sequence's blocks, its last one first. A block with a key stays cached until it is allocated again."""
        refs = self._refs
        for block in reversed(table):
            refs[block] -= 1
            if not refs[block]:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: bytes) -> None:
        """Offer a held block, whose KV is written, under its key. If another block has that key already, that one stays
        (tables never change)."""
        assert self._refs[block], f"block {block} is published by nobody who holds it"
        if key in self._cached:
            return
        assert self._keys[block] is None, f"block {block} has a key already"
        self._cached[key] = block
        self._keys[block] = key
        self._changes.store(key)

    def withdraw(self, table: Iterable[int]) -> None:
        """Take the keys from held blocks, whose KV is not to be trusted: nobody finds them any more. Who holds them
        already keeps them."""
        for block in table:
            key = self._keys[block]
            if key is not None:
                self._keys[block] = None
                self._forget(key)

    def _forget(self, key: bytes) -> None:
        del self._cached[key]
        self._changes.remove(key)

    def drain_changes(self) -> KeyChanges | None:
        """Changes of the cache since the last call. Returns None if there are none."""
        return self._changes.drain()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert the invariants, `sequences` being all that hold blocks. O(blocks)."""
        holders = Counter(block for seq in sequences for table in seq.block_tables for block in table)
        held = {block for block, refs in enumerate(self._refs) if refs}
        assert held.isdisjoint(self._free), "a held block is in the free list"
        assert len(held) + len(self._free) == self.num_blocks, (
            f"{len(held)} held + {len(self._free)} free blocks are not {self.num_blocks}"
        )
        assert holders == Counter({block: self._refs[block] for block in held}), (
            "reference counts differ from the tables' entries"
        )
        named = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert named == self._cached, "keys and blocks do not name each other"
