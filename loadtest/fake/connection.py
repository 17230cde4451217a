"""HTTP/1.1 on one connection of the fake server: requests in, bytes out. One request at a time; a pipelining client is
cut off."""

import asyncio
import time
from typing import NamedTuple, Protocol, cast

import httptools


class Request(NamedTuple):
    """A whole request, with the time at which its last byte came."""

    method: str
    path: str
    key: str
    """The API key of `Authorization: Bearer`; empty without one."""
    body: bytes
    arrival_s: float
    is_last: bool
    """Whether the client wants the connection closed after the answer."""


class Handler(Protocol):
    """The server behind a connection."""

    def on_opened(self, connection: "Connection") -> None: ...
    def on_request(self, connection: "Connection", request: Request) -> None: ...
    def on_closed(self, connection: "Connection") -> None: ...


class Connection(asyncio.Protocol):
    """One client's connection: gives whole requests to the handler, writes what it sends."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._is_busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are of no asyncio class
        self._parser = httptools.HttpRequestParser(self)
        self._begin()
        self._handler.on_opened(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self._handler.on_closed(self)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()

    def _begin(self) -> None:
        self._url, self._key = b"", ""
        self._body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization" and value[:7].lower() == b"bearer ":
            self._key = value[7:].strip().decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._is_busy:
            self.abort()
            return
        self._is_busy = True
        path = httptools.parse_url(self._url).path.decode("latin-1")
        request = Request(
            self._parser.get_method().decode(),
            path,
            self._key,
            b"".join(self._body),
            self._now,
            not self._parser.should_keep_alive(),
        )
        self._begin()
        self._handler.on_request(self, request)

    def write(self, data: bytes) -> None:
        if self._transport is not None and data:
            self._transport.write(data)

    def finish_answer(self, *, closes: bool = False) -> None:
        """The answer is written; the next request may come."""
        self._is_busy = False
        if self._transport is not None and (closes or not self._parser.should_keep_alive()):
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
