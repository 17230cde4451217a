"""A relay in front of a server that counts what clients send there: connections, bytes, and marks found among them.

Not a proxy that reads HTTP: it counts on the socket, so nothing that arrives can be overlooked, whatever it is.
"""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

_PART_BYTES = 2**16


class CountingRelay:
    """Listens on a free port of loopback from entering to leaving the context. target: URL of the server behind it."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self.num_connections = 0
        self.received = bytearray()
        """All bytes that clients have sent."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_bytes(self) -> int:
        return len(self.received)

    def count(self, mark: bytes) -> int:
        """How often a mark is among the bytes received."""
        return self.received.count(mark)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = urlunsplit(self._target._replace(netloc=f"127.0.0.1:{port}"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._relay(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on both ways until one end closes."""
        behind, to_server = await asyncio.open_connection(self._target.hostname, self._target.port)
        ways = [
            asyncio.ensure_future(self._pass_on(reader, to_server, is_counted=True)),
            asyncio.ensure_future(self._pass_on(behind, writer, is_counted=False)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_server.close()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_counted: bool) -> None:
        while part := await source.read(_PART_BYTES):
            if is_counted:
                self.received += part
            sink.write(part)
            await sink.drain()
