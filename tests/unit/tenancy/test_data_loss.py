"""A Redis that comes back empty is noticed, and nothing else is made of it."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.base.metrics import Metrics
from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.tenancy.data_loss import LossWatch
from penstock.tenancy.keys import KeyStore, create_key
from penstock.wire.errors import Unauthenticated


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    embedded.start()
    yield embedded
    embedded.stop()


def losses(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("penstock_redis_losses_total")


async def test_each_gateway_says_once_that_the_data_is_lost(
    server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(server.url) as client:
        metrics = Metrics()
        first, second = (LossWatch(client, metrics.redis_losses.inc) for _ in range(2))
        assert [await watch.check() for watch in (first, second, first, second)] == [True] * 4
        await client.flushall()
        with caplog.at_level(logging.ERROR):
            assert [await watch.check() for watch in (first, second)] == [False, False]

        assert [await watch.check() for watch in (first, second)] == [True, True]
        assert metrics.registry.get_sample_value("penstock_redis_losses_total") == 2
        assert [record.message for record in caplog.records] == ["redis_has_lost_its_data"] * 2


async def test_a_redis_that_is_away_and_comes_back_with_its_data_has_lost_nothing(
    server: EmbeddedRedis, tmp_path: Path, socket_dir: Path
) -> None:
    async with connect(server.url) as client:
        metrics = Metrics()
        watch = LossWatch(client, metrics.redis_losses.inc, metrics.redis_away.set)
        await watch.check()
        server.stop()
        assert await watch.check(), "nothing is known"
        assert metrics.registry.get_sample_value("penstock_redis_away") == 1
        again = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
        again.start()
        try:
            assert await watch.check()
        finally:
            again.stop()

        assert losses(metrics) == 0
        assert metrics.registry.get_sample_value("penstock_redis_away") == 0


async def test_known_keys_outlive_the_loss_and_unknown_ones_are_refused(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        store = KeyStore(client, b"s" * 32, cache_s=0.0, lookup_timeout_s=5.0)
        known, unknown = await create_key(client, b"s" * 32, "acme"), await create_key(client, b"s" * 32, "acme")
        await store.tenant(known)
        await client.flushall()

        assert (await store.tenant(known)).id == "acme"
        with pytest.raises(Unauthenticated):
            await store.tenant(unknown)
