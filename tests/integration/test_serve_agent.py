"""The autoscaler's calls through a real Redis: to the agent of the Ray cluster they are for, once, in time, or not at
all."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis.asyncio

from penstock.autoscale import remote
from penstock.autoscale.observation import ServeState
from penstock.autoscale.remote import RemoteServe
from penstock.autoscale.serve_agent import CallExecutor, next_call, serve_calls
from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.wire.serve_agent import (
    WANTED_KEY,
    AppPlaces,
    Call,
    Place,
    answer_key,
    call_key,
    calls_key,
    decode_wanted,
    encode,
)

APPS = {"a": "pool-a"}


class PlayedControl:
    """A Serve of one pool, which has its target's number of replicas at once."""

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


async def test_each_ray_cluster_has_its_own_agent(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        active, pending = PlayedControl(2), PlayedControl(7)
        agents = [
            asyncio.create_task(serve_calls(client, name, CallExecutor(control)))
            for name, control in (("rc1", active), ("rc2", pending))
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
            for agent in agents:
                agent.cancel()
            await asyncio.gather(*agents, return_exceptions=True)


async def test_a_call_that_nobody_answers_is_given_up_and_not_executed_later(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 0.5)
    monkeypatch.setattr(remote, "LAPSE_MS", 500)
    async with connect(server.url) as client:
        with pytest.raises(TimeoutError):
            await RemoteServe(client, APPS, lambda: "rc1", lambda: 1).locate("rc1")
        async with asyncio.timeout(20):
            while True:
                if not await client.keys(call_key("*")):
                    break
                await asyncio.sleep(0.01)

        assert await next_call(client, "rc1") is None


async def test_without_a_ray_cluster_a_mandate_or_redis_nothing_is_asked(server: EmbeddedRedis) -> None:
    def no_mandate() -> int:
        raise TimeoutError

    async with connect(server.url) as client:
        with pytest.raises(ValueError, match="no active Ray cluster"):
            await RemoteServe(client, APPS, lambda: None, lambda: 1).read()
        with pytest.raises(TimeoutError):
            await RemoteServe(client, APPS, lambda: "rc1", no_mandate).read()
        assert await client.keys() == []
    away: redis.asyncio.Redis = connect("unix:///nowhere/redis.sock")
    with pytest.raises(TimeoutError, match="Redis is away"):
        await RemoteServe(away, APPS, lambda: "rc1", lambda: 1).read()


CALLS_BEFORE = {
    Call("c1", 3, "read"): b"\x97\xa2c1\x03\xa4read\xa0\x00\x00\x90",
    Call("c2", 3, "set", "pool-a", 2, 4): b"\x97\xa2c2\x03\xa3set\xa6pool-a\x02\x04\x90",
    Call("c3", 3, "down", "pool-a", 4, 3, ("r1",)): b"\x97\xa2c3\x03\xa4down\xa6pool-a\x04\x03\x91\xa2r1",
}
"""Calls as the release writes them in which the agent is called `hand` (recorded from its encoder)."""
PLACES_BEFORE = (
    b"\x93\xc3\x92\x93\xa6pool-a\x02\x92\x93\xa2r1\xa7RUNNING\xa810.0.0.1\x93\xa2r2\xa8STARTING\xc0"
    b"\x93\xa7gateway\x01\x90\xc0"
)
"""That release's answer to a read: pool-a has the target 2, r1 runs and r2 starts."""
DONE_BEFORE = b"\x93\xc3\x90\xc0"
"""That release's answer to a call that was executed."""
WANTED_BEFORE = b"\x82\xa6pool-a\x04\xa7gateway\x01"
"""That release's targets: 4 of pool-a."""


async def test_during_an_upgrade_the_autoscaler_scales_the_ray_cluster_of_the_release_before(
    server: EmbeddedRedis,
) -> None:
    """The agent there is called `hand`; it takes the calls that it knows, from the keys that it knows."""
    taken: list[bytes] = []

    async def play_agent(client: redis.asyncio.Redis) -> None:
        for answer in (PLACES_BEFORE, DONE_BEFORE):
            _, call_id = await client.blpop(["penstock:hand:calls:old"], timeout=5)
            taken.append(await client.getdel(b"penstock:hand:call:" + call_id))
            await client.rpush(b"penstock:hand:answer:" + call_id, answer)

    async with connect(server.url) as client:
        playing = asyncio.create_task(play_agent(client))
        serve = RemoteServe(client, APPS, lambda: "old", lambda: 3)

        assert await serve.read() == {"a": ServeState(2, ("r1",), num_starting=1)}
        await serve.set_target("a", 4)
        await playing
    read, changed = (msgspec.msgpack.decode(data) for data in taken)
    assert read[1:] == [3, "read", "", 0, 0, []]
    assert changed[1:] == [3, "set", "pool-a", 2, 4, []]


async def test_during_an_upgrade_the_autoscaler_of_the_release_before_is_obeyed(server: EmbeddedRedis) -> None:
    """The Deployment of the autoscaler may be replaced after the new Ray cluster has come up."""
    control = PlayedControl(2)
    async with connect(server.url) as client:
        agent = asyncio.create_task(serve_calls(client, "new", CallExecutor(control)))
        try:
            for call, data in CALLS_BEFORE.items():
                await client.set(f"penstock:hand:call:{call.id}", data)
                await client.rpush("penstock:hand:calls:new", call.id)
            answers = [await client.blpop([f"penstock:hand:answer:{call.id}"], timeout=5) for call in CALLS_BEFORE]
        finally:
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)
    read, changed, stepped = (msgspec.msgpack.decode(data) for _, data in answers)
    assert read[1][0] == ["pool-a", 2, [["r0", "RUNNING", None], ["r1", "RUNNING", None]]]
    assert (changed, stepped, control.target) == ([True, [], None], [True, [], None], 3)


def test_messages_are_written_as_the_release_before_reads_them() -> None:
    assert {call: encode(call) for call in CALLS_BEFORE} == CALLS_BEFORE
    assert decode_wanted(WANTED_BEFORE) == {"pool-a": 4, "gateway": 1}
    assert encode({"pool-a": 4, "gateway": 1}) == WANTED_BEFORE
    assert (WANTED_KEY, calls_key("c"), call_key("i"), answer_key("i")) == (
        "penstock:hand:wanted",
        "penstock:hand:calls:c",
        "penstock:hand:call:i",
        "penstock:hand:answer:i",
    )
