"""What gateways tell each other in a real Redis: who was given what, across a Redis that goes away and comes back."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.tenancy.service_exchange import ServiceExchange

PERIOD_S = 0.05
TIMEOUT_S = 20.0


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    embedded.start()
    yield embedded
    embedded.stop()


class Sharer:
    """A gateway's counters and exchange."""

    def __init__(self, url: str, name: str) -> None:
        self.counters = VirtualCounters()
        self.num_corrections = 0
        self.client = connect(url)
        self.exchange = ServiceExchange(self.client, name, self.counters, self.correct, period_s=PERIOD_S)

    def correct(self) -> None:
        self.num_corrections += 1


async def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.01)


async def rounds(sharer: Sharer, count: int = 3) -> None:
    """Wait for so many exchanges, tried at least."""
    wanted = sharer.num_corrections + count
    await until(lambda: sharer.num_corrections >= wanted, "the exchange goes on")


async def test_three_gateways_learn_what_the_others_gave_and_go_on_when_redis_is_back(server: EmbeddedRedis) -> None:
    sharers = [Sharer(server.url, f"gateway-{number}") for number in range(3)]
    first, second, third = (sharer.counters for sharer in sharers)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(sharer.exchange.run()) for sharer in sharers]
        for sharer in sharers:
            await rounds(sharer)
        second.enter("waits")
        first.charge("a", 10.0, 2.0)
        third.charge("a", 100.0, 1.0)
        await until(lambda: second.counter("a") == 105.0, "the second gateway knows what the others gave")
        await until(lambda: first.counter("a") == third.counter("a") == 105.0, "and so does each of them")
        await until(lambda: "waits" in first.waiting_elsewhere, "who waits at another gateway is known")

        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        first.charge("a", 1.0, 1.0)
        await rounds(sharers[0])
        assert first.counter("a") == 106.0
        first.charge("b", 7.0, 1.0)
        await until(lambda: third.counter("b") == 7.0, "Redis is back, and so is the exchange")
        await until(lambda: second.counter("a") == 106.0, "and it makes up for a short absence")
        for task in running:
            task.cancel()
    for sharer in sharers:
        await sharer.client.aclose()


async def test_a_gateway_that_is_gone_leaves_no_field_for_long(server: EmbeddedRedis) -> None:
    now = [0.0]
    client = connect(server.url)
    gone, here = (ServiceExchange(client, name, VirtualCounters(), lambda: None, lambda: now[0]) for name in "gh")
    await gone.exchange()
    await here.exchange()
    now[0] = 61.0
    await here.exchange()

    assert await client.hkeys("penstock:service") == [b"h"]
    assert 0 < await client.ttl("penstock:service") <= 60
    await client.aclose()
