"""The mirror in Python alone, kept as one map from key to a bitmask of replicas, and a set of keys for each replica.

It needs no compiler, and is what `native_index` is held against. About 190 bytes for each block and replica.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.prefix.index import MAX_BLOCKS_PER_REPLICA, MAX_PREDICTIONS, ApplyResult
from penstock.wire.frames import BlockEvents, split_keys


@dataclass(slots=True)
class _Replica:
    bit: int
    epoch: str
    event_seq: int | None = None
    """Number of the last events applied; None: unknown until a snapshot."""
    held: set[bytes] = field(default_factory=set)
    predicted: dict[bytes, int] = field(default_factory=dict)
    """Keys not in `held`, and the number of the latest `expect` that named them."""


class PlainIndex:
    """The `PrefixIndex` in Python alone."""

    def __init__(
        self, max_blocks_per_replica: int = MAX_BLOCKS_PER_REPLICA, max_predictions: int = MAX_PREDICTIONS
    ) -> None:
        self._max_blocks = max_blocks_per_replica
        self._max_predictions = max_predictions
        self._masks: dict[bytes, int] = {}
        self._replicas: dict[str, _Replica] = {}
        self._by_bit: dict[int, str] = {}
        self._lapses: list[tuple[float, int, str, list[bytes]]] = []
        """Heap, an entry for each `expect`; keys that were confirmed, renewed or removed meanwhile are passed over."""
        self._num_lapses = 0
        """Keys in `_lapses`, all entries together."""
        self._order = itertools.count()

    def held(self, replica_id: str) -> frozenset[bytes]:
        replica = self._replicas.get(replica_id)
        return frozenset(replica.held) if replica else frozenset()

    def num_held(self, replica_id: str) -> int:
        replica = self._replicas.get(replica_id)
        return len(replica.held) if replica else 0

    def apply(self, replica_id: str, epoch: str, events: BlockEvents) -> ApplyResult:
        replica = self._replicas.get(replica_id)
        if replica is None or replica.epoch != epoch:
            self.remove(replica_id)
            replica = self._add(replica_id, epoch)
        if events.is_snapshot:
            return self._replace(replica, events)
        if replica.event_seq is None or events.event_seq > replica.event_seq + 1:
            self._forget(replica)
            return ApplyResult.GAP
        if events.event_seq <= replica.event_seq:
            return ApplyResult.STALE
        self._drop(replica, split_keys(events.removed))
        self._hold(replica, split_keys(events.stored))
        replica.event_seq = events.event_seq
        return ApplyResult.OK

    def extend(self, replica_id: str, keys: bytes) -> None:
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.event_seq is not None:
            self._hold(replica, split_keys(keys))

    def lookup(self, keys: Sequence[bytes], now: float) -> dict[str, int]:
        if self._lapses and self._lapses[0][0] <= now:
            self._lapse(now)
        get = self._masks.get
        found: dict[str, int] = {}
        alive = get(keys[0], 0) if keys else 0
        if not alive:
            return found
        for depth, key in enumerate(keys):
            mask = get(key, 0)
            if alive & mask != alive:
                self._record_depth(alive & ~mask, depth, found)
                alive &= mask
                if not alive:
                    return found
        self._record_depth(alive, len(keys), found)
        return found

    def expect(self, replica_id: str, keys: Sequence[bytes], now: float, ttl_s: float) -> None:
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        until = now + ttl_s
        masks, held, predicted, bit = self._masks, replica.held, replica.predicted, replica.bit
        expected = [key for key in keys if key not in held][: self._max_predictions]
        if not expected:
            return
        number = next(self._order)
        for key in expected:
            predicted[key] = number
            masks[key] = masks.get(key, 0) | bit
        heapq.heappush(self._lapses, (until, number, replica_id, expected))
        self._num_lapses += len(expected)
        while self._num_lapses > self._max_predictions:
            self._end_predictions()

    def remove(self, replica_id: str) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._forget(replica)
            del self._by_bit[replica.bit]

    def collect(self) -> int:
        return len(self._masks)

    def _add(self, replica_id: str, epoch: str) -> _Replica:
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        self._by_bit[bit] = replica_id
        self._replicas[replica_id] = replica = _Replica(bit, epoch)
        return replica

    def _replace(self, replica: _Replica, events: BlockEvents) -> ApplyResult:
        if replica.event_seq is not None and events.event_seq < replica.event_seq:
            return ApplyResult.STALE
        self._drop(replica, list(replica.held))
        self._hold(replica, split_keys(events.stored))
        replica.event_seq = events.event_seq
        return ApplyResult.OK

    def _forget(self, replica: _Replica) -> None:
        """Remove all entries of a replica, predictions too."""
        self._drop(replica, list(replica.held))
        self._unmark(replica, list(replica.predicted))
        replica.predicted.clear()
        replica.event_seq = None

    def _hold(self, replica: _Replica, keys: list[bytes]) -> None:
        masks, held, predicted, bit = self._masks, replica.held, replica.predicted, replica.bit
        for key in keys[: max(0, self._max_blocks - len(held))]:
            held.add(key)
            predicted.pop(key, None)
            masks[key] = masks.get(key, 0) | bit

    def _drop(self, replica: _Replica, keys: list[bytes]) -> None:
        gone = [key for key in keys if key in replica.held]
        replica.held.difference_update(gone)
        self._unmark(replica, gone)

    def _unmark(self, replica: _Replica, keys: list[bytes]) -> None:
        masks, others = self._masks, ~replica.bit
        for key in keys:
            mask = masks[key] & others
            if mask:
                masks[key] = mask
            else:
                del masks[key]

    def _lapse(self, now: float) -> None:
        while self._lapses and self._lapses[0][0] <= now:
            self._end_predictions()

    def _end_predictions(self) -> None:
        """Remove the predictions of the `expect` that lapses first."""
        _, number, replica_id, keys = heapq.heappop(self._lapses)
        self._num_lapses -= len(keys)
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        ended = [key for key in keys if replica.predicted.get(key) == number]
        for key in ended:
            del replica.predicted[key]
        self._unmark(replica, ended)

    def _record_depth(self, bits: int, depth: int, found: dict[str, int]) -> None:
        """Enter the depth for each replica of a bitmask."""
        while bits:
            bit = bits & -bits
            found[self._by_bit[bit]] = depth
            bits ^= bit
