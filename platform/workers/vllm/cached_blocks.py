"""The keys of the blocks that vLLM's KV cache holds, by its events: what the replica reports as its own cache.

Not the cache, which is vLLM's, as are its hashes, of which only equality matters here. Keys are those of the sequences
that filled the blocks (`penstock.prefix.hashing`). vLLM's blocks and ours may differ in size: a block of ours counts
with that block of vLLM's in which it ends. Invariants: a key is held as long as one of vLLM's blocks with it is; events
are numbered one by one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import BlockEvents
from penstock.workers.engine.sequence import Sequence
from penstock.workers.vllm.bridge import BlockHash, CacheEvent, Removed, Stored


@dataclass(slots=True)
class _Block:
    """A hash of vLLM's that its cache holds."""

    place: int
    """Blocks of the sequence before it."""
    keys: list[bytes]
    """Keys of the blocks of ours that end in it."""
    count: int = 0
    """Blocks of vLLM's with this hash."""


class CachedBlocks:
    """Keys of ours by vLLM's hashes."""

    def __init__(self, hasher: ChainHasher) -> None:
        self._hasher = hasher
        self._blocks: dict[BlockHash, _Block] = {}
        self._holders: dict[bytes, int] = {}
        """Number of vLLM's hashes that have a key."""
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self.event_seq = 0
        """Number of the events that were drained last."""

    def record(
        self, events: Iterable[CacheEvent], find: Callable[[int], Sequence | None], vllm_block_size: int
    ) -> None:
        """Record what vLLM's cache gained and lost, in order. find: a sequence by its number; of one that is not known
        nothing is recorded. vllm_block_size: tokens in one of vLLM's blocks."""
        for event in events:
            if isinstance(event, Removed):
                self._remove(event.hashes)
            elif isinstance(event, Stored):
                seq = find(event.rid)
                if seq is not None:
                    self._store(seq, event, vllm_block_size)
            else:
                for name in list(self._blocks):
                    self._forget(name)

    def drain(self) -> BlockEvents | None:
        """Keys gained and lost since the last call, net. Returns None if there are none."""
        if not self._stored and not self._removed:
            return None
        self.event_seq += 1
        events = BlockEvents(self.event_seq, b"".join(self._stored), b"".join(self._removed))
        self._stored.clear()
        self._removed.clear()
        return events

    def snapshot(self) -> BlockEvents:
        """Every key that is held, parents before their children."""
        return BlockEvents(self.event_seq, b"".join(self._holders), is_snapshot=True)

    def _store(self, seq: Sequence, event: Stored, size: int) -> None:
        """Record blocks of a sequence, whose keys are completed; behind a parent that is not known nothing is recorded,
        nor are blocks of tokens that the sequence does not have."""
        before = None if event.parent is None else self._blocks.get(event.parent)
        if event.parent is not None and before is None:
            return
        self._complete_keys(seq)
        for place, name in enumerate(event.hashes, 0 if before is None else before.place + 1):
            if (place + 1) * size > len(seq.token_ids):
                return
            if name not in self._blocks:
                self._hold(name, place, seq, size)
            self._blocks[name].count += 1

    def _complete_keys(self, seq: Sequence) -> None:
        size = self._hasher.block_size
        known, num_full = len(seq.block_keys), len(seq.token_ids) // size
        if known < num_full:
            keys = self._hasher.extend(seq.chain_key, seq.token_ids[known * size : num_full * size])
            seq.block_keys += keys
            seq.chain_key = keys[-1]

    def _hold(self, name: BlockHash, place: int, seq: Sequence, size: int) -> None:
        ours = self._hasher.block_size
        keys = seq.block_keys[place * size // ours : (place + 1) * size // ours]
        self._blocks[name] = _Block(place, keys)
        for key in keys:
            held = self._holders.get(key, 0)
            self._holders[key] = held + 1
            if held:
                continue
            if key in self._removed:
                del self._removed[key]
            else:
                self._stored[key] = None

    def _remove(self, hashes: Iterable[BlockHash]) -> None:
        for name in hashes:
            block = self._blocks.get(name)
            if block is not None:
                block.count -= 1
                if not block.count:
                    self._forget(name)

    def _forget(self, name: BlockHash) -> None:
        for key in self._blocks.pop(name).keys:
            self._holders[key] -= 1
            if self._holders[key]:
                continue
            del self._holders[key]
            if key in self._stored:
                del self._stored[key]
            else:
                self._removed[key] = None
