"""Brings adapters into the replica's slots while it serves: a sequence waits for its own, the others go on.

All state belongs to one event loop; files are read in a thread. The next slot goes to the tenant that has the fewest,
and of its adapters to the one that has waited longest. While one waits, an adapter that may make room for it
(`residency`) takes no newcomers, so that busy adapters can't starve the others. Invariants: each `want` ends in exactly
one of `ready`, `failed`, or `cancel`; `ready` comes with a pin, which `release` returns.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from penstock.base.errors import PenstockError
from penstock.workers.engine.sequence import Resident
from penstock.workers.serving.adapter_counts import AdapterCounts, Event
from penstock.workers.serving.residency import Left, Slots

MAX_FAILURES = 8
"""Most failed adapters that load reports list; the latest ones are listed."""
RETRY_S = 0.1
"""Time after which adapters that wait are tried again: an adapter may have served long enough by then."""

log = logging.getLogger("penstock.adapters")


class PendingAdapter:
    """One sequence that waits for its adapter. `ready` gets the adapter, `failed` a sentence."""

    def __init__(
        self, digest: str, tenant: str, ready: Callable[[Resident], None], failed: Callable[[str], None]
    ) -> None:
        self.digest = digest
        self.tenant = tenant
        self.ready = ready
        self.failed = failed


class Adapters:
    """The adapters of one replica: those in slots, those being loaded, and the sequences that wait for them."""

    def __init__(
        self,
        folder: Path,
        load: Callable[[str, Path], Resident],
        num_slots: int,
        clock: Callable[[], float] = time.monotonic,
        unload: Callable[[Resident], None] | None = None,
        forget: Callable[[str], None] | None = None,
    ) -> None:
        """folder: the adapters' store. load: reads an adapter, in a thread, from a folder of its own; raises
        PenstockError or OSError. clock: monotonic seconds. unload: called with each adapter that is given up, before
        another is loaded in its place; None: nothing is to be done then. forget: called with the digest of each adapter
        that was deleted, when it is in no slot, and never before `unload`; None as before."""
        self._folder = folder
        self._load = load
        self._clock = clock
        self._unload = unload
        self._forget = forget
        self.counts = AdapterCounts()
        self._slots: Slots[Resident] = Slots(num_slots, self._leave)
        self._wanted: OrderedDict[str, list[PendingAdapter]] = OrderedDict()
        """Sequences that wait, by digest of an adapter that is not in a slot, in order of arrival; none for a
        preload."""
        self._preloads: dict[str, str] = {}
        """Tenants for whom adapters are to be loaded that no sequence waits for yet, by digest."""
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._reserved: dict[str, tuple[str, float]] = {}
        """Tenants for whom slots are reserved, and since when, by digest of the adapter that is being loaded."""
        self._retry: asyncio.TimerHandle | None = None
        self._dropped: set[str] = set()
        """Digests of adapters that are being loaded, but were deleted since."""
        self._failures: OrderedDict[str, str] = OrderedDict()
        self._reported: tuple[object, object] = ((), ())
        """`resident` and `failures` when `on_change` was called last."""
        self.on_change: Callable[[], None] = _nothing
        """Called when `resident` or `failures` have changed."""

    @property
    def resident(self) -> tuple[str, ...]:
        return self._slots.digests

    @property
    def failures(self) -> tuple[tuple[str, str], ...]:
        """The latest failures: digest and a sentence."""
        return tuple(self._failures.items())

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot: their adapters are neither there nor being loaded."""
        return sum(len(waiting) for digest, waiting in self._wanted.items() if digest not in self._loading)

    def num_waiting_of(self, tenant: str) -> int:
        """Sequences of one tenant that wait for a slot."""
        return sum(
            pending.tenant == tenant
            for digest, waiting in self._wanted.items()
            if digest not in self._loading
            for pending in waiting
        )

    def want(
        self, digest: str, ready: Callable[[Resident], None], failed: Callable[[str], None], tenant: str = ""
    ) -> PendingAdapter | None:
        """Request an adapter for a tenant's sequence. Returns None if `ready` has been called already. Otherwise the
        returned wait ends later, with a call of `ready` or `failed`, or by `cancel`."""
        adapter = self._slots.pin(digest, tenant, self._clock())
        self.counts.note(digest, tenant, Event.WAIT if adapter is None else Event.HIT)
        if adapter is not None:
            ready(adapter)
            return None
        pending = PendingAdapter(digest, tenant, ready, failed)
        self._wanted.setdefault(digest, []).append(pending)
        self._dropped.discard(digest)
        self._load_next()
        self._report_changes()
        return pending if pending in self._wanted.get(digest, ()) else None

    def cancel(self, pending: PendingAdapter) -> None:
        """End a wait: neither `ready` nor `failed` will be called."""
        waiting = self._wanted[pending.digest]
        waiting.remove(pending)
        if not waiting and pending.digest not in self._loading:
            del self._wanted[pending.digest]
            self._load_next()  # it may have been the one for which others were draining
            self._report_changes()

    def release(self, digest: str) -> None:
        """Return the pin that came with `ready`, when the sequence has ended."""
        self._slots.unpin(digest, self._clock())
        self._load_next()
        self._report_changes()

    def preload(self, digest: str, tenant: str = "") -> None:
        """Load an adapter if there is a slot that nobody needs. tenant: whose request is about to come, for which only
        such slots are taken as the request might take; empty: none is known of."""
        self._failures.pop(digest, None)
        self._dropped.discard(digest)
        if digest not in self._slots:
            self._wanted.setdefault(digest, [])
            self._preloads[digest] = tenant
            self._load_next()
            self._preloads.pop(digest, None)
        elif self._slots.pin(digest, now=self._clock()) is not None:  # used, though by nobody
            self._slots.unpin(digest, self._clock())
        self.on_change()

    def drop(self, digest: str) -> None:
        """Remove a deleted adapter: sequences that have it finish, then its slot is free."""
        self._failures.pop(digest, None)
        if digest in self._loading:
            self._dropped.add(digest)
        elif digest not in self._slots and self._forget is not None:
            self._forget(digest)
        self._slots.drop(digest)
        self._load_next()
        self.on_change()

    def stop(self) -> None:
        for task in self._loading.values():
            task.cancel()
        if self._retry is not None:
            self._retry.cancel()

    def _load_next(self) -> None:
        """Load what finds a slot, those first whose tenants have the fewest; what waits has one drained for it."""
        blocked: set[str] = set()
        while (digest := self._next_wanted(blocked)) is not None:
            tenant = self._wanted[digest][0].tenant
            if digest in self._slots:  # it was draining when these came; now it is their turn
                self._slots.stop_draining(digest)
                self._grant(digest, self._wanted.pop(digest))
            elif not self._reserve(digest, tenant):
                self._slots.drain_one(tenant, self._clock())
                blocked.add(tenant)
        self._slots.keep_draining(blocked)
        for digest in [digest for digest, waiting in self._wanted.items() if not waiting]:
            # a preload is not worth a wait
            if digest not in self._loading and (blocked or not self._reserve(digest, self._preloads.get(digest, ""))):
                del self._wanted[digest]
        if blocked and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _next_wanted(self, blocked: set[str]) -> str | None:
        """The adapter to be served next, for which sequences wait, but for those of the `blocked` tenants and those
        that are draining for them. Returns None if there is none."""
        open_to = [
            (digest, waiting[0].tenant)
            for digest, waiting in self._wanted.items()
            if waiting
            and digest not in self._loading
            and waiting[0].tenant not in blocked
            and self._slots.draining_for(digest) not in blocked
        ]
        if not open_to:
            return None
        counts = {tenant: self._slots.num_of(tenant) for _, tenant in open_to}
        return min(open_to, key=lambda item: counts[item[1]])[0]  # of equals the first

    def _reserve(self, digest: str, tenant: str) -> bool:
        """Begin to load an adapter. Returns False if there is no slot for it."""
        if not self._slots.reserve(tenant, self._clock()):
            return False
        self._reserved[digest] = tenant, self._clock()
        self._loading[digest] = asyncio.get_running_loop().create_task(
            self._load_adapter(digest), name=f"adapter {digest}"
        )
        return True

    def _leave(self, left: Left[Resident]) -> None:
        self.counts.note(left.adapter.digest, left.tenant, Event.EVICTION)
        self._give_up(left.adapter, is_deleted=left.is_dropped)

    def _give_up(self, adapter: Resident, *, is_deleted: bool) -> None:
        if self._unload is not None:
            self._unload(adapter)
        if is_deleted and self._forget is not None:
            self._forget(adapter.digest)

    def _try_again(self) -> None:
        self._retry = None
        self._load_next()
        self._report_changes()

    def _grant(self, digest: str, waiting: list[PendingAdapter]) -> None:
        for pending in waiting:
            adapter = self._slots.pin(digest, pending.tenant, self._clock())
            assert adapter is not None
            pending.ready(adapter)

    def _report_changes(self) -> None:
        state = self._slots.digests, self.failures
        if state != self._reported:
            self._reported = state
            self.on_change()

    async def _load_adapter(self, digest: str) -> None:
        try:
            adapter = await asyncio.to_thread(self._load, digest, self._folder / digest)
        except asyncio.CancelledError:
            self._slots.unreserve(self._reserved.pop(digest)[0])
            raise
        except Exception as error:  # noqa: BLE001 (its files may hold anything)
            self._end(digest, None, _describe_failure(error))
            log.warning("adapter not loaded", extra={"digest": digest, "error": str(error)})
        else:
            self._end(digest, adapter, "")
            log.info("adapter loaded", extra={"digest": digest})

    def _end(self, digest: str, adapter: Resident | None, error: str) -> None:
        del self._loading[digest]
        tenant, began_s = self._reserved.pop(digest)
        now = self._clock()
        waiting = self._wanted.pop(digest)
        is_wanted = bool(waiting) or digest not in self._dropped
        self._dropped.discard(digest)
        if adapter is None:
            self._slots.unreserve(tenant)
            self._failures[digest] = error
            if len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)
        elif is_wanted:
            self._slots.put(digest, adapter, tenant, now, now - began_s)
            self.counts.note(digest, tenant, Event.LOAD)
            self._failures.pop(digest, None)
        else:
            self._slots.unreserve(tenant)
            self._give_up(adapter, is_deleted=True)
        if adapter is None:
            for pending in waiting:
                pending.failed(error)
        else:
            self._grant(digest, waiting)
        self._load_next()
        self._report_changes()


def _describe_failure(error: Exception) -> str:
    if isinstance(error, PenstockError):
        return f"The adapter can't be loaded: {error.message}"
    if isinstance(error, FileNotFoundError):
        return "The adapter's files are not in this replica's store; every gateway and replica must share the folder."
    return f"The adapter can't be loaded ({type(error).__name__})."


def _nothing() -> None:
    """The `on_change` of adapters whose changes nobody needs."""
