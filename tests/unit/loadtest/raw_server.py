"""A server that answers with bytes: a test scripts what goes over the wire on each connection."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple


class ReceivedRequest(NamedTuple):
    """A request as the server read it."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found


class Wire:
    """The server's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.number = number  # 0 is the first connection
        self._reader = reader
        self._writer = writer

    async def read_request(self) -> ReceivedRequest:
        """The next request, whole. Raises IncompleteReadError when the client has gone."""
        line, *fields = (await self._reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = dict(field.split(": ", 1) for field in fields)
        return ReceivedRequest(line, headers, await self._reader.readexactly(int(headers.get("content-length", 0))))

    async def send(self, *parts: bytes) -> None:
        """Send each part in a packet of its own, as far as loopback keeps packets apart."""
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()
            await asyncio.sleep(0)

    async def wait_closed(self) -> None:
        """Wait until the client has closed."""
        with suppress(ConnectionError):
            while await self._reader.read(65536):
                pass

    def reset(self) -> None:
        self._writer.transport.abort()


class Site(NamedTuple):
    port: int
    scheme: str
    connections: list[Wire]
    """The connections so far, open and closed."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/v1"


Script = Callable[[Wire], Awaitable[None]]


@asynccontextmanager
async def site(
    script: Script, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Site]:
    """The script runs for every connection; the connection closes when it returns."""
    connections: list[Wire] = []
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        wire = Wire(reader, writer, len(connections))
        connections.append(wire)
        try:
            # the client hung up, or the test is over
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                await script(wire)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(handle, host, port, ssl=tls, limit=1 << 22)
    try:
        yield Site(server.sockets[0].getsockname()[1], "http" if tls is None else "https", connections)
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def response(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    head = [f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def head_of_stream(*headers: str) -> bytes:
    return "\r\n".join(
        ["HTTP/1.1 200 OK", "content-type: text/event-stream", "transfer-encoding: chunked", *headers, "\r\n"]
    ).encode()


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


LAST = b"0\r\n\r\n"


def event(value: object) -> bytes:
    """An event in a chunk of HTTP's own."""
    return chunked(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")
