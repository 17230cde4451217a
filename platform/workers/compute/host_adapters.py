"""Adapters in host memory, read and checked, within a bound of bytes: one that comes back to a slot is not read again.

Under the slots, not instead of them: on a GPU what is held here is copied into a slot, on a CPU a slot holds the very
same tensors, and only adapters in no slot cost memory beyond it. The least lately used leave first; leaving a slot is a
use, so that one which was in its slot for long is not the first to go. Any thread may call. Invariant: `num_bytes` is
the sum over what is held, and at most `max_bytes`.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    @property
    def digest(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class HostAdapters(Generic[T]):
    """Adapters by digest, the most lately used last. max_bytes: of all that are held; 0: none is."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, digest: str, read: Callable[[], T]) -> T:
        """The adapter, read if it is not held. Raises what `read` raises."""
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
                return self._held[digest]
        adapter = read()
        self.keep(adapter)
        return adapter

    def keep(self, adapter: T) -> None:
        """Hold an adapter that is or was in use, as the most lately used one. One larger than the bound is not held."""
        with self._lock:
            self._drop(adapter.digest)
            if adapter.num_bytes > self._max_bytes:
                return
            self._held[adapter.digest] = adapter
            self.num_bytes += adapter.num_bytes
            while self.num_bytes > self._max_bytes:
                self._drop(next(iter(self._held)))

    def touch(self, digest: str) -> None:
        """Note a use of what may be held."""
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)

    def forget(self, digest: str) -> None:
        """Drop a deleted adapter."""
        with self._lock:
            self._drop(digest)

    def _drop(self, digest: str) -> None:
        adapter = self._held.pop(digest, None)
        if adapter is not None:
            self.num_bytes -= adapter.num_bytes
