"""The router's mirror of the KV blocks that each replica holds: the seam. Pure data, updated by the replicas' block
events.

Not a tree: a block's key already stands for all that precedes it, so it is enough to know who holds a key. Two
implementations: `plain_index`, in Python, and `native_index`, over a map in C++, for many replicas. Invariants: an
entry is what its replica's present epoch announced, or a prediction that has not lapsed; a replica whose events were
missed has no entries until a snapshot comes (better to know nothing than to be wrong); a removed one has none at
once.

Decisions: docs/decisions/prefix.md
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol

from penstock.wire.frames import BlockEvents

MAX_BLOCKS_PER_REPLICA = 2**20
"""Keys kept of one replica; what it stores beyond is not mirrored."""
MAX_PREDICTIONS = 2**17
"""Predicted keys kept over all replicas; more let the oldest request's lapse."""


class ApplyResult(Enum):
    """What became of a replica's block events."""

    OK = "ok"
    STALE = "stale"
    """The events are older than the last that were applied; ignored."""
    GAP = "gap"
    """Events in between were missed: the replica's entries are dropped, and a snapshot is needed."""


class PrefixIndex(Protocol):
    """Mirror over all replicas of all pools (keys of different models never meet). Not thread safe: one event loop owns
    it."""

    def held(self, replica_id: str) -> frozenset[bytes]:
        """Keys that the replica announced and still holds, without predictions. Slow: for tests and tools."""

    def num_held(self, replica_id: str) -> int:
        """Number of keys that the replica announced and still holds."""

    def apply(self, replica_id: str, epoch: str, events: BlockEvents) -> ApplyResult:
        """Record what a replica's cache gained and lost. Another epoch is another cache: the entries of the old one are
        removed."""

    def extend(self, replica_id: str, keys: bytes) -> None:
        """Record more keys of the snapshot that a replica's entries rest on: one that is long is applied in pieces.
        Unknown replicas, and those that need a snapshot, are ignored."""

    def lookup(self, keys: Sequence[bytes], now: float) -> Mapping[str, int]:
        """How many leading `keys` each replica holds (or is predicted to); replicas that hold none are left out. To be
        read before the index changes; `penstock.prefix.holders.HolderRows` makes an array of it."""

    def expect(self, replica_id: str, keys: Sequence[bytes], now: float, ttl_s: float) -> None:
        """Predict that the replica will hold these blocks, because a request with them has just gone there: they count
        until its events confirm them, or for `ttl_s`.

        Without this, requests of one burst that share a prefix would scatter. Unknown replicas are ignored.
        """

    def remove(self, replica_id: str) -> None:
        """Remove a replica that is gone, and all its entries. Unknown ones are ignored."""

    def collect(self) -> int:
        """Give back the memory of what was removed, which is done little by little otherwise; returns the number of
        keys that are left. Slow: for tests and tools."""
