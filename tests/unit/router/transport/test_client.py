"""Clients that hang up or stop reading, at every moment of a request, over real sockets."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from penstock.router.config import GatewayConfig
from penstock.router.transport.client import Client, ClientGone, Watch
from penstock.wire.errors import BodyTooLarge
from tests.unit.router.http_fakes import KEY, MODEL, Script, World, listening, running_gateway


def request(**fields: object) -> bytes:
    body = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields})
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@asynccontextmanager
async def connected(world: World, data: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with listening(world.app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        try:
            writer.write(data)
            yield reader, writer
        finally:
            writer.close()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


def metric(world: World, name: str, **labels: str) -> float | None:
    return world.metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_in_the_queue_leaves_it(stream: bool) -> None:
    async with (
        running_gateway(Script(hold_start=asyncio.Event())) as world,
        connected(world, request(stream=stream)) as (_, writer),
    ):
        await world.dispatcher.until(lambda: world.dispatcher.num_waiting == 1)
        await hang_up(writer)
        await world.dispatcher.until(lambda: world.dispatcher.num_waiting == 0)

    assert world.dispatcher.num_open == 0
    assert metric(world, "penstock_client_disconnects_total", model=MODEL) == 1
    assert metric(world, "penstock_requests_total", model=MODEL, code="499") == 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 2])
async def test_a_client_that_hangs_up_later_frees_every_sequence(stream: bool, hold_after: int, n: int) -> None:
    num_open = n if hold_after else 1
    script = Script("abcdef", hold_after=hold_after)
    async with running_gateway(script) as world, connected(world, request(stream=stream, n=n)) as (reader, writer):
        await world.dispatcher.until(lambda: world.dispatcher.num_open == num_open)
        if stream and hold_after:
            await reader.readuntil(b"data: ")
        await hang_up(writer)
        await world.dispatcher.until(lambda: world.dispatcher.num_open == 0)

    assert metric(world, "penstock_client_disconnects_total", model=MODEL) == 1


async def test_a_client_that_does_not_read_stops_its_stream_until_it_hangs_up() -> None:
    num_deltas = 400
    async with (
        running_gateway(Script(deltas=[[97] * 60_000] * num_deltas)) as world,
        connected(world, request(stream=True)) as (reader, writer),
    ):
        await reader.readuntil(b"data: ")
        (stream,) = world.dispatcher.streams
        quiet = 0
        while quiet < 200:  # turns of the loop in which nothing was taken from the stream
            before = stream.num_given
            await asyncio.sleep(0)
            quiet = quiet + 1 if stream.num_given == before else 0
        taken, is_open = stream.num_given, not stream.is_closed
        await hang_up(writer)
        await world.dispatcher.until(lambda: world.dispatcher.num_open == 0)

    assert is_open
    assert taken < num_deltas


async def test_a_request_that_outlives_its_deadline_is_given_up() -> None:
    never = asyncio.Event()
    with pytest.raises(ClientGone), Watch(never.wait, 0.01):  # type: ignore[arg-type]
        await never.wait()

    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_somebody_elses_cancellation_stays_one() -> None:
    never = asyncio.Event()

    async def watched() -> None:
        with Client(never.wait).watched(100):  # type: ignore[arg-type]
            await never.wait()

    task = asyncio.create_task(watched())
    await asyncio.sleep(0)
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)

    assert isinstance(outcome, asyncio.CancelledError)


async def test_a_hangup_and_somebody_elses_cancellation_together_are_a_cancellation() -> None:
    """The server may cancel the requests of clients that hang up, on its own account."""
    gone = asyncio.Event()

    async def receive() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def watched() -> None:
        with Client(receive).watched(100):
            await asyncio.Event().wait()

    task = asyncio.create_task(watched())
    await asyncio.sleep(0)
    gone.set()
    task.cancel()
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)

    assert isinstance(outcome, asyncio.CancelledError)


async def test_a_request_that_ends_by_itself_leaves_no_task() -> None:
    async with running_gateway() as world:
        before = asyncio.all_tasks()
        await world.chat()
        await world.chat(stream=True)
        await world.chat(n=3)
        await asyncio.sleep(0)

        assert {task for task in asyncio.all_tasks() - before if "notify" not in repr(task)} == set()


async def test_a_watch_leaves_nothing_to_the_garbage_collector() -> None:
    never = asyncio.Event()

    async def watched() -> "weakref.ref[Watch]":
        with Client(never.wait).watched(100) as watch:  # type: ignore[arg-type]
            await asyncio.sleep(0)
        left = weakref.ref(watch)
        del watch
        return left

    gc.disable()
    try:
        left = await asyncio.create_task(watched())
        for _ in range(3):
            await asyncio.sleep(0)

        assert left() is None
    finally:
        gc.enable()


async def test_a_client_that_hangs_up_within_its_body_is_gone() -> None:
    async with running_gateway() as world, connected(world, request()[:-5]) as (_, writer):
        await writer.drain()
        await hang_up(writer)

    assert metric(world, "penstock_client_disconnects_total", model="none") == 1
    assert not world.dispatcher.generations


async def test_a_body_is_bounded_while_it_comes() -> None:
    messages = [{"type": "http.request", "body": b"abc", "more_body": True} for _ in range(3)]

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    with pytest.raises(BodyTooLarge):
        await Client(receive).body(None, max_bytes=5, timeout_s=1)

    assert len(messages) == 1


async def test_a_refused_body_leaves_the_connection_usable() -> None:
    big = request(user="x" * 3000)
    async with (
        running_gateway(config=GatewayConfig(max_body_bytes=1000)) as world,
        connected(world, big + request()) as (reader, _),
    ):
        first = await reader.readuntil(b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"}}")
        second = await reader.readuntil(b"\r\n")

    assert first.startswith(b"HTTP/1.1 413 ")
    assert second.startswith(b"HTTP/1.1 200 ")
