"""A gateway's reports and what it shows of the autoscaler's targets, over a real Redis and fake replicas."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.router.replicas.report import Reporter, Waiting
from penstock.wire.discovery import StartTimes
from penstock.wire.scaling import (
    GATEWAYS_KEY,
    TARGETS_KEY,
    GatewayReport,
    PoolTarget,
    Targets,
    decode_report,
    decode_targets,
    encode,
    report_key,
)
from tests.unit.router.fleet_fakes import Cluster, FakeMember, settle

PROMPT = list(range(10))


def reporter(cluster: Cluster, client: redis.asyncio.Redis, clock: Callable[[], float] = time.monotonic) -> Reporter:
    def waiting(pool: str) -> Waiting:
        return Waiting(cluster.queue.num_waiting(pool), cluster.queue.oldest_s(pool))

    return Reporter(
        client, "gateway-1", ["pool"], cluster.fleet, waiting, cluster.index.num_held, cluster.metrics, clock
    )


def report_of(cluster: Cluster) -> GatewayReport:
    return reporter(cluster, connect("redis://127.0.0.1:1")).report()


async def test_a_report_counts_what_went_through_the_gateway() -> None:
    async with Cluster(FakeMember("r1")) as cluster:
        stream = await cluster.start(PROMPT)
        (before,) = report_of(cluster).pools
        tokens = await cluster.read(stream)
        (after,) = report_of(cluster).pools

        assert (before.flow.num_started, before.flow.num_ended) == (1, 0)
        assert (after.flow.num_started, after.flow.num_ended, after.flow.output_tokens) == (1, 1, len(tokens))
        assert after.flow.prefill_tokens + after.flow.cached_tokens == len(PROMPT)


async def test_a_report_tells_how_long_a_replica_took_to_start() -> None:
    async with Cluster(FakeMember("r1", start=StartTimes(12.0, 3.5))) as cluster:
        (row,) = report_of(cluster).replicas

        assert row.start == StartTimes(12.0, 3.5)


async def test_a_sequence_that_is_lost_has_ended_there_and_starts_anew_elsewhere() -> None:
    async with Cluster(FakeMember("r1"), FakeMember("r2")) as cluster:
        stream = await cluster.start(PROMPT)
        next(replica for replica in cluster.replicas.values() if replica.running).die()
        await settle()
        await cluster.read(stream)
        (row,) = report_of(cluster).pools

        assert (row.flow.num_started, row.flow.num_ended) == (2, 2)


async def test_a_sequence_that_is_given_up_has_ended() -> None:
    async with Cluster(FakeMember("r1")) as cluster:
        stream = await cluster.start(PROMPT)
        stream.close()
        (row,) = report_of(cluster).pools

        assert (row.flow.num_started, row.flow.num_ended) == (1, 1)


async def test_what_waits_is_told_with_how_long_it_has() -> None:
    async with Cluster(FakeMember("r1"), max_inflight=0) as cluster:
        waiting = asyncio.create_task(cluster.start(PROMPT))
        await settle()
        first, second = report_of(cluster), report_of(cluster)

        assert first.pools[0].num_waiting == 1
        assert second.pools[0].oldest_wait_s > first.pools[0].oldest_wait_s >= 0
        waiting.cancel()
        await settle()
        assert report_of(cluster).pools[0].oldest_wait_s == 0


async def test_every_ready_replica_of_a_scaled_pool_is_in_the_report() -> None:
    async with Cluster(FakeMember("r1"), FakeMember("r2"), FakeMember("other", pool="unscaled")) as cluster:
        cluster.replicas["r1"].report(num_running=3)
        report = report_of(cluster)

        assert {(row.replica_id, row.load.num_running) for row in report.replicas} == {("r1", 3), ("r2", 0)}


@pytest.fixture
def redis_url(socket_dir: Path, tmp_path: Path) -> Iterator[str]:
    server = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path / "redis", socket_dir=socket_dir / "redis")
    server.start()
    yield server.url
    server.stop()


async def test_reports_go_to_redis_and_targets_come_back_into_the_metrics(redis_url: str) -> None:
    client = connect(redis_url)
    try:
        async with Cluster(FakeMember("r1")) as cluster:
            subject = reporter(cluster, client)
            await subject.exchange()
            for autoscaler, steady in (("one", 3), ("one", 5), ("another", 2)):
                await client.set(TARGETS_KEY, encode(Targets(autoscaler, [PoolTarget("pool", 2, {"steady": steady})])))
                await subject.exchange()
            await client.set(TARGETS_KEY, b"of another version")
            await subject.exchange()
            data = await client.get(report_key("gateway-1"))
            page = cluster.metrics.render().decode()

            report = decode_report(data)
            assert report is not None
            assert (report.gateway, report.number) == ("gateway-1", 5)
            assert 0 < await client.pttl(report_key("gateway-1")) <= 10_000
            assert await client.smembers(GATEWAYS_KEY) == {b"gateway-1"}
            assert 'penstock_autoscale_target{pool="pool"} 2.0' in page
            assert 'penstock_autoscale_decisions_total{pool="pool",reason="steady"} 7.0' in page, (
                "3, 2 more, and 2 of another process"
            )
    finally:
        await client.aclose()


async def test_the_time_until_a_first_replica_counts_down_until_the_autoscaler_is_not_heard(redis_url: str) -> None:
    client, times_s = connect(redis_url), iter([99.0, 100.0, 101.0, 109.0, 111.0])
    try:
        async with Cluster(FakeMember("r1")) as cluster:
            unheard = reporter(cluster, client).ready_in_s("pool")
            subject = reporter(cluster, client, lambda: next(times_s))
            await client.set(TARGETS_KEY, encode(Targets("one", [PoolTarget("pool", 0, {}, ready_in_s=4.0)])))
            await subject.exchange()
            await subject.exchange()  # the same, which is no news
            known = [subject.ready_in_s("pool") for _ in range(3)]

            assert unheard is None
            assert known == [3.0, 0.0, None]
    finally:
        await client.aclose()


def test_what_is_no_message_of_this_version_is_none() -> None:
    assert decode_report(b"?") is None
    assert decode_targets(b"?") is None
