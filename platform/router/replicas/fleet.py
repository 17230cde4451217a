"""Keeps a link to every listed replica: connects new members, retires gone ones, reconnects lost ones with a bounded,
jittered backoff.

Not discovery: who is a member comes in by `update`. A replica that is to stop is unlisted before it has drained, and
its sequences end with its link: so one that is listed no more retires, which is to finish what it has, and to get
nothing new. Invariant: one task per listed or retiring member, and none for any other; all of them end with the fleet's
`async with`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from random import Random
from types import TracebackType
from typing import NamedTuple, Self

from penstock.base.errors import PenstockError
from penstock.prefix.index import PrefixIndex
from penstock.router.config import PoolSpec
from penstock.router.replicas.replica_client import Hooks, Link, Member, ReplicaClient
from penstock.router.replicas.traffic import Flow
from penstock.wire.frames import BlockEvents, DownFrame

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0

log = logging.getLogger(__name__)

Connect = Callable[[Member, Callable[[DownFrame], None], Callable[[], None]], AbstractAsyncContextManager[Link]]
"""Opens the stream to a member, given what to call with each frame and, once, when the stream ends by itself (no frame
comes after that).

Entering connects and raises PenstockError, OSError or TimeoutError where it can't; leaving closes.
"""
Seed = Callable[[str], Awaitable[BlockEvents | None]]
"""A copy of what the replica of an epoch holds, or None; `penstock.prefix.store.IndexStore.snapshot`."""


async def no_seed(_epoch: str) -> None:
    """Without a shared copy, each replica is asked."""


class PoolStatus(NamedTuple):
    """A pool's replicas, summed; retiring ones don't count."""

    num_listed: int = 0
    num_connected: int = 0
    num_inflight: int = 0
    """This router's sequences; the rest is everybody's."""
    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


class _Kept(NamedTuple):
    remote: ReplicaClient
    task: asyncio.Task[None]


class Fleet:
    """Used as `async with Fleet(...) as fleet`; `update` only inside."""

    def __init__(
        self,
        pools: Mapping[str, PoolSpec],
        connect: Connect,
        index: PrefixIndex,
        hooks: Hooks,
        random: Random,
        seed: Seed = no_seed,
    ) -> None:
        self._pools = pools
        self.flows = {pool: Flow() for pool in pools}
        """What has gone to each pool since this fleet began."""
        self._connect = connect
        self._index = index
        self._hooks = hooks
        self._random = random
        self._seed = seed
        self._kept: dict[str, _Kept] = {}
        """Listed."""
        self._retiring: dict[str, _Kept] = {}
        """Listed no more, with live sequences and, so, a link."""
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for kept in (*self._kept.values(), *self._retiring.values()):
            _drop(kept)
        self._kept.clear()
        self._retiring.clear()
        await self._tasks.__aexit__(kind, error, trace)

    def update(self, members: Iterable[Member]) -> None:
        """The replicas there are now. One whose epoch changed is another process: the old one is dropped first."""
        listed = {member.replica_id: member for member in members if member.pool in self._pools}
        before = self._kept | self._retiring
        self._kept, self._retiring = {}, {}
        for replica_id, kept in before.items():
            self._go_on(kept, listed.get(replica_id))
        for replica_id, member in listed.items():
            if replica_id not in self._kept:
                remote = ReplicaClient(member, self._index, self._hooks, self.flows[member.pool])
                self._kept[replica_id] = _Kept(
                    remote, self._tasks.create_task(self._keep(remote), name=f"link to {replica_id}")
                )

    def remotes(self, pools: Iterable[str]) -> list[ReplicaClient]:
        """The ready replicas of these pools."""
        wanted = frozenset(pools)
        return [
            kept.remote for kept in self._kept.values() if kept.remote.is_ready and kept.remote.member.pool in wanted
        ]

    def status(self) -> dict[str, PoolStatus]:
        """A row for every configured pool."""
        rows = {pool: PoolStatus() for pool in self._pools}
        for kept in self._kept.values():
            pool = kept.remote.member.pool
            rows[pool] = _added(rows[pool], kept.remote)
        return rows

    def _go_on(self, kept: _Kept, member: Member | None) -> None:
        """As listed, as retiring, or not at all. member: what its id is listed as now."""
        remote = kept.remote
        if member is not None and member.epoch == remote.member.epoch:
            remote.is_retiring = False
            self._kept[member.replica_id] = kept
        elif member is None and remote.num_inflight:
            remote.is_retiring = True
            self._retiring[remote.member.replica_id] = kept
        else:
            _drop(kept)

    async def _keep(self, remote: ReplicaClient) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            was_ready = await self._hold(remote)
            if remote.is_retiring:
                del self._retiring[remote.member.replica_id]
                return
            backoff_s = FIRST_BACKOFF_S if was_ready else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s * self._random.uniform(0.5, 1.0))

    async def _hold(self, remote: ReplicaClient) -> bool:
        """One link, until it ends; whether it ever was ready."""
        replica_id = remote.member.replica_id
        reports_before = remote.num_reports
        seed = await self._seed(remote.member.epoch)
        remote.open()
        try:
            async with self._connect(remote.member, remote.on_frame, remote.on_lost) as link:
                remote.attach(link, seed)
                await remote.ended.wait()
            log.info("link ended", extra={"replica": replica_id})
        except (PenstockError, OSError, TimeoutError) as error:
            log.info("link failed", extra={"replica": replica_id, "error": type(error).__name__})
        finally:
            remote.detach()
        return remote.num_reports > reports_before


def _drop(kept: _Kept) -> None:
    kept.task.cancel()
    kept.remote.detach()


def _added(row: PoolStatus, remote: ReplicaClient) -> PoolStatus:
    row = row._replace(num_listed=row.num_listed + 1, num_inflight=row.num_inflight + remote.num_inflight)
    if remote.load is None or not remote.is_ready:
        return row
    return row._replace(
        num_connected=row.num_connected + 1,
        num_running=row.num_running + remote.load.num_running,
        num_waiting=row.num_waiting + remote.load.num_waiting,
        free_blocks=row.free_blocks + remote.load.free_blocks,
        total_blocks=row.total_blocks + remote.load.total_blocks,
    )
