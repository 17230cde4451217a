"""What replicas' block events write into the prefix index, long snapshots in pieces with the event loop in between.

Not the index, which a look-up may read at any time, and not the numbers of events, which the index checks. Invariant:
between two pieces the index holds of a replica what it holds by its latest events, less what is still to come: never a
key that was removed since the snapshot. What is to come is forgotten with the replica's epoch, at a gap, and when
another snapshot comes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.prefix.index import ApplyResult, PrefixIndex
from penstock.wire.frames import KEY_BYTES, BlockEvents, split_keys

PIECE_KEYS = 2048
"""Keys applied in one turn of the event loop: about half a millisecond in a mirror of 15 million entries."""


class BlockFeed(Protocol):
    """Takes the block events of replicas: an index itself, or `IndexFeed`."""

    def apply(self, replica_id: str, epoch: str, events: BlockEvents) -> ApplyResult:
        """Record events, as `PrefixIndex.apply` does."""

    def remove(self, replica_id: str) -> None:
        """Remove a replica, as `PrefixIndex.remove` does."""


@dataclass(slots=True)
class _Rest:
    """Keys of a snapshot from `begin` on, in bytes, that are still to be applied."""

    keys: bytes
    begin: int
    removed: set[bytes] = field(default_factory=set)
    """Keys that the replica has lost since."""


class IndexFeed:
    """The `BlockFeed` of a gateway. Snapshots of several replicas are applied in turn, a piece a turn of the loop."""

    def __init__(
        self, index: PrefixIndex, call_soon: Callable[[Callable[[], None]], object], piece_keys: int = PIECE_KEYS
    ) -> None:
        """call_soon: of the event loop; calls its argument in a later turn."""
        self._index = index
        self._piece_bytes = piece_keys * KEY_BYTES
        self._call_soon = call_soon
        self._rests: dict[str, _Rest] = {}
        """What is to come by replica, in the order in which they have their turn."""
        self._is_called = False

    def apply(self, replica_id: str, epoch: str, events: BlockEvents) -> ApplyResult:
        """Apply events, of a long snapshot only the beginning at once."""
        rest = None
        if events.is_snapshot and len(events.stored) > self._piece_bytes:
            rest = _Rest(events.stored, self._piece_bytes)
            events = BlockEvents(events.event_seq, events.stored[: rest.begin], is_snapshot=True)
        applied = self._index.apply(replica_id, epoch, events)
        if applied is ApplyResult.GAP or (applied is ApplyResult.OK and events.is_snapshot):
            self._rests.pop(replica_id, None)
        elif applied is ApplyResult.OK and events.removed and replica_id in self._rests:
            self._rests[replica_id].removed.update(split_keys(events.removed))
        if applied is ApplyResult.OK and rest is not None:
            self._rests[replica_id] = rest
            self._go_on()
        return applied

    def remove(self, replica_id: str) -> None:
        self._rests.pop(replica_id, None)
        self._index.remove(replica_id)

    def _go_on(self) -> None:
        if self._rests and not self._is_called:
            self._is_called = True
            self._call_soon(self._apply_piece)

    def _apply_piece(self) -> None:
        self._is_called = False
        if not self._rests:
            return
        replica_id, rest = next(iter(self._rests.items()))
        end = rest.begin + self._piece_bytes
        keys = rest.keys[rest.begin : end]
        if rest.removed:
            keys = b"".join([key for key in split_keys(keys) if key not in rest.removed])
        del self._rests[replica_id]
        try:
            self._index.extend(replica_id, keys)
            rest.begin = end
            if end < len(rest.keys):
                self._rests[replica_id] = rest  # behind the others: each replica's beginnings count soon
        finally:
            self._go_on()
