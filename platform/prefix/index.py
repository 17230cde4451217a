"""The router's mirror of who holds which KV blocks: pure data, fed by the replicas' block events.

Not a tree: a block's key already stands for all that precedes it, so a set of keys per replica is enough, kept as one map from key to a
bitmask of replicas. Invariants: an entry is what its replica's present epoch announced, or a prediction that has not lapsed; a replica
whose events were missed has no entries until a snapshot comes (better to know nothing than to be wrong); a removed one has none at once.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from penstock.wire.frames import BlockEvents, split_keys

MAX_BLOCKS_PER_REPLICA = 2**20
"""Keys kept of one replica; what it stores beyond is not mirrored (about 150 bytes each)."""
MAX_PREDICTIONS = 2**17
"""Predictions kept over all replicas; one more lets the oldest lapse."""


class Applied(Enum):
    OK = "ok"
    STALE = "stale"
    """Older than what is known; ignored."""
    GAP = "gap"
    """Something was missed: the replica's entries are dropped, and a snapshot is needed."""


@dataclass(slots=True)
class Accuracy:
    """What routing expected against what engines found, in blocks. All zero at first, when both ratios count as 1."""

    predicted: int = 0
    true: int = 0
    """Predicted and found."""
    found: int = 0

    def observe(self, predicted: int, found: int) -> None:
        """One finished admission: leading blocks that the index promised on the chosen replica, and those its cache had."""
        self.predicted += predicted
        self.found += found
        self.true += min(predicted, found)

    @property
    def precision(self) -> float:
        return self.true / self.predicted if self.predicted else 1.0

    @property
    def recall(self) -> float:
        return self.true / self.found if self.found else 1.0


@dataclass(slots=True)
class _Replica:
    bit: int
    epoch: str
    seq: int | None = None
    """Of the last events applied; None: unknown until a snapshot."""
    held: set[bytes] = field(default_factory=set)
    predicted: dict[bytes, float] = field(default_factory=dict)
    """Keys not in `held`, and when the prediction lapses."""


class PrefixIndex:
    """Mirror over all replicas of all pools (keys of different models never meet). Not thread safe: one event loop owns it."""

    def __init__(self, max_blocks_per_replica: int = MAX_BLOCKS_PER_REPLICA, max_predictions: int = MAX_PREDICTIONS) -> None:
        self.accuracy = Accuracy()
        self.num_gaps = 0
        self._max_blocks = max_blocks_per_replica
        self._max_predictions = max_predictions
        self._masks: dict[bytes, int] = {}
        self._replicas: dict[str, _Replica] = {}
        self._by_bit: dict[int, str] = {}
        self._lapses: list[tuple[float, str, bytes]] = []
        """Heap; entries that were confirmed, renewed or removed meanwhile are passed over."""

    @property
    def num_blocks(self) -> int:
        """Distinct keys."""
        return len(self._masks)

    def held(self, replica_id: str) -> frozenset[bytes]:
        """Keys that the replica announced and still holds, without predictions."""
        replica = self._replicas.get(replica_id)
        return frozenset(replica.held) if replica else frozenset()

    def apply(self, replica_id: str, epoch: str, events: BlockEvents) -> Applied:
        """Take over what a replica's cache gained and lost. Another epoch is another cache: the old one's entries go."""
        replica = self._replicas.get(replica_id)
        if replica is None or replica.epoch != epoch:
            self.remove(replica_id)
            replica = self._add(replica_id, epoch)
        if events.is_snapshot:
            return self._replace(replica, events)
        if replica.seq is None or events.seq > replica.seq + 1:
            self._forget(replica)
            self.num_gaps += 1
            return Applied.GAP
        if events.seq <= replica.seq:
            return Applied.STALE
        self._drop(replica, split_keys(events.removed))
        self._hold(replica, split_keys(events.stored))
        replica.seq = events.seq
        return Applied.OK

    def lookup(self, keys: Sequence[bytes], now: float) -> dict[str, int]:
        """How many leading `keys` each replica holds (or is predicted to); replicas that hold none are left out."""
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
                self._name(alive & ~mask, depth, found)
                alive &= mask
                if not alive:
                    return found
        self._name(alive, len(keys), found)
        return found

    def expect(self, replica_id: str, keys: Sequence[bytes], now: float, ttl_s: float) -> None:
        """A request with these blocks has just gone to the replica: count them as there until it says so, or for `ttl_s`.

        Without this, requests of one burst that share a prefix would scatter. Unknown replicas are ignored.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        until = now + ttl_s
        for key in keys:
            if key not in replica.held:
                replica.predicted[key] = until
                self._masks[key] = self._masks.get(key, 0) | replica.bit
                heapq.heappush(self._lapses, (until, replica_id, key))
        while len(self._lapses) > self._max_predictions:
            self._end_prediction(*heapq.heappop(self._lapses))

    def remove(self, replica_id: str) -> None:
        """The replica is gone, and its cache with it. Unknown ones are ignored."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._forget(replica)
            del self._by_bit[replica.bit]

    def _add(self, replica_id: str, epoch: str) -> _Replica:
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        self._by_bit[bit] = replica_id
        self._replicas[replica_id] = replica = _Replica(bit, epoch)
        return replica

    def _replace(self, replica: _Replica, events: BlockEvents) -> Applied:
        if replica.seq is not None and events.seq < replica.seq:
            return Applied.STALE
        self._drop(replica, list(replica.held))
        self._hold(replica, split_keys(events.stored))
        replica.seq = events.seq
        return Applied.OK

    def _forget(self, replica: _Replica) -> None:
        """All entries, predictions too."""
        self._drop(replica, list(replica.held))
        self._unmark(replica, list(replica.predicted))
        replica.predicted.clear()
        replica.seq = None

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
        lapses = self._lapses
        while lapses and lapses[0][0] <= now:
            self._end_prediction(*heapq.heappop(lapses))

    def _end_prediction(self, until: float, replica_id: str, key: bytes) -> None:
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.predicted.get(key) == until:
            del replica.predicted[key]
            self._unmark(replica, [key])

    def _name(self, bits: int, depth: int, found: dict[str, int]) -> None:
        while bits:
            bit = bits & -bits
            found[self._by_bit[bit]] = depth
            bits ^= bit
