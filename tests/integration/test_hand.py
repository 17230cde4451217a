"""The autoscaler's calls through a real Redis: to the hand of the Ray cluster they are for, once, in time, or not at
all."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio

from penstock.autoscale import remote
from penstock.autoscale.observation import ServeState
from penstock.autoscale.remote import RemoteServe
from penstock.autoscale.serve_agent import Executor, next_call, serve_calls
from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.wire.serve_agent import AppPlaces, Place, call_key, decode_wanted

APPS = {"a": "pool-a"}


class Reach:
    """One pool, whose replicas are at once what is wanted."""

    def __init__(self, target: int) -> None:
        self.target = target

    async def locate(self) -> list[AppPlaces]:
        return [
            AppPlaces("pool-a", self.target, [Place(f"r{number}", "RUNNING", None) for number in range(self.target)]),
            AppPlaces("gateway", 1, []),
        ]

    async def set_target(self, name: str, target: int) -> None:
        self.target = target

    async def step_down(self, name: str, victims: tuple[str, ...], target: int) -> bool:
        self.target = target
        return True


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    running = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    running.start()
    yield running
    running.stop()


def test_each_ray_cluster_has_its_own_hand(server: EmbeddedRedis) -> None:
    async def main() -> None:
        async with connect(server.url) as client:
            active, pending = Reach(2), Reach(7)
            hands = [
                asyncio.create_task(serve_calls(client, name, Executor(reach)))
                for name, reach in (("rc1", active), ("rc2", pending))
            ]
            serve = RemoteServe(client, APPS, lambda: "rc1", lambda: 1)
            try:
                assert await serve.read() == {"a": ServeState(2, ("r0", "r1"))}
                await serve.set_target("a", 3)
                assert await serve.read() == {"a": ServeState(3, ("r0", "r1", "r2"))}
                assert await serve.step_down("a", ("r0",), 2)
                assert (await serve.locate("rc2"))[0].target == 7
                assert (active.target, pending.target) == (2, 7)
                await serve.remember(await active.locate())
                assert decode_wanted(await client.get("penstock:hand:wanted")) == {"pool-a": 2, "gateway": 1}
                assert [key async for key in client.scan_iter("penstock:hand:call*")] == [], "nothing is left lying"
            finally:
                for hand in hands:
                    hand.cancel()
                await asyncio.gather(*hands, return_exceptions=True)

    asyncio.run(main())


def test_a_call_that_nobody_answers_is_given_up_and_not_executed_later(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 0.5)
    monkeypatch.setattr(remote, "LAPSE_MS", 500)

    async def main() -> None:
        async with connect(server.url) as client:
            with pytest.raises(TimeoutError):
                await RemoteServe(client, APPS, lambda: "rc1", lambda: 1).locate("rc1")
            async with asyncio.timeout(20):
                while True:
                    if not await client.keys(call_key("*")):
                        break
                    await asyncio.sleep(0.01)

            assert await next_call(client, "rc1") is None

    asyncio.run(main())


def test_without_a_ray_cluster_a_mandate_or_redis_nothing_is_asked(server: EmbeddedRedis) -> None:
    def no_mandate() -> int:
        raise TimeoutError

    async def main() -> None:
        async with connect(server.url) as client:
            with pytest.raises(ValueError, match="no active Ray cluster"):
                await RemoteServe(client, APPS, lambda: None, lambda: 1).read()
            with pytest.raises(TimeoutError):
                await RemoteServe(client, APPS, lambda: "rc1", no_mandate).read()
            assert await client.keys() == []
        away: redis.asyncio.Redis = connect("unix:///nowhere/redis.sock")
        with pytest.raises(TimeoutError, match="Redis is away"):
            await RemoteServe(away, APPS, lambda: "rc1", lambda: 1).read()

    asyncio.run(main())
