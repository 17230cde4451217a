import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.router import link as module
from penstock.router.link import connect
from penstock.wire.errors import ReplicaLost
from penstock.wire.frames import STREAM_METHOD, Abort, Announce, Delta, DownFrame, Hello, Load, SamplingParams, StepCosts, Submit, UpFrame, decode_up, encode

TIMEOUT_S = 10.0
LOAD = Load("epoch", 0, 8, 0, 0, 0, 0, 100, 100, StepCosts(), 512)
FIRST = DownFrame([], LOAD)
Behaviour = Callable[[Any], Awaitable[None]]


class Heard:
    """What a link told its owner."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[DownFrame] = asyncio.Queue()
        self.losses: asyncio.Queue[None] = asyncio.Queue()

    def on_frame(self, frame: DownFrame) -> None:
        self.frames.put_nowait(frame)

    def on_lost(self) -> None:
        self.losses.put_nowait(None)

    async def frame(self) -> DownFrame:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.frames.get()

    async def loss(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.losses.get()


@asynccontextmanager
async def replica(behave: Behaviour) -> AsyncIterator[str]:
    """A replica that does what the test says with each stream; its address."""

    async def serve(_requests: object, context: Any) -> None:
        await behave(context)

    service, method = STREAM_METHOD.removeprefix("/").split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: grpc.stream_stream_rpc_method_handler(serve)}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def greeted(context: Any) -> UpFrame:
    """Answers the Hello."""
    hello = decode_up(await context.read())
    await context.write(encode(FIRST))
    return hello


async def forever(_context: Any) -> None:
    await asyncio.Event().wait()


async def greet_only(context: Any) -> None:
    await greeted(context)
    await forever(context)


class Detour:
    """A relay in front of a replica, whose connections can be cut, or swallow what comes."""

    def __init__(self) -> None:
        self.address = ""
        self.is_silent = False
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def relay(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        self._writers += [writer, back]
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer), return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self.is_silent:
                writer.write(data)


@asynccontextmanager
async def detour(address: str) -> AsyncIterator[Detour]:
    way = Detour()
    server = await asyncio.start_server(lambda reader, writer: way.relay(address, reader, writer), "127.0.0.1", 0)
    way.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield way
    finally:
        way.cut()
        server.close()


def submit(sid: int) -> Submit:
    return Submit(sid, f"q{sid}", b"", b"", b"c" * 16, SamplingParams(max_tokens=1))


def test_a_link_says_hello_first_and_passes_on_the_first_load() -> None:
    async def main() -> None:
        hellos: list[UpFrame] = []

        async def behave(context: Any) -> None:
            hellos.append(await greeted(context))
            await forever(context)

        heard = Heard()
        async with replica(behave) as address, connect(address, "me", heard.on_frame, heard.on_lost):
            assert await heard.frame() == FIRST
            assert hellos == [UpFrame([Hello("me")])]

    asyncio.run(main())


def test_what_is_sent_in_one_turn_of_the_loop_travels_in_one_frame_in_order() -> None:
    async def main() -> None:
        received: asyncio.Queue[UpFrame] = asyncio.Queue()

        async def behave(context: Any) -> None:
            await greeted(context)
            while True:
                received.put_nowait(decode_up(await context.read()))

        heard = Heard()
        async with replica(behave) as address, connect(address, "me", heard.on_frame, heard.on_lost) as link:
            link.announce()
            link.submit(submit(1))
            link.abort(1)
            link.submit(submit(2))

            async with asyncio.timeout(TIMEOUT_S):
                assert (await received.get()).ops == [Announce(), submit(1), Abort(1), submit(2)]

    asyncio.run(main())


@pytest.mark.parametrize("is_broken", [True, False], ids=["broken", "ended"])
def test_a_loss_is_reported_once_and_nothing_after_it(is_broken: bool) -> None:
    async def main() -> None:
        async def behave(context: Any) -> None:
            await greeted(context)
            await context.write(encode(DownFrame([Delta(1, [5])])))
            if is_broken:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow")

        heard = Heard()
        async with replica(behave) as address, connect(address, "me", heard.on_frame, heard.on_lost) as link:
            await heard.loss()
            link.submit(submit(1))

        assert (heard.frames.qsize(), heard.losses.qsize()) == (2, 0)

    asyncio.run(main())


def test_a_replica_that_dies_is_lost_at_once() -> None:
    async def main() -> None:
        heard = Heard()
        async with replica(greet_only) as address, detour(address) as way, connect(way.address, "me", heard.on_frame, heard.on_lost):
            await heard.frame()
            way.cut()

            await heard.loss()

    asyncio.run(main())


def test_a_replica_that_falls_silent_is_lost_because_pings_go_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OPTIONS", tuple((name, 200 if value == module.KEEPALIVE_MS else value) for name, value in module._OPTIONS))

    async def main() -> None:
        heard = Heard()
        async with replica(greet_only) as address, detour(address) as way, connect(way.address, "me", heard.on_frame, heard.on_lost):
            await heard.frame()
            way.is_silent = True

            await heard.loss()

    asyncio.run(main())


def test_a_closed_link_ends_the_stream_and_reports_no_loss() -> None:
    async def main() -> None:
        gone = asyncio.Event()
        heard = Heard()

        async def behave(context: Any) -> None:
            await greeted(context)
            try:
                await forever(context)
            finally:
                gone.set()

        async with replica(behave) as address:
            async with connect(address, "me", heard.on_frame, heard.on_lost):
                await heard.frame()
            async with asyncio.timeout(TIMEOUT_S):
                await gone.wait()

        assert heard.losses.empty()

    asyncio.run(main())


def test_an_error_of_the_owner_ends_the_link_as_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        lost = asyncio.Event()

        def fail(_frame: DownFrame) -> None:
            raise LookupError("ours")

        async with replica(greet_only) as address, connect(address, "me", fail, lost.set), asyncio.timeout(TIMEOUT_S):
            await lost.wait()

    asyncio.run(main())

    assert [record.message for record in caplog.records] == ["link failed"]


def test_where_nobody_listens_there_is_no_link() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        async def main() -> None:
            with pytest.raises(ReplicaLost, match=address):
                async with connect(address, "me", lambda _: None, lambda: None):
                    pass

        asyncio.run(main())


@pytest.mark.parametrize(
    ("behave", "sentence"),
    [
        (lambda context: context.abort(grpc.StatusCode.FAILED_PRECONDITION, "The router speaks protocol 1, this replica 2."), "this replica 2"),
        (lambda context: context.read(), "closed the stream"),
        (lambda context: context.write(b"\xc1"), "not a replica of this version"),
        (forever, "did not answer"),
    ],
    ids=["refused", "closed", "gibberish", "silent"],
)
def test_a_replica_that_does_not_answer_the_hello_is_no_link(behave: Behaviour, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.5)

    async def main() -> None:
        async with replica(behave) as address:
            with pytest.raises(ReplicaLost, match=sentence):
                async with connect(address, "me", lambda _: None, lambda: None):
                    pass

    asyncio.run(main())
