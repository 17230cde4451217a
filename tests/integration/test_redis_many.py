"""Redis behind Sentinel, and a Redis Cluster: what the platform keeps there, under load, and through losses."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError, RedisError

from bench.support.redis_servers import cluster, sentinels
from penstock.adapters.registry import Registry
from penstock.autoscale.observe import Reports
from penstock.autoscale.remote import RemoteServe
from penstock.autoscale.serve_agent import CallExecutor, serve_calls
from penstock.base.metrics import Metrics
from penstock.base.redis import connect
from penstock.base.redis_disk import find_disk_doubt
from penstock.base.redis_roles import ROLES, acl_rules, url_of, user_of
from penstock.cli import tenant_backup
from penstock.cli.tenant import delete
from penstock.prefix.plain_index import PlainIndex
from penstock.prefix.store import IndexStore, IndexWriter, StoreTimes
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.replica_client import Link, make_pool_callbacks
from penstock.router.replicas.report import Reporter, Waiting
from penstock.tenancy.data_loss import LossWatch
from penstock.tenancy.keys import KeyStore, create_key, list_keys, revoke_key
from penstock.tenancy.limits import Limiter
from penstock.tenancy.tenants import Limits, Settings, Tenants, settings_key
from penstock.tenancy.usage import UsageLog, Used, last_days
from penstock.wire.errors import Overloaded, Unauthenticated
from penstock.wire.frames import BlockEvents
from penstock.wire.serve_agent import AppPlaces, Place
from tests.integration.test_tenant_backup import SECRET, adapter

pytestmark = pytest.mark.slow

log = logging.getLogger(__name__)

LIMITS = Limits(tokens_per_minute=10_000_000)
NUM_TENANTS = 12
"""Enough that their keys lie on all nodes."""


async def wait_for(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.02)


class Load:
    """Requests of tenants, one after another each: a key that is looked up, and a reservation that is settled."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.keys: dict[str, str] = {}
        self.num_done = 0
        self.refused: list[str] = []
        """Causes of requests that were not served; a known key must never be among them."""
        self.num_lost = 0
        """Rounds of writes that Redis did not take."""
        self.is_writing = True
        """Whether it took the latest one."""
        self.longest_gap_s = 0.0
        """Longest time without a reservation that Redis itself decided."""
        self._client = client
        self._store = KeyStore(client, SECRET, cache_s=0.05)
        self._limiter = Limiter(client, "gateway-1")
        self._last = time.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        running = asyncio.create_task(self._limiter.run())
        asking = asyncio.create_task(self._ask_redis(stop))
        await asyncio.gather(*(self._serve(tenant, key, stop) for tenant, key in self.keys.items()))
        await asking
        running.cancel()
        await asyncio.wait([running])

    async def _serve(self, tenant: str, key: str, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                assert (await self._store.tenant(key)).id == tenant
                await self._limiter.reserve(tenant, LIMITS, f"{tenant}-{number}", 10)
                self._limiter.settle(tenant, f"{tenant}-{number}", 5)
                self.num_done += 1
            except (Unauthenticated, Overloaded) as error:
                self.refused.append(type(error).__name__)
            await asyncio.sleep(0.005)

    async def _ask_redis(self, stop: asyncio.Event) -> None:
        """A write of every kind of server, to see how long there is none."""
        number = 0
        while not stop.is_set():
            number += 1
            try:
                await asyncio.gather(*(self._client.set(f"probe:{{{each}}}", number) for each in range(NUM_TENANTS)))
                now = time.monotonic()
                self.longest_gap_s, self._last = max(self.longest_gap_s, now - self._last), now
                self.is_writing = True
            except (RedisError, OSError, TimeoutError):
                self.num_lost += 1
                self.is_writing = False
            await asyncio.sleep(0.02)


async def loaded(client: redis.asyncio.Redis) -> Load:
    load = Load(client)
    for number in range(NUM_TENANTS):
        load.keys[f"t{number}"] = await create_key(client, SECRET, f"t{number}")
    return load


async def through(load: Load, misfortune: Callable[[], object]) -> None:
    """Runs the load for a second, then through the misfortune until Redis takes writes again, and a second more."""
    stop = asyncio.Event()
    running = asyncio.create_task(load.run(stop))
    try:
        await wait_for(lambda: running.done() or load.num_done > 200)
        await asyncio.to_thread(misfortune)
        await wait_for(lambda: running.done() or (load.num_lost > 0 and load.is_writing), within_s=60.0)
        done = load.num_done
        await wait_for(lambda: running.done() or load.num_done > done + 200)
    finally:
        stop.set()
        await running


async def test_a_failover_by_sentinel_under_load_refuses_no_known_key_and_loses_no_tenant(tmp_path: Path) -> None:
    with sentinels(tmp_path) as (servers, master, url):
        async with connect(url) as client:
            load = await loaded(client)
            before = await tenant_backup.export(client, SECRET, 0.0)
            watch = LossWatch(client, lambda: None)
            assert await watch.check()
            await through(load, lambda: servers.kill(master))

            log.info("failover: %.1f s, %d requests, %d refused", load.longest_gap_s, load.num_done, len(load.refused))
            assert "Unauthenticated" not in load.refused
            assert load.longest_gap_s < 60.0, "a Sentinel that stood still for two seconds does nothing for thirty"
            assert await tenant_backup.export(client, SECRET, 0.0) == before
            assert await watch.check(), "a failover is no loss of data"
            key = await create_key(client, SECRET, "late")
            assert (await KeyStore(client, SECRET, 0.0, lookup_timeout_s=5.0).tenant(key)).id == "late"


async def test_all_that_the_platform_keeps_in_redis_works_in_a_cluster(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, _, url):
        async with connect(url) as client:
            keys = {f"t{number}": await create_key(client, SECRET, f"t{number}") for number in range(NUM_TENANTS)}
            store = KeyStore(client, SECRET, 0.0, lookup_timeout_s=5.0)
            assert {(await store.tenant(key)).id for key in keys.values()} == set(keys)
            tenants = Tenants(client)
            await asyncio.gather(*(tenants.change("t1", _one_more, now=3.0) for _ in range(4)))
            assert (await tenants.get("t1")).settings.limits.max_parallel == 4
            await delete(client, "t2")
            await revoke_key(client, SECRET, keys["t3"])
            assert await list_keys(client, "t3") == []

            limiter, usage = Limiter(client, "gateway-1"), UsageLog(client, "gateway-1")
            for tenant in keys:
                assert (await limiter.reserve(tenant, LIMITS, "r1", 10)).is_admitted
                usage.add(tenant, "demo", "", Used(1, 2, 0, 3))
            assert [row.used for row in await usage.read("t4", last_days(1, time.time()))] == [Used(1, 2, 0, 3)]

            registry = Registry(client, 8)
            for tenant in ("t5", "t6", "t7"):
                await registry.put(tenant, "tone", adapter(tenant))
            assert await registry.owned_digests() == {"t5", "t6", "t7"}

            data = b"".join(await tenant_backup.export(client, SECRET, 0.0))
            watch = LossWatch(client, lambda: None)
            await watch.check()
            await client.flushall()
            assert not await watch.check()
            report = await tenant_backup.restore(client, tenant_backup.parse(data, SECRET), 1.0)
            assert (report.made, report.deleted, report.keys_put, report.adapters_put) == (11, 1, 10, 3)
            assert b"".join(await tenant_backup.export(client, SECRET, 0.0)) == data
            assert "appendfsync everysec" in str(await find_disk_doubt(client))


def _one_more(settings: Settings) -> Settings:
    return Settings(limits=Limits(max_parallel=(settings.limits.max_parallel or 0) + 1))


async def test_the_copy_of_a_replicas_cache_is_written_and_read_in_a_cluster(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, _, url):
        async with connect(url) as client:
            blocks = [number.to_bytes(16, "little") for number in range(20)]

            async def snapshot() -> BlockEvents:
                return BlockEvents(1, b"".join(blocks[:10]), is_snapshot=True)

            for epoch in ("a.1", "b.1", "c.1"):
                writer = IndexWriter(client, epoch, epoch, snapshot, StoreTimes(heartbeat_s=0.05))
                writing = asyncio.create_task(writer.run())
                await wait_for(lambda writer=writer: writer.num_announced == 1)
                writer.push(BlockEvents(2, b"".join(blocks[10:]), blocks[0]))
                store = IndexStore(client)
                found = None
                while found is None or found.event_seq != 2:
                    found = await store.snapshot(epoch)
                    await asyncio.sleep(0.02)
                writing.cancel()
                await asyncio.wait([writing])

                assert len(found.stored) == 19 * 16
                assert await store.snapshot(epoch) is None, "gone with its writer"


async def test_each_role_does_its_work_in_a_cluster_as_its_own_user(tmp_path: Path) -> None:
    async def snapshot() -> BlockEvents:
        return BlockEvents(3, b"k" * 16, is_snapshot=True)

    with cluster(tmp_path) as (_, ports, url):
        for port in ports:
            with redis.Redis(port=port) as node:
                for role in ROLES:
                    node.execute_command("ACL SETUSER", user_of(role), "on", ">word", *acl_rules(role).split())
        clients = {role: connect(url_of(url, role, "word")) for role in ROLES}
        operator, gateway = clients["operator"], clients["gateway"]
        keys = [await create_key(operator, SECRET, f"t{number}") for number in range(NUM_TENANTS)]
        for key in keys:
            await KeyStore(gateway, SECRET, 0.05, lookup_timeout_s=5.0).tenant(key)
        assert await LossWatch(gateway, lambda: None).check()
        assert await IndexWriter(clients["replica"], "r1", "e1", snapshot)._write()
        assert await IndexStore(gateway).snapshot("e1") is not None
        assert await Reports(clients["autoscaler"]).read() == []
        assert len(await tenant_backup.export(operator, SECRET, 1000.0)) == 2 + 2 * NUM_TENANTS
        await delete(operator, "t0")
        assert "is away" not in str(await find_disk_doubt(operator))
        with pytest.raises(NoPermissionError):
            await clients["replica"].get(settings_key("t1"))
        for client in clients.values():
            await client.aclose()


async def test_a_node_of_a_cluster_that_dies_and_comes_back_costs_its_own_tenants_only_time(tmp_path: Path) -> None:
    with cluster(tmp_path) as (servers, ports, url):
        async with connect(url) as client:
            load = await loaded(client)

            def lose_one() -> None:
                servers.kill(ports[1])
                time.sleep(1.0)
                servers.start_again(ports[1]).close()

            await through(load, lose_one)

            log.info("node lost: %.1f s, %d requests, %d refused", load.longest_gap_s, load.num_done, len(load.refused))
            assert "Unauthenticated" not in load.refused
            assert load.longest_gap_s < 15.0
            assert len(await Tenants(client).all()) == NUM_TENANTS


def no_link(*_: object) -> AbstractAsyncContextManager[Link]:
    raise AssertionError("there are no replicas")


class PlayedServe:
    """Serve's control, with one application."""

    def __init__(self) -> None:
        self.targets = {"pool-a": 2}

    async def locate(self) -> list[AppPlaces]:
        return [AppPlaces(app, target, [Place("r1", "RUNNING", "")]) for app, target in self.targets.items()]

    async def set_target(self, name: str, target: int) -> None:
        self.targets[name] = target

    async def step_down(self, name: str, victims: tuple[str, ...], target: int) -> bool:
        return False


async def test_the_autoscalers_calls_and_reports_pass_a_cluster(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, _, url):
        async with connect(url) as client, connect(url) as other:
            control = PlayedServe()
            serving = asyncio.create_task(serve_calls(other, "ray-1", CallExecutor(control)))
            remote = RemoteServe(client, {"a": "pool-a"}, lambda: "ray-1", lambda: 1)
            assert (await remote.read())["a"].target == 2
            await remote.set_target("a", 5)
            assert control.targets == {"pool-a": 5}

            reports, metrics = Reports(client), Metrics()
            for gateway in ("g1", "g2", "g3"):
                callbacks = make_pool_callbacks(metrics, (), lambda _pool, _replica: None)
                fleet = Fleet({}, no_link, PlainIndex(), callbacks, Random())
                await Reporter(client, gateway, [], fleet, lambda _: Waiting(0, 0.0), lambda _: 0, metrics).exchange()
            assert len(await reports.read()) == 3
            serving.cancel()
            await asyncio.wait([serving])
