"""The batches that a gateway runs: looks for those that nobody runs, and takes some of them.

Not the running of one (`run`). Invariant: whatever a batch fails with, the runner goes on, and the batch is tried again
later, here or by another gateway.
"""

import asyncio
import contextlib
import logging
from typing import NamedTuple

from penstock.router.batches.batch_registry import Lease, OpenBatch
from penstock.router.batches.run import LEASE_S, BatchRun, LineRunner
from penstock.router.batches.sweep import Sweeper
from penstock.router.batches.unavailable import end_tasks
from penstock.wire.errors import Overloaded

LOOK_S = 1.0
"""Mean time between two looks for batches, seconds."""
MAX_RUNNING = 8
"""Batches that one gateway runs at once, without those that are stalled: their tenant must not keep others' waiting."""
MAX_HELD = 64
"""Batches that one gateway has taken at once, stalled ones included. A stalled one holds a megabyte."""
MAX_HELD_OF_TENANT = 2
"""Batches of one tenant among them."""
RETRY_S = 30.0
"""Time after which a batch that has failed here is tried again, seconds."""
UNKNOWN_S = 60.0
"""Age at which a batch without a record is one that was never created, seconds."""

log = logging.getLogger("penstock.batches")


class _Running(NamedTuple):
    run: BatchRun
    task: asyncio.Task[None]


class BatchRunner:
    """gateway_id: who takes the leases."""

    def __init__(self, runner: LineRunner, gateway_id: str) -> None:
        self._runner = runner
        self._parts = runner.parts
        self._gateway_id = gateway_id
        self._sweeper = Sweeper(runner.parts, runner.find_tenant, runner.now)
        self._running: dict[tuple[str, str], _Running] = {}
        """Batches that run here, by tenant and id."""
        self._not_before: dict[tuple[str, str], float] = {}
        """Times at which batches that have failed here may be tried again; monotonic seconds."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        """Run batches until cancelled; then they are given up, for other gateways."""
        sweeping = asyncio.create_task(self._sweeper.run(self._runner.random))
        try:
            while True:
                with contextlib.suppress(Overloaded):
                    await self.reconcile()
                await asyncio.sleep(LOOK_S * (0.5 + self._runner.random.random()))
        finally:
            await end_tasks([sweeping, *(running.task for running in self._running.values())])

    async def reconcile(self) -> None:
        """Take batches that nobody runs, as far as there is room. Raises Overloaded."""
        found = await self._parts.batches.open_batches()
        now_s = self._runner.clock()
        self._not_before = {key: until_s for key, until_s in self._not_before.items() if until_s > now_s}
        for batch in found:
            num_busy = sum(not running.run.is_stalled for running in self._running.values())
            if num_busy >= MAX_RUNNING or self.num_running >= MAX_HELD:
                return
            key = batch.tenant, batch.batch_id
            num_own = sum(tenant == batch.tenant for tenant, _ in self._running)
            if key not in self._running and key not in self._not_before and num_own < MAX_HELD_OF_TENANT:
                await self._take(batch)

    async def _take(self, batch: OpenBatch) -> None:
        record = await self._parts.batches.get(batch.tenant, batch.batch_id)
        if record is None or record.has_ended:
            if record is not None or self._runner.now() - batch.created > UNKNOWN_S:
                await self._clear(batch)
            return
        lease = await self._parts.batches.take(batch.tenant, batch.batch_id, self._gateway_id, LEASE_S)
        if lease is not None:
            key = batch.tenant, batch.batch_id
            run = BatchRun(self._runner, lease, record)
            task = asyncio.create_task(self._run_one(run, lease), name=f"batch {batch.batch_id}")
            self._running[key] = _Running(run, task)
            task.add_done_callback(lambda _: self._running.pop(key, None))

    async def _clear(self, batch: OpenBatch) -> None:
        """Remove what is left of a batch that is over; where the folder can't be reached, it is tried again later."""
        try:
            await asyncio.to_thread(self._parts.folder.remove, batch.tenant, batch.batch_id)
        except OSError as error:
            self._not_before[batch.tenant, batch.batch_id] = self._runner.clock() + RETRY_S
            extra = {"batch": batch.batch_id, "tenant": batch.tenant, "error": type(error).__name__}
            log.warning("results not removed", extra=extra)
            return
        await self._parts.batches.retire(batch.tenant, batch.batch_id)

    async def _run_one(self, run: BatchRun, lease: Lease) -> None:
        try:
            await run.run()
        except Exception as error:  # one batch's failure must not end the others
            self._not_before[lease.tenant, lease.batch_id] = self._runner.clock() + RETRY_S
            extra = {"batch": lease.batch_id, "tenant": lease.tenant, "error": type(error).__name__}
            log.error("batch failed", extra=extra, exc_info=error)
        finally:
            with contextlib.suppress(Overloaded):  # then the lease ends by itself
                await self._parts.batches.release(lease)
