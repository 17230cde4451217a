"""Streams whose requests wait for a first replica, over HTTP and alone."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from penstock.router.api.asgi import make_app
from penstock.router.completions.heartbeats import Heartbeats
from penstock.router.transport.exchange import EVENTS, Exchange
from penstock.wire.errors import Overloaded
from tests.unit.router.http_fakes import KEY, Script, listening, running_gateway

BEAT = b": waiting for a replica to start, expected in 42 s\n\n"
UNKNOWN = b": waiting for a replica to start\n\n"
PATHS = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True},
    "/v1/completions": {"model": "tiny", "prompt": "hi", "stream": True},
    "/v1/responses": {"model": "tiny", "input": "hi", "stream": True},
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
    },
}


class Server:
    """The server's side of an exchange, which counts what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.changed = asyncio.Condition()
        self.error: OSError | None = None

    async def send(self, message: Any) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(message.get("body", b"start"))
        async with self.changed:
            self.changed.notify_all()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5), self.changed:
            await self.changed.wait_for(lambda: len(self.sent) >= count)


def make(server: Server, first_s: float = 0.0, period_s: float = 0.001) -> Heartbeats:
    async def receive() -> Any:
        raise AssertionError("nothing is read")

    exchange = Exchange({"method": "POST", "path": "/", "headers": []}, receive, server.send, "r", 0.0)

    async def start() -> None:
        if exchange.status is None:
            await exchange.start(200, EVENTS, ())

    return Heartbeats(exchange, start, first_s, period_s)


async def test_heartbeats_go_on_until_the_last_sequence_waits_no_more() -> None:
    server = Server()
    beats = make(server)
    async with beats:
        beats.begin_hold(lambda: 42.0)
        beats.begin_hold(lambda: 42.0)
        beats.end_hold()
        await server.until(4)
        beats.end_hold()
    num_sent = len(server.sent)
    await asyncio.sleep(0.01)

    assert server.sent[0] == b"start"
    assert set(server.sent[1:]) == {BEAT}
    assert len(server.sent) == num_sent


async def test_a_short_wait_shows_nothing_and_an_unknown_time_is_not_made_up() -> None:
    server = Server()
    async with make(server, first_s=60.0) as beats:
        beats.begin_hold(lambda: 42.0)
        await asyncio.sleep(0)
        beats.end_hold()
    assert server.sent == []

    async with make(server) as beats:
        beats.begin_hold(lambda: None)
        await server.until(2)
        beats.end_hold()
    assert server.sent[1] == UNKNOWN


async def test_a_time_that_is_not_known_yet_is_said_soon_after_and_then_the_pause_is_long() -> None:
    server = Server()
    times = iter([None, None, 42.0])
    async with make(server, first_s=0.001, period_s=60.0) as beats:
        beats.begin_hold(lambda: next(times))
        await server.until(4)
        await asyncio.sleep(0.02)
        beats.end_hold()
    assert server.sent[1:] == [UNKNOWN, UNKNOWN, BEAT]


@pytest.mark.parametrize("num_turns", range(6))
async def test_whenever_the_wait_ends_nothing_is_sent_any_more(num_turns: int) -> None:
    server = Server()
    async with make(server) as beats:
        beats.begin_hold(lambda: 42.0)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        beats.end_hold()
        num_sent = len(server.sent)

    assert len(server.sent) == num_sent


async def test_a_wait_that_ends_while_the_response_starts_gets_no_heartbeat() -> None:
    server = Server()
    async with make(server) as beats:
        start = beats._start

        async def start_slowly() -> None:
            await start()
            beats.end_hold()

        beats._start = start_slowly
        beats.begin_hold(lambda: 42.0)
        await server.until(1)

    assert server.sent == [b"start"]


async def test_a_wait_that_follows_another_at_once_gets_no_heartbeat_before_its_time() -> None:
    server = Server()
    async with make(server, first_s=60.0) as beats:
        beats.begin_hold(lambda: 42.0)
        await asyncio.sleep(0)
        beats.end_hold()
        beats.begin_hold(lambda: 42.0)
        for _ in range(5):
            await asyncio.sleep(0)
        beats.end_hold()

    assert server.sent == []


async def test_a_client_that_is_gone_ends_them() -> None:
    server = Server()
    server.error = OSError("gone")
    async with make(server) as beats:
        beats.begin_hold(lambda: 42.0)
        await asyncio.sleep(0.01)
        beats.end_hold()

    assert server.sent == []


async def stream_held(path: str, script: Script) -> tuple[httpx.Response, list[bytes]]:
    """A streamed request that is held until its first heartbeat has come; the parts of its answer."""
    assert script.hold_start is not None
    async with running_gateway(script) as world:
        app = make_app(replace(world.deps, first_heartbeat_s=0.0))
        async with listening(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            headers, parts = {"authorization": f"Bearer {KEY}"}, []
            async with client.stream("POST", path, json=PATHS[path], headers=headers) as answer:
                async for part in answer.aiter_bytes():
                    parts.append(part)
                    script.hold_start.set()
            return answer, parts


@pytest.mark.parametrize("path", PATHS)
async def test_a_held_stream_has_comments_and_then_its_answer(path: str) -> None:
    answer, parts = await stream_held(path, Script("Paris.", hold_start=asyncio.Event(), is_cold=True))

    text = b"".join(parts)
    assert answer.status_code == 200
    assert parts[0] == BEAT
    assert b"P" in text.removeprefix(BEAT)
    assert text.rstrip().endswith((b"[DONE]", b"}"))
    assert "x-penstock-replica" not in answer.headers, "it was not known"


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_after_a_heartbeat_is_an_event(path: str) -> None:
    refusal = Overloaded("no replica came", retry_after_s=1.0)
    script = Script(hold_start=asyncio.Event(), is_cold=True, late_refusal=refusal)

    answer, parts = await stream_held(path, script)

    assert answer.status_code == 200
    assert parts[0] == BEAT
    assert b"no replica came" in b"".join(parts)
    names = [line for line in b"".join(parts).splitlines() if line.startswith(b"event: response.")]
    if path == "/v1/responses":
        assert names == [b"event: response.created", b"event: response.in_progress", b"event: response.failed"]


async def test_a_whole_answer_waits_in_silence_and_has_all_its_headers() -> None:
    gate = asyncio.Event()
    async with running_gateway(Script("Paris.", hold_start=gate, is_cold=True)) as world:
        body = PATHS["/v1/completions"] | {"stream": False}
        asking = asyncio.create_task(world.client.post("/v1/completions", json=body))
        await world.dispatcher.until(lambda: world.dispatcher.num_waiting == 1)
        gate.set()
        answer: httpx.Response = await asking

    assert answer.json()["choices"][0]["text"] == "Paris."
    assert answer.headers["x-penstock-replica"] == "replica-1"
