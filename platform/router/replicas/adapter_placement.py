"""The replicas that have an adapter in memory, and requests to load or drop it. The requests go over the replicas'
token streams; their load reports show the outcome."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from penstock.wire.frames import AdapterCount, Load

POLL_S = 0.01
"""Pause between two checks of the load reports while replicas load an adapter."""
REPORTS_UNTIL_CURRENT = 2
"""Load reports after which a failure that is still reported is not an older one."""


class Identity(Protocol):
    @property
    def replica_id(self) -> str: ...


class AdapterControl(Protocol):
    """A ready replica, as far as its adapters go."""

    @property
    def member(self) -> Identity: ...
    @property
    def adapter_counts(self) -> Mapping[tuple[str, str], AdapterCount]:
        """What has become of adapters there, by digest and tenant."""

    @property
    def load(self) -> Load | None: ...
    @property
    def num_reports(self) -> int: ...
    def load_adapter(self, digest: str, tenant: str = "") -> None: ...
    def drop_adapter(self, digest: str) -> None: ...


class AdapterPlacement(NamedTuple):
    """Where one adapter lies, among the ready replicas of some pools, and what has become of it there."""

    live: int
    """Number of ready replicas of those pools."""
    where: tuple[str, ...]
    """Ids of the ready replicas that have it in memory, sorted."""
    error: str | None
    """Why a replica could not load it; None: none has failed."""
    num_failed: int = 0
    """Number of ready replicas that could not load it."""
    num_hits: int = 0
    """The tenant's sequences that found it in memory."""
    num_waits: int = 0
    """The tenant's sequences that had to wait for it."""
    num_loads: int = 0
    num_evictions: int = 0
    """Times that it left the memory of a replica."""

    @property
    def num_loaded(self) -> int:
        return len(self.where)

    @property
    def is_refused(self) -> bool:
        """Whether there are replicas, and none can load it."""
        return 0 < self.live == self.num_failed


class AdapterPlacer:
    def __init__(self, ready_replicas: Callable[[Iterable[str]], Iterable[AdapterControl]]) -> None:
        """ready_replicas: finds those of some pools."""
        self._ready_replicas = ready_replicas

    def find(self, pools: Iterable[str], digest: str, tenant: str) -> AdapterPlacement:
        """Where an adapter is, and what has become of it for a tenant."""
        replicas = [(replica, replica.load) for replica in self._ready_replicas(pools)]
        ready = [(replica, load) for replica, load in replicas if load is not None]
        errors = [sentence for _, load in ready for failed, sentence in load.failed_adapters if failed == digest]
        where = sorted(replica.member.replica_id for replica, load in ready if digest in load.resident_adapters)
        found = [replica.adapter_counts.get((digest, whose)) for replica, _ in ready for whose in (tenant, "")]
        counts = [count for count in found if count is not None]
        return AdapterPlacement(
            len(ready),
            tuple(where),
            errors[0] if errors else None,
            len(errors),
            sum(count.num_hits for count in counts),
            sum(count.num_waits for count in counts),
            sum(count.num_loads for count in counts),
            sum(count.num_evictions for count in counts),
        )

    async def load(self, pools: Iterable[str], digest: str, tenant: str, timeout_s: float) -> AdapterPlacement:
        """Request that every replica loads a tenant's adapter, and wait until each has loaded it or failed, for
        `timeout_s` at most. Returns the placement at that time."""
        pools = tuple(pools)
        reports_before: dict[int, int] = {}
        for replica in self._ready_replicas(pools):
            reports_before[id(replica)] = replica.num_reports
            replica.load_adapter(digest)
        try:
            async with asyncio.timeout(timeout_s):
                while any(  # noqa: ASYNC110 (loads come every 20 ms, and wake nobody in particular)
                    _is_pending(replica, digest, reports_before.get(id(replica)))
                    for replica in self._ready_replicas(pools)
                ):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            pass
        return self.find(pools, digest, tenant)

    def drop(self, pools: Iterable[str], digest: str) -> None:
        for replica in self._ready_replicas(pools):
            replica.drop_adapter(digest)


def _is_pending(replica: AdapterControl, digest: str, reports_before: int | None) -> bool:
    """Whether the replica may still be loading the adapter. reports_before: load reports that had come when the load
    was requested; None if the replica became ready later, and so is not waited for."""
    if reports_before is None or replica.load is None or digest in replica.load.resident_adapters:
        return False
    has_failed = any(failed == digest for failed, _ in replica.load.failed_adapters)
    return not has_failed or replica.num_reports < reports_before + REPORTS_UNTIL_CURRENT
