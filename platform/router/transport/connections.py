"""The open connections of one gateway, and which of them gives way when there are too many.

Not the bytes on them (`connection`). A connection is unproven until a request on it has shown a valid key. Unproven
ones have at most half of the places, and the oldest gives way to a new one: a client that sends its request at once has
shown its key before its turn comes, however many others are opened and left. When all places are taken, a connection
that rests between two requests, or waits to be refused (`failures`), gives way, of the tenant that has most of those.
Invariant: a connection with a request of a tenant on it never gives way.

Unproven connections of one client's address are limited too, where addresses are clients' (`addresses`); the oldest of
them gives way once it is `GRACE_S` old. So many tenants behind one unlisted proxy are not limited as one: what shows a
valid key within that time is never closed for its address.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

GRACE_S = 1.0
"""Age up to which a connection is never closed on account of its address, seconds."""
MAX_KNOWN = 4096
"""Peers that are remembered because they have shown a valid key."""


class ConnectionLimits(NamedTuple):
    """Bounds on the connections of one gateway."""

    max_connections: int = 8192
    """All of them."""
    max_unproven_per_address: float = math.inf
    """Connections of one address on which no valid key was shown."""
    head_timeout_s: float = 10.0
    """Longest wait for the whole head of a request: from the connection's beginning, then from the head's first
    byte."""
    keep_alive_s: float = 75.0
    """Longest rest between two requests: longer than the usual 60 s of a load balancer in front, which must be the one
    that closes."""
    stall_s: float = 60.0
    """Longest time for which a peer may leave an answer unread, other than the answer to a post."""


class Closable(Protocol):
    """A connection, as the register sees it."""

    def abort(self) -> None:
        """Close at once, whatever is under way."""


class _Entry:
    __slots__ = ("address", "since_s", "tenant")

    def __init__(self, address: str | None, since_s: float) -> None:
        self.address = address
        self.since_s = since_s
        self.tenant: str | None = None
        """Tenant whose key was shown last; None: unproven."""


class Connections:
    """The register of one gateway's connections. clock: monotonic, seconds."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._entries: dict[Closable, _Entry] = {}
        self._unproven: OrderedDict[Closable, None] = OrderedDict()
        """Oldest first."""
        self._addresses: dict[str, OrderedDict[Closable, None]] = {}
        """Unproven connections by address, oldest first."""
        self._resting: dict[str, OrderedDict[Closable, None]] = {}
        """Proven connections without a request, by tenant, the longest resting first."""
        self._known: OrderedDict[str, None] = OrderedDict()
        """Peers that have shown a valid key, the latest last."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_unproven(self) -> int:
        return len(self._unproven)

    def add(self, connection: Closable, address: str | None) -> bool:
        """Take a new connection in; another one may have to give way. Returns False if none can: the new one must be
        closed. address: of its client; None: not known."""
        now_s = self._clock()
        if not self._make_room(address, now_s):
            return False
        self._entries[connection] = _Entry(address, now_s)
        self._unproven[connection] = None
        if address is not None:
            self._addresses.setdefault(address, OrderedDict())[connection] = None
        return True

    def prove(self, connection: Closable, tenant: str) -> None:
        """Note that a request on the connection has shown a valid key of a tenant."""
        entry = self._entries.get(connection)
        if entry is None or entry.tenant == tenant:
            return
        if entry.tenant is None:
            self._forget_unproven(connection, entry)
        entry.tenant = tenant

    def note_known(self, peer: str | None) -> None:
        """Note that a connection of a peer, by its address, has shown a valid key."""
        if peer is not None:
            self._known[peer] = None
            self._known.move_to_end(peer)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def is_known(self, peer: str | None) -> bool:
        """Whether it was one of the latest MAX_KNOWN that have."""
        return peer in self._known

    def rest(self, connection: Closable) -> None:
        """Note that the connection has no tenant's request now."""
        entry = self._entries.get(connection)
        if entry is not None and entry.tenant is not None:
            self._resting.setdefault(entry.tenant, OrderedDict())[connection] = None

    def wake(self, connection: Closable) -> None:
        """Note that a request begins on the connection, or goes on."""
        entry = self._entries.get(connection)
        if entry is not None and entry.tenant is not None:
            _discard(self._resting, entry.tenant, connection)

    def remove(self, connection: Closable) -> None:
        """Forget a connection that is closed; one that was forgotten already is no error."""
        entry = self._entries.pop(connection, None)
        if entry is None:
            return
        if entry.tenant is None:
            self._forget_unproven(connection, entry)
        else:
            _discard(self._resting, entry.tenant, connection)

    def _make_room(self, address: str | None, now_s: float) -> bool:
        same = self._addresses.get(address) if address is not None else None
        if same is not None and len(same) >= self._limits.max_unproven_per_address:
            oldest = next(iter(same))
            if now_s - self._entries[oldest].since_s >= GRACE_S:
                self._drop(oldest)
        if len(self._unproven) >= max(1, self._limits.max_connections // 2):
            self._drop(next(iter(self._unproven)))
        elif len(self._entries) >= self._limits.max_connections:
            if not self._resting:
                return False
            most = max(self._resting.values(), key=len)
            self._drop(next(iter(most)))
        return True

    def _drop(self, connection: Closable) -> None:
        self.remove(connection)
        connection.abort()

    def _forget_unproven(self, connection: Closable, entry: _Entry) -> None:
        self._unproven.pop(connection, None)
        if entry.address is not None:
            _discard(self._addresses, entry.address, connection)


def _discard(groups: dict[str, OrderedDict[Closable, None]], name: str, connection: Closable) -> None:
    group = groups.get(name)
    if group is not None:
        group.pop(connection, None)
        if not group:
            del groups[name]
