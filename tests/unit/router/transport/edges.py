"""A listener on a real socket with an app behind it, and peers that say to it what a test wants them to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import uvloop
from starlette.types import Receive, Scope, Send

from bench.support.free_ports import free_port
from penstock.router.transport.connection import EXTENSION
from penstock.router.transport.connections import ConnectionLimits
from penstock.router.transport.exchange import PART
from penstock.router.transport.listener import Listener

TIMEOUT_S = 10.0
SHORT_S = 0.05
LONG_S = 600.0
NUM_PARTS = 20
"""MiB of an answer that no socket buffers hold."""

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Notes each request; answers `ok`, at /big and /whole with many bytes before it, in parts or at once, at /stream
    after `begun` and when it may, at /direct behind parts that are written without asking, at /wait when the client is
    gone, at /hold after a long wait. A request with a header `key` proves its connection."""

    def __init__(self) -> None:
        self.may_finish = asyncio.Event()
        self.heads: list[list[tuple[bytes, bytes]]] = []
        self.num_gone = 0
        self.are_written: list[bool] = []
        """Whether each part at /parts was written past the server."""
        self.num_parts = 0
        """Parts of /direct that were written before the peer had to be waited for."""
        self.num_closed = 0
        """Times that writing without asking was closed."""
        self.num_bytes = 0
        """Length of the bodies that were read."""
        self.num_held = 0
        """Waits of /hold that have begun and not ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.heads.append(scope["headers"])
        if b"key" in dict(scope["headers"]):
            scope["extensions"][EXTENSION].prove("tenant-1")
        if scope["path"] == "/body":
            await self._read(receive)
        if scope["path"] in ("/wait", "/late"):
            while (await receive())["type"] != "http.disconnect":
                pass
            self.num_gone += 1
        if scope["path"] in ("/hold", "/late"):
            self.num_held += 1
            await scope["extensions"][EXTENSION].hold(LONG_S)
            self.num_held -= 1
        headers = [(b"content-length", b"2")] if scope["path"] == "/body" or scope["path"] == "/" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            await self.may_finish.wait()
        if scope["path"].startswith("/parts"):
            await self._write_parts(scope, send)
        if scope["path"] == "/direct":
            await self._write_directly(scope, send)
        for _ in range(NUM_PARTS if scope["path"] == "/big" else 0):
            await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
        before = bytes(NUM_PARTS * 2**20) if scope["path"] == "/whole" else b""
        await send({"type": "http.response.body", "body": before + b"ok"})

    async def _write_parts(self, scope: Scope, send: Send) -> None:
        """Write the same parts by the message and by the connection itself, or what no part may be."""
        connection = scope["extensions"][EXTENSION]
        for part in (b"a", b"{}" * 300) if scope["path"] == "/parts" else ():
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self.are_written.append(connection.write_part(scope, part))
        self.are_written.append(connection.write_part(scope, b""))
        self.are_written.append(connection.write_part(dict(scope), b"of another request"))

    async def _write_directly(self, scope: Scope, send: Send) -> None:
        """Write parts without asking until that is closed, wait until the peer reads, and write one more."""
        connection = scope["extensions"][EXTENSION]
        write = connection.open_parts(scope, self.on_close)
        assert connection.open_parts(dict(scope), self.on_close) is None
        while not self.num_closed:
            write(PART % (2**16, b"{", b"-" * (2**16 - 2), b"}"))
            self.num_parts += 1
            await asyncio.sleep(0)
        assert connection.open_parts(scope, self.on_close) is None
        await send({"type": "http.response.body", "body": b"waited", "more_body": True})
        write = connection.open_parts(scope, self.on_close)
        if write is not None:
            write(PART % (3, b"e", b"n", b"d"))

    def on_close(self) -> None:
        self.num_closed += 1

    async def _read(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_gone += 1
                return
            self.num_bytes += len(message["body"])
            if not message["more_body"]:
                return


Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Edge:
    """A listener with an app behind it, and what connects to it."""

    def __init__(self, app: App, listener: Listener, port: int) -> None:
        self.app = app
        self.listener = listener
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, data: bytes = b"", address: str = "127.0.0.1") -> Peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(address, 0))
        self._writers.append(writer)
        writer.write(data)
        return reader, writer

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110  # what is waited for has no event
                await asyncio.sleep(0.001)

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()

    async def until_open(self, count: int) -> None:
        """Wait until that many connections are open."""
        await self.until(lambda: len(self.listener.connections) == count)


@asynccontextmanager
async def edge(trusted_proxies: list[str] | None = None, **limits: float) -> AsyncIterator[Edge]:
    app, port = App(), free_port()
    listener = Listener(
        app,
        "127.0.0.1",
        [port],
        1,
        ConnectionLimits(**{"head_timeout_s": LONG_S, "keep_alive_s": LONG_S, **limits}),  # type: ignore[arg-type]
        trusted_proxies,
    )
    listener.start()
    subject = Edge(app, listener, port)
    try:
        yield subject
    finally:
        subject.hang_up()
        await listener.stop()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(3 * TIMEOUT_S):
            await main()

    uvloop.run(bounded())


def is_ok(answer: bytes) -> bool:
    return answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"ok")


async def one_answer(reader: asyncio.StreamReader) -> bytes:
    """The next answer on a connection that stays open."""
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.readuntil(b"\r\n\r\nok")
