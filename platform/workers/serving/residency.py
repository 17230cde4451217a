"""The adapters in a replica's slots: pinned while sequences run with them, and which of them makes room for another.
Pure; times are monotonic seconds.

Not the loading. For an adapter that a tenant wants, one may be given up, or take no newcomers until it is idle (drain),
that
* no tenant has used yet, or
* is of a tenant that has at least two slots more than the one that wants it, or
* is the tenant's own, or anybody's if the tenant has none, and has served for its time (`service_s`), or
* has been idle for IDLE_S, whosever it is.
Of several it is one of the tenant with the most slots, that with the least predicted use (`predicted_use`). So tenants
with many adapters share the slots evenly, none pushes out what another uses while it has as many, and adapters that
take turns serve for a while.

Invariants: at most `num_slots` adapters are held or reserved for; a pinned one stays; one that was dropped, or draining
because another needs its slot, is gone with its last pin.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from penstock.workers.serving.predicted_use import PredictedUse

T = TypeVar("T")

SERVICE_S = 1.0
"""Time that an adapter serves before its own tenant's others, or those of a tenant without a slot, may have its slot,
where loading it took long or nobody knows how long."""
MIN_SERVICE_S = 0.05
"""The same time where loading took next to none, since the adapter was in host memory."""
SERVICE_PER_LOAD = 10.0
"""The same time where loading took a while, as a multiple of that: a slot is being loaded for a tenth of the time at
most."""
IDLE_S = 10.0
"""Time without a sequence after which an adapter makes room for anybody's."""
HALF_LIFE_PER_SLOT = 8.0
"""Uses for each slot after which a use counts half in the prediction. Of 4 to 64, this one is never below the least
lately used by more than half a point of hits, on traces of Zipf's law with popularity that stays or is dealt anew after
every 500 requests, and gains up to 15 points (docs/decisions/adapters.md)."""


class Left(NamedTuple, Generic[T]):
    """An adapter that has left its slot."""

    adapter: T
    tenant: str
    """The tenant that used it last; empty: none has."""
    is_dropped: bool
    """Whether it was deleted."""


@dataclass(slots=True)
class _Held(Generic[T]):
    """An adapter in a slot. loaded_s: time from which it serves."""

    adapter: T
    tenant: str
    """The tenant that used it last; empty: none has."""
    loaded_s: float
    used_s: float
    """Time at which a sequence began or ended with it."""
    service_s: float
    """Time that it serves before it makes room for its own tenant's others."""
    num_pins: int = 0
    is_dropped: bool = False
    """Whether it has been deleted: it goes with its last pin."""
    draining_for: str | None = None
    """Tenant that waits for the slot: newcomers must wait. None: it takes newcomers."""


class Slots(Generic[T]):
    """Adapters by digest, the most lately used last. tenant: whose sequences an adapter is for; empty for an adapter
    that is loaded before any needs it, which takes no slot but an idle one."""

    def __init__(self, num_slots: int, notify: Callable[[Left[T]], None] | None = None) -> None:
        """notify: called with each adapter that has left its slot, before another may have it."""
        self._num_slots = num_slots
        self._notify = notify
        self._uses = PredictedUse(HALF_LIFE_PER_SLOT * max(1, num_slots))
        self._held: OrderedDict[str, _Held[T]] = OrderedDict()
        self._reserved: Counter[str] = Counter()
        """Slots that are reserved, by tenant."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the adapters that a new sequence can use at once."""
        return tuple(digest for digest, held in self._held.items() if not held.is_dropped and held.draining_for is None)

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    def num_of(self, tenant: str) -> int:
        """Slots that a tenant has, reserved ones included."""
        return self._reserved[tenant] + sum(held.tenant == tenant for held in self._held.values())

    def pin(self, digest: str, tenant: str = "", now: float = 0.0) -> T | None:
        """Pin an adapter in its slot, until as many calls of `unpin`; returns it. Returns None if it is in no slot, or
        takes no newcomers."""
        held = self._held.get(digest)
        if held is None or held.draining_for is not None:
            return None
        held.num_pins += 1
        self._uses.note(digest)
        held.is_dropped = False
        held.tenant, held.used_s = tenant or held.tenant, now
        self._held.move_to_end(digest)
        return held.adapter

    def unpin(self, digest: str, now: float = 0.0) -> None:
        held = self._held[digest]
        assert held.num_pins, f"adapter {digest} is not pinned"
        held.num_pins -= 1
        held.used_s = now
        if (held.is_dropped or held.draining_for is not None) and not held.num_pins:
            self._evict(digest)

    def drain_one(self, tenant: str = "", now: float = 0.0) -> None:
        """Let an adapter take no newcomers, so that its slot falls free for the tenant however busy it is; for when
        every slot is needed. Nothing happens if one is draining for it already, or none may be taken yet."""
        if any(held.draining_for == tenant for held in self._held.values()):
            return
        victim = self._find_victim(tenant, now, is_idle=False)
        if victim is not None:
            self._held[victim].draining_for = tenant

    def draining_for(self, digest: str) -> str | None:
        """The tenant for which an adapter takes no newcomers. Returns None if it takes some."""
        held = self._held.get(digest)
        return None if held is None else held.draining_for

    def stop_draining(self, digest: str) -> None:
        """Let an adapter take newcomers again."""
        self._held[digest].draining_for = None

    def keep_draining(self, tenants: Collection[str]) -> None:
        """Let all adapters take newcomers again but those that drain for one of the tenants."""
        for held in self._held.values():
            if held.draining_for is not None and held.draining_for not in tenants:
                held.draining_for = None

    def reserve(self, tenant: str = "", now: float = 0.0) -> bool:
        """Reserve a slot for an adapter that is being loaded, if need be that of an idle one. Returns False if there is
        none that may be taken."""
        if len(self._held) + self._reserved.total() >= self._num_slots:
            victim = self._find_victim(tenant, now, is_idle=True)
            if victim is None:
                return False
            self._evict(victim)
        self._reserved[tenant] += 1
        return True

    def put(self, digest: str, adapter: T, tenant: str = "", now: float = 0.0, load_s: float | None = None) -> None:
        """Put an adapter into a slot reserved for the tenant. load_s: how long loading it took; None: nobody knows."""
        self.unreserve(tenant)
        assert digest not in self._held, f"adapter {digest} is there already"
        service_s = SERVICE_S if load_s is None else min(SERVICE_S, max(MIN_SERVICE_S, SERVICE_PER_LOAD * load_s))
        self._held[digest] = _Held(adapter, tenant, now, now, service_s)
        if not tenant:
            self._uses.note(digest)  # somebody will use it

    def unreserve(self, tenant: str = "") -> None:
        assert self._reserved[tenant], "no slot is reserved"
        self._reserved[tenant] -= 1

    def drop(self, digest: str) -> None:
        """Free a deleted adapter's slot, as soon as it is not pinned."""
        held = self._held.get(digest)
        self._uses.forget(digest)
        if held is not None:
            held.is_dropped = True
            if not held.num_pins:
                self._evict(digest)

    def _evict(self, digest: str) -> None:
        held = self._held.pop(digest)
        if self._notify is not None:
            self._notify(Left(held.adapter, held.tenant, held.is_dropped))

    def _find_victim(self, tenant: str, now: float, *, is_idle: bool) -> str | None:
        """The adapter whose slot the tenant may have, among idle or among pinned ones. Returns None if there is
        none."""
        counts = self._reserved + Counter(held.tenant for held in self._held.values())
        found = [
            (-counts[held.tenant], self._uses.of(digest), digest)
            for digest, held in self._held.items()
            if held.draining_for is None
            and (not held.num_pins) == is_idle
            and (not tenant or _may_take(held, counts[held.tenant], tenant, counts[tenant], now))
        ]
        return min(found, key=lambda item: item[:2])[2] if found else None  # of equals the least lately used

    def check(self) -> None:
        """Assert the invariants. For tests."""
        assert len(self._held) + self._reserved.total() <= self._num_slots
        assert all(
            held.num_pins > 0 for held in self._held.values() if held.is_dropped or held.draining_for is not None
        )


def _may_take(held: _Held[T], num_held: int, tenant: str, num_own: int, now: float) -> bool:
    """Whether a tenant with `num_own` slots may have that of an adapter whose tenant has `num_held`."""
    if not held.tenant or num_held > num_own + 1:
        return True
    if not held.num_pins and now - held.used_s >= IDLE_S:
        return True
    return (held.tenant == tenant or not num_own) and now - held.loaded_s >= held.service_s
