import asyncio
import math
from pathlib import Path

import pytest

from penstock.autoscale.observation import ServeState, mean_costs
from penstock.autoscale.observe import SILENT_S, AgedReport, Reports, observe
from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.wire.frames import Load, StepCosts
from penstock.wire.scaling import GATEWAYS_KEY, GatewayReport, PoolFlow, PoolReport, ReplicaReport, encode, report_key

SERVE_STATE = ServeState(2, ("r1", "r2"))


def load(running: int, costs: StepCosts = StepCosts(base_s=0.01)) -> Load:  # noqa: B008 (a frozen struct)
    return Load("e", 0, 4, running, 1, 0, 0, 10, 10, costs, 512)


def report(
    gateway: str, number: int = 1, *, running: int = 0, waiting: int = 0, hits: int = 0, pool: str = "a"
) -> GatewayReport:
    rows = [PoolReport(pool, PoolFlow(num_started=number), waiting, waiting / 10)]
    return GatewayReport(gateway, number, rows, [ReplicaReport("r1", pool, load(running), 16, 5, hits)])


def test_several_gateways_are_one_pool() -> None:
    observed = observe(
        "a",
        SERVE_STATE,
        [
            AgedReport(report("g1", running=7, waiting=3, hits=10), 0.2),
            AgedReport(report("g2", running=8, waiting=2, hits=5), 0.1),
        ],
    )

    assert (observed.num_queued, observed.oldest_wait_s, observed.age_s) == (5, 0.3, 0.2)
    assert set(observed.flows) == {"g1", "g2"}
    (replica,) = observed.replicas
    assert replica.load.num_running == 8, "each says the same of a replica; the youngest report counts"
    assert replica.hit_tokens == 15, "but each sent its own requests there"
    assert (observed.num_present, observed.num_waiting) == (9, 6)


def test_a_gateway_that_fell_silent_is_left_out_while_another_speaks() -> None:
    observed = observe(
        "a",
        SERVE_STATE,
        [AgedReport(report("dead", waiting=100), SILENT_S + 1), AgedReport(report("g2", waiting=1), 0.1)],
    )

    assert (observed.num_queued, observed.age_s) == (1, 0.1)


def test_silence_has_no_age() -> None:
    observed = observe("a", SERVE_STATE, [AgedReport(report("dead"), SILENT_S + 1)])

    assert math.isinf(observed.age_s)
    assert observed.replicas == ()


def test_other_pools_are_not_looked_at() -> None:
    observed = observe("a", SERVE_STATE, [AgedReport(report("g1", pool="b", waiting=9), 0.1)])

    assert (observed.num_queued, observed.replicas) == (0, ())


def test_costs_are_averaged_over_the_replicas_that_know_theirs() -> None:
    observed = observe("a", SERVE_STATE, [AgedReport(report("g1"), 0.1)])
    other = observed.replicas[0]._replace(load=load(0, StepCosts(base_s=0.03)))
    unmeasured = observed.replicas[0]._replace(load=load(0, StepCosts()))

    costs = mean_costs((observed.replicas[0], other, unmeasured))

    assert costs is not None
    assert costs.base_s == pytest.approx(0.02)
    assert mean_costs((unmeasured,)) is None


def test_a_report_is_as_old_as_its_news(socket_dir: Path, tmp_path: Path) -> None:
    async def go(url: str) -> None:
        client, now = connect(url), [100.0]
        reports = Reports(client, lambda: now[0])
        try:
            await client.sadd(GATEWAYS_KEY, "g1", "gone")
            await client.set(report_key("g1"), encode(report("g1", 1)))
            assert [item.age_s for item in await reports.read()] == [0.0]
            now[0] += 3.0
            assert [item.age_s for item in await reports.read()] == [3.0], "the same report again is no news"
            await client.set(report_key("g1"), encode(report("g1", 2)))
            assert [item.age_s for item in await reports.read()] == [0.0]
            assert await client.smembers(GATEWAYS_KEY) == {b"g1"}, (
                "one whose report has lapsed is not asked for any more"
            )
            await client.set(report_key("g1"), b"of another version")
            assert await reports.read() == []
        finally:
            await client.aclose()

    server = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path / "redis", socket_dir=socket_dir / "redis")
    server.start()
    try:
        asyncio.run(go(server.url))
    finally:
        server.stop()
