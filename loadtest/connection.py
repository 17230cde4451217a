"""HTTP/1.1 connections of the tester: one request at a time on each, its response told to a listener as it arrives.

Not a general client: no redirects, no proxies, no compression. The time of every arrival is taken as soon as the event loop hands the bytes
over, before anything is parsed.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from penstock_loadtest.errors import TargetUnreachable

CONNECT_TIMEOUT_S = 10.0
Headers = dict[str, str]
"""Names in lower case; of a name that comes twice, the last value."""


class Listener(Protocol):
    """Who hears a response. Times are `time.perf_counter`."""

    def on_head(self, status: int, headers: Headers, /) -> None: ...
    def on_body(self, data: bytes, at: float, /) -> None: ...
    def on_end(self, at: float, /) -> None:
        """The response is whole; nothing follows."""

    def on_broken(self, reason: str, at: float, is_unheard: bool, /) -> None:
        """The connection ended before the response did; nothing follows. is_unheard: not a byte had come."""


class Origin(NamedTuple):
    """Where connections go."""

    host: str
    port: int
    is_tls: bool

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def origin_of(url: str) -> Origin:
    """Raises TargetUnreachable for what is no http or https URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TargetUnreachable(f"{url!r} is no address of a server; one looks like http://127.0.0.1:8000/v1.")
    is_tls = parts.scheme == "https"
    return Origin(parts.hostname, port or (443 if is_tls else 80), is_tls)


class Connection(asyncio.Protocol):
    """A connection. `request` only while it is idle."""

    def __init__(self, on_idle: Callable[["Connection"], None]) -> None:
        """on_idle: called when a response is whole and the connection may carry another."""
        self._on_idle = on_idle
        self._transport: asyncio.Transport | None = None
        self._listener: Listener | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._at = 0.0
        self._headers: Headers = {}
        self._has_head = self._is_interim = self._is_unheard = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def request(self, data: bytes, listener: Listener) -> None:
        assert self._transport is not None
        assert self._listener is None
        self._listener = listener
        self._parser = httptools.HttpResponseParser(self)
        self._headers = {}
        self._has_head = False
        self._is_unheard = True
        self._transport.write(data)

    def close(self) -> None:
        """Now; the listener hears no more."""
        self._listener = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._at = time.perf_counter()
        if self._parser is None:
            self.close()  # nobody asked
            return
        self._is_unheard = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if cause is not None and not isinstance(cause, httptools.HttpParserError):
                raise cause from None  # of a listener
            self._break("what came is not HTTP/1.1")

    def connection_lost(self, error: Exception | None) -> None:
        self._at = time.perf_counter()
        if self._listener is not None and self._has_head and error is None and not {"content-length", "transfer-encoding"} & self._headers.keys():
            self._finish().on_end(self._at)  # such a body ends with the connection
        else:
            self._break("the connection was closed" if error is None else f"the connection broke ({type(error).__name__})")

    def _break(self, reason: str) -> None:
        listener, is_unheard = self._listener, self._is_unheard
        self.close()
        self._parser = None
        if listener is not None:
            listener.on_broken(reason, self._at, is_unheard)

    def _finish(self) -> Listener:
        assert self._listener is not None
        listener, self._listener, self._parser = self._listener, None, None
        return listener

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        self._is_interim = status < 200
        if self._is_interim:
            self._headers = {}
        elif self._listener is not None:
            self._has_head = True
            self._listener.on_head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._listener is not None:
            self._listener.on_body(data, self._at)

    def on_message_complete(self) -> None:
        if self._is_interim or self._listener is None or self._parser is None:
            return
        is_kept = self._parser.should_keep_alive()
        listener = self._finish()
        if not is_kept:
            self.close()
        elif self.is_open:
            self._on_idle(self)
        listener.on_end(self._at)


class Connections:
    """Connections to one origin, kept while they are idle; as many as are asked for."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._tls = ssl.create_default_context() if origin.is_tls else None
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    def idle(self) -> Connection | None:
        """One that is open and does nothing, last used first."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            self._open.discard(connection)
        return None

    async def fresh(self, timeout_s: float = CONNECT_TIMEOUT_S) -> Connection:
        """Raises TargetUnreachable."""
        loop = asyncio.get_running_loop()
        host, port, _ = self.origin
        where = self.origin.host_header
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(lambda: Connection(self._idle.append), host, port, ssl=self._tls)
        except TimeoutError:
            raise TargetUnreachable(f"{where} did not take the connection within {timeout_s:g} s.") from None
        except ssl.SSLError as error:
            raise TargetUnreachable(f"{where} can't be spoken to by TLS: {error.reason or error}.") from None
        except OSError as error:
            raise TargetUnreachable(f"{where} can't be reached: {_why(error)}.") from None
        self._open = {other for other in self._open if other.is_open} if len(self._open) > 2 * len(self._idle) + 1024 else self._open
        self._open.add(connection)
        return connection

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()


def _why(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (connection refused)"
    if type(error).__name__ == "gaierror":
        return "the name is not known"
    return error.strerror or type(error).__name__
