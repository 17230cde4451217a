"""The adapters in a replica's slots: pinned while sequences run with them, the least lately used one makes room.
Pure.

Not the loading. Invariants: at most `num_slots` adapters are held or reserved for; a pinned one stays; one that was
dropped, or draining because another needs its slot, is gone with its last pin.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Held(Generic[T]):
    """An adapter in a slot."""

    adapter: T
    num_pins: int = 0
    is_dropped: bool = False
    """Whether it has been deleted: it goes with its last pin."""
    is_draining: bool = False
    """Whether newcomers must wait, because another adapter waits for a slot."""


class Slots(Generic[T]):
    """Adapters by digest, the most lately used last."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held: OrderedDict[str, _Held[T]] = OrderedDict()
        self._num_reserved = 0

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the adapters that a new sequence can use at once."""
        return tuple(digest for digest, held in self._held.items() if not held.is_dropped and not held.is_draining)

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    def pin(self, digest: str) -> T | None:
        """Pin an adapter in its slot, until as many calls of `unpin`; returns it. Returns None if it is in no slot, or
        takes no newcomers."""
        held = self._held.get(digest)
        if held is None or held.is_draining:
            return None
        held.num_pins += 1
        held.is_dropped = False
        self._held.move_to_end(digest)
        return held.adapter

    def unpin(self, digest: str) -> None:
        held = self._held[digest]
        assert held.num_pins, f"adapter {digest} is not pinned"
        held.num_pins -= 1
        if (held.is_dropped or held.is_draining) and not held.num_pins:
            del self._held[digest]

    def drain_one(self) -> None:
        """Let the least lately used adapter take no newcomers, so that its slot falls free however busy it is; for when
        every slot is needed."""
        if self._held and not any(held.is_draining for held in self._held.values()):
            next(iter(self._held.values())).is_draining = True

    def stop_draining(self, digest: str) -> None:
        """Let an adapter take newcomers again."""
        self._held[digest].is_draining = False

    def reserve(self) -> bool:
        """Reserve a slot for an adapter that is being loaded, if need be that of the least recently used adapter that
        is not pinned. Returns False if all are pinned."""
        if len(self._held) + self._num_reserved >= self._num_slots:
            idle = next((digest for digest, held in self._held.items() if not held.num_pins), None)
            if idle is None:
                return False
            del self._held[idle]
        self._num_reserved += 1
        return True

    def put(self, digest: str, adapter: T) -> None:
        """Put an adapter into a reserved slot."""
        self.unreserve()
        assert digest not in self._held, f"adapter {digest} is there already"
        self._held[digest] = _Held(adapter)

    def unreserve(self) -> None:
        assert self._num_reserved, "no slot is reserved"
        self._num_reserved -= 1

    def drop(self, digest: str) -> None:
        """Free a deleted adapter's slot, as soon as it is not pinned."""
        held = self._held.get(digest)
        if held is not None:
            held.is_dropped = True
            if not held.num_pins:
                del self._held[digest]

    def check(self) -> None:
        """Assert the invariants. For tests."""
        assert len(self._held) + self._num_reserved <= self._num_slots
        assert all(held.num_pins > 0 for held in self._held.values() if held.is_dropped or held.is_draining)
