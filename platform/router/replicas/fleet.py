"""Keeps a link to every listed replica: connects new members, retires gone ones, reconnects lost ones with a bounded,
jittered backoff.

Not discovery: who is a member comes in by `update`. A replica that is to stop is unlisted before it has drained, and
its sequences end with its link: so one that is listed no more retires, which is to finish what it has, to tell how its
time went, and to get nothing new. Invariant: one task per listed or retiring member, and none for any other; all of
them end with the fleet's `async with`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from random import Random
from types import TracebackType
from typing import NamedTuple, Self

from penstock.base.errors import PenstockError
from penstock.perf.model import mean_costs
from penstock.prefix.index import PrefixIndex
from penstock.router.config import PoolSpec
from penstock.router.replicas.index_feed import IndexFeed
from penstock.router.replicas.pool_table import PoolTable
from penstock.router.replicas.replica_client import Link, Member, PoolCallbacks, ReplicaClient
from penstock.router.replicas.traffic import PoolTraffic
from penstock.wire.frames import BlockEvents, DownFrame, StepCosts

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
LAST_WORDS_S = 10.0
"""Longest wait for a replica that is listed no more, and has no sequences here, to end its stream; it does so when it
has drained, with a last report."""

log = logging.getLogger(__name__)

Connect = Callable[[Member, Callable[[DownFrame], None], Callable[[], None]], AbstractAsyncContextManager[Link]]
"""Opens the stream to a member, given what to call with each frame and, once, when the stream ends by itself (no frame
comes after that).

Entering connects and raises PenstockError, OSError or TimeoutError where it can't; leaving closes.
"""
Seed = Callable[[str], Awaitable[BlockEvents | None]]
"""A copy of what the replica of an epoch holds, or None; `penstock.prefix.store.IndexStore.snapshot`."""


async def no_seed(_epoch: str) -> None:
    """The seed where there is no shared copy of the index: returns None for any epoch, and each replica sends a
    snapshot itself."""


class PoolStatus(NamedTuple):
    """A pool's replicas, summed; retiring ones don't count."""

    num_listed: int = 0
    num_connected: int = 0
    num_inflight: int = 0
    """Sequences of this router; the numbers below are of all routers."""
    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


class _Linked(NamedTuple):
    """A replica and the task that keeps a link to it."""

    client: ReplicaClient
    task: asyncio.Task[None]


class Fleet:
    """The replicas of all pools, and a link to each. Use it as `async with Fleet(...) as fleet`, and call `update` only
    inside."""

    def __init__(
        self,
        pools: Mapping[str, PoolSpec],
        connect: Connect,
        index: PrefixIndex,
        callbacks: PoolCallbacks,
        random: Random,
        seed: Seed = no_seed,
    ) -> None:
        self._pools = pools
        self.traffic = {pool: PoolTraffic() for pool in pools}
        """Traffic with each pool since this fleet began."""
        self._connect = connect
        self._feed = IndexFeed(index, _call_soon)
        self._callbacks = callbacks
        self._random = random
        self._seed = seed
        self._listed: dict[str, _Linked] = {}
        """Listed replicas, by id."""
        self._retiring: dict[str, _Linked] = {}
        """Replicas listed no more, by id, with live sequences and, so, a link."""
        self._tables: dict[str, PoolTable] = {}
        """Tables of the listed replicas by pool, made when they are first asked for."""
        self._tables_of: dict[tuple[str, ...], list[PoolTable]] = {}
        """Lists of tables by the pools that they were asked for together."""
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for linked in (*self._listed.values(), *self._retiring.values()):
            _disconnect(linked)
        self._listed.clear()
        self._retiring.clear()
        await self._tasks.__aexit__(kind, error, trace)

    def update(self, members: Iterable[Member]) -> None:
        """The replicas there are now. One whose epoch changed is another process: the old one is dropped first."""
        listed = {member.replica_id: member for member in members if member.pool in self._pools}
        before = self._listed | self._retiring
        self._listed, self._retiring = {}, {}
        self._tables.clear()
        self._tables_of.clear()
        for replica_id, linked in before.items():
            self._relist(linked, listed.get(replica_id))
        for replica_id, member in listed.items():
            if replica_id not in self._listed:
                client = ReplicaClient(member, self._feed, self._callbacks, self.traffic[member.pool])
                self._listed[replica_id] = _Linked(
                    client, self._tasks.create_task(self._keep_link(client), name=f"link to {replica_id}")
                )
        for linked in self._listed.values():
            linked.client.unretire()  # last: it may place what waits

    def ready_clients(self, pools: Iterable[str]) -> list[ReplicaClient]:
        """Clients of the ready replicas of these pools."""
        wanted = frozenset(pools)
        return [
            linked.client
            for linked in self._listed.values()
            if linked.client.is_ready and linked.client.member.pool in wanted
        ]

    def client(self, replica_id: str) -> ReplicaClient | None:
        """Client of a listed replica, ready or not. Returns None for one that is not listed."""
        linked = self._listed.get(replica_id)
        return None if linked is None else linked.client

    def tables(self, pools: tuple[str, ...]) -> Sequence[PoolTable]:
        """Tables of the listed replicas of these pools, those that are ready or not; pools without any are left out."""
        tables = self._tables_of.get(pools)
        if tables is None:
            found = [self._table(pool) for pool in dict.fromkeys(pools)]
            tables = self._tables_of[pools] = [table for table in found if table is not None]
        return tables

    def _table(self, pool: str) -> PoolTable | None:
        table = self._tables.get(pool)
        if table is None:
            clients = [linked.client for linked in self._listed.values() if linked.client.member.pool == pool]
            if not clients:
                return None
            table = self._tables[pool] = PoolTable(pool, clients)
        return table

    def status(self) -> dict[str, PoolStatus]:
        """A row for every configured pool."""
        rows = {pool: PoolStatus() for pool in self._pools}
        for linked in self._listed.values():
            pool = linked.client.member.pool
            rows[pool] = _add_replica(rows[pool], linked.client)
        return rows

    def mean_costs(self, pool: str) -> StepCosts:
        """Step costs of the pool's ready replicas, a mean; zeros while there is none."""
        loads = [client.load for client in self.ready_clients([pool])]
        costs = [load.costs for load in loads if load is not None]
        return mean_costs(costs) if costs else StepCosts()

    def _relist(self, linked: _Linked, member: Member | None) -> None:
        """Keep a replica as listed, as retiring, or not at all. member: what its id is listed as now."""
        client = linked.client
        if member is not None and member.epoch == client.member.epoch:
            self._listed[member.replica_id] = linked
        elif member is None and client.is_linked:
            if not client.is_retiring:
                client.retire(partial(_leave_later, client))
            self._retiring[client.member.replica_id] = linked
        else:
            _disconnect(linked)

    async def _keep_link(self, client: ReplicaClient) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            was_ready = await self._run_link(client)
            if client.is_retiring:
                del self._retiring[client.member.replica_id]
                return
            backoff_s = FIRST_BACKOFF_S if was_ready else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s * self._random.uniform(0.5, 1.0))

    async def _run_link(self, client: ReplicaClient) -> bool:
        """Open one link and keep it until it ends. Returns whether it ever was ready."""
        replica_id = client.member.replica_id
        reports_before = client.num_reports
        seed = await self._seed(client.member.epoch)
        client.open()
        try:
            async with self._connect(client.member, client.on_frame, client.on_lost) as link:
                client.attach(link, seed)
                await client.ended.wait()
            log.info("link ended", extra={"replica": replica_id})
        except (PenstockError, OSError, TimeoutError) as error:
            log.info("link failed", extra={"replica": replica_id, "error": type(error).__name__})
        finally:
            client.detach()
        return client.num_reports > reports_before


def _call_soon(callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(callback)


def _leave_later(client: ReplicaClient) -> None:
    asyncio.get_running_loop().call_later(LAST_WORDS_S, client.leave)


def _disconnect(linked: _Linked) -> None:
    linked.task.cancel()
    linked.client.detach()


def _add_replica(row: PoolStatus, client: ReplicaClient) -> PoolStatus:
    row = row._replace(num_listed=row.num_listed + 1, num_inflight=row.num_inflight + client.num_inflight)
    if client.load is None or not client.is_ready:
        return row
    return row._replace(
        num_connected=row.num_connected + 1,
        num_running=row.num_running + client.load.num_running,
        num_waiting=row.num_waiting + client.load.num_waiting,
        free_blocks=row.free_blocks + client.load.free_blocks,
        total_blocks=row.total_blocks + client.load.total_blocks,
    )
