"""The mirror over a map in C++: about 45 bytes for a block that one replica holds, less for each where several do.

The map knows slots, and which prediction an entry rests on; here are the replicas, their epochs and the predictions'
ends.
"""

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.prefix.holders import SlotDepths, Slots
from penstock.prefix.index import MAX_BLOCKS_PER_REPLICA, MAX_PREDICTIONS, ApplyResult, PrefixIndex
from penstock.prefix.native.build import load_library
from penstock.prefix.native.library import Library
from penstock.prefix.native.mirror_map import MirrorMap
from penstock.prefix.plain_index import PlainIndex
from penstock.wire.frames import KEY_BYTES, BlockEvents, split_keys


def open_index() -> PrefixIndex:
    """The mirror in C++, or where its map can't be built, with a warning, in Python."""
    library = load_library()
    return PlainIndex() if library is None else NativeIndex(library)


@dataclass(slots=True, eq=False)
class _Replica:
    epoch: str
    slot: int | None
    """None: the replica is gone."""
    event_seq: int | None = None
    """Number of the last events applied; None: unknown until a snapshot."""


class NativeIndex:
    """The `PrefixIndex` over a map in C++."""

    def __init__(
        self,
        library: Library,
        max_blocks_per_replica: int = MAX_BLOCKS_PER_REPLICA,
        max_predictions: int = MAX_PREDICTIONS,
    ) -> None:
        self._map = MirrorMap(library)
        self._max_blocks = max_blocks_per_replica
        self._max_predictions = max_predictions
        self._replicas: dict[str, _Replica] = {}
        self._slots = Slots()
        self._lapses: list[tuple[float, int, _Replica, int, bytes]] = []
        """Heap, an entry for each `expect`: its end, number, replica, origin and keys. Keys that were confirmed,
        renewed or removed meanwhile are passed over."""
        self._num_lapses = 0
        """Keys in `_lapses`, all entries together."""
        self._order = itertools.count()

    def held(self, replica_id: str) -> frozenset[bytes]:
        replica = self._replicas.get(replica_id)
        return frozenset() if replica is None else frozenset(split_keys(self._map.held(_slot(replica))))

    def num_held(self, replica_id: str) -> int:
        replica = self._replicas.get(replica_id)
        return 0 if replica is None else self._map.num_held(_slot(replica))

    def apply(self, replica_id: str, epoch: str, events: BlockEvents) -> ApplyResult:
        replica = self._replicas.get(replica_id)
        if replica is None or replica.epoch != epoch:
            self.remove(replica_id)
            replica = _Replica(epoch, None)
            self._give_slot(replica_id, replica, self._map.open())
            self._replicas[replica_id] = replica
        known = replica.event_seq
        if events.is_snapshot:
            if known is not None and events.event_seq < known:
                return ApplyResult.STALE
            self._give_slot(replica_id, replica, self._map.replace(_slot(replica), events.stored, self._max_blocks))
        elif known is None or events.event_seq > known + 1:
            slot = self._map.open()
            self._forget(replica)
            self._give_slot(replica_id, replica, slot)
            return ApplyResult.GAP
        elif events.event_seq <= known:
            return ApplyResult.STALE
        else:
            self._map.apply(_slot(replica), events.removed, events.stored, self._max_blocks)
        replica.event_seq = events.event_seq
        return ApplyResult.OK

    def extend(self, replica_id: str, keys: bytes) -> None:
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.event_seq is not None:
            self._map.apply(_slot(replica), b"", keys, self._max_blocks)

    def lookup(self, keys: Sequence[bytes], now: float) -> Mapping[str, int]:
        while self._lapses and self._lapses[0][0] <= now:
            self._end_predictions()
        return SlotDepths(self._slots, *self._map.look_up(b"".join(keys)), self._find_slot)

    def expect(self, replica_id: str, keys: Sequence[bytes], now: float, ttl_s: float) -> None:
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        slot, number = _slot(replica), next(self._order)
        predicted = self._map.expect(slot, number % 2**32, b"".join(keys), self._max_predictions)
        if not predicted:
            return
        heapq.heappush(self._lapses, (now + ttl_s, number, replica, self._map.origin(slot), predicted))
        self._num_lapses += len(predicted) // KEY_BYTES
        while self._num_lapses > self._max_predictions:
            self._end_predictions()

    def remove(self, replica_id: str) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._forget(replica)

    def collect(self) -> int:
        return self._map.collect()

    def _give_slot(self, replica_id: str, replica: _Replica, slot: int) -> None:
        replica.slot = slot
        self._slots.give(slot, replica_id)

    def _find_slot(self, replica_id: str) -> int | None:
        replica = self._replicas.get(replica_id)
        return None if replica is None else replica.slot

    def _forget(self, replica: _Replica) -> None:
        """Remove all entries of a replica, predictions too."""
        self._map.close(_slot(replica))
        self._slots.take()
        replica.slot = replica.event_seq = None

    def _end_predictions(self) -> None:
        """Remove the predictions of the `expect` that lapses first."""
        _, number, replica, origin, keys = heapq.heappop(self._lapses)
        self._num_lapses -= len(keys) // KEY_BYTES
        slot = replica.slot
        if slot is not None and self._map.origin(slot) != origin:
            slot = None
        self._map.lapse(slot, origin, number % 2**32, keys)


def _slot(replica: _Replica) -> int:
    assert replica.slot is not None
    return replica.slot
