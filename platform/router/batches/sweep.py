"""What has had its time: files and ended batches of all tenants, whatever a tenant that was deleted has left, and texts
on the disk that no record names. Every gateway does it now and then; it may be done twice."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from random import Random

from penstock.router.batches.dependencies import BatchDependencies
from penstock.tenancy.tenants import Tenant
from penstock.wire.errors import Overloaded

SWEEP_S = 300.0
"""Mean time between two sweeps, seconds."""
ORPHAN_S = 86400.0
"""Age at which a text that no record names is removed, seconds; uploads and results are named long before."""

log = logging.getLogger("penstock.batches")


class Sweeper:
    """find_tenant: None where there is no such tenant any more. now: Unix time, seconds."""

    def __init__(
        self,
        parts: BatchDependencies,
        find_tenant: Callable[[str], Awaitable[Tenant | None]],
        now: Callable[[], float],
    ) -> None:
        self._parts = parts
        self._find_tenant = find_tenant
        self._now = now

    async def run(self, random: Random) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S * (0.5 + random.random()))
            try:
                await self.sweep()
            except (Overloaded, OSError) as error:
                log.warning("files not swept", extra={"error": type(error).__name__})

    async def sweep(self) -> None:
        """Raises Overloaded, and OSError where the folder can't be read."""
        on_disk = await asyncio.to_thread(self._parts.folder.tenants)
        for tenant in sorted({*on_disk, *await self._parts.files.tenants()}):
            await self._sweep_tenant(tenant)

    async def _sweep_tenant(self, tenant: str) -> None:
        files, batches, folder = self._parts.files, self._parts.batches, self._parts.folder
        now, is_gone = self._now(), await self._find_tenant(tenant) is None
        known, in_use = set(), set()
        for batch in await batches.all(tenant):
            if batch.ended_at is None:
                known.add(batch.id)
                in_use.add(batch.input_file_id)
            elif is_gone or batch.ended_at + self._parts.config.keep_s < now:
                await batches.forget(tenant, batch.id)
        for file in await files.all(tenant):
            if file.id in in_use or (file.expires > now and not is_gone):
                known.add(file.id)
                continue
            await files.remove(tenant, file.id)
            await asyncio.to_thread(folder.remove, tenant, file.id)
        removed = await asyncio.to_thread(folder.sweep, tenant, known, now - ORPHAN_S)
        if removed:
            log.info("texts without a record removed", extra={"tenant": tenant, "files": len(removed)})
