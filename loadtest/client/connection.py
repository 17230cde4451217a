"""HTTP/1.1 connections of the tester: one request at a time on each, its response reported to a listener as it arrives.

Not a general client: no redirects, no proxies, no compression, no pipelining. The time of every arrival is taken as
soon as the event loop delivers the bytes, before anything is parsed. Small writes leave at once: the event loop sets
TCP_NODELAY.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from penstock_loadtest.client.addresses import Addresses
from penstock_loadtest.errors import TargetUnreachable

USER_AGENT = "penstock-loadtest"
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
MAX_HEAD_BYTES = 64 << 10
"""Most bytes of a response's head, and of whatever else is not its body: interim responses, trailers, extensions of a
chunk's size."""
Headers = dict[str, str]
"""Names in lower case; of a name that comes twice, the last value."""


class Listener(Protocol):
    """The receiver of a response. Times are `time.perf_counter`."""

    def on_head(self, status: int, headers: Headers, /) -> None: ...
    def on_body(self, data: bytes, at: float, /) -> None: ...
    def on_end(self, at: float, /) -> None:
        """The response is whole; nothing follows."""

    def on_broken(self, reason: str, at: float, is_unanswered: bool, /) -> None:
        """The connection ended before the response did; nothing follows. is_unanswered: not a byte had come."""


class Origin(NamedTuple):
    """Host, port and scheme that connections go to."""

    host: str
    port: int
    is_tls: bool

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def parse_origin(url: str) -> Origin:
    """The origin of a URL. Raises TargetUnreachable for what is no http or https URL, and for one with a user or
    password, without repeating it."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").encode("ascii" if url.isascii() else "idna").decode()
    except ValueError:
        parts, port, host = urlsplit(""), None, ""
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise TargetUnreachable(
            "The server's URL holds a user or a password; keys are taken from OPENAI_API_KEY, or from a tenant's "
            "key_env."
        )
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        raise TargetUnreachable(f"{url!r} is no address of a server; one looks like http://127.0.0.1:8000/v1.")
    is_tls = parts.scheme == "https"
    return Origin(host, port or (443 if is_tls else 80), is_tls)


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, which carries one request at a time; `request` may be called only while it is idle."""

    def __init__(self, on_idle: Callable[["Connection"], None], on_lost: Callable[["Connection"], None]) -> None:
        """`on_idle` is called when a response is whole and the connection may carry another request, `on_lost` when it
        is closed."""
        self.round_trip_s = 0.0
        """Upper bound of a round trip in seconds, measured by whoever makes the connection."""
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._listener: Listener | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._at = 0.0
        self._headers: Headers = {}
        self._bodies: list[bytes] = []
        """Parts of the response's body in the bytes that just came, one for each chunk of HTTP's own."""
        self._other_bytes = 0
        """Bytes that came since the last part of a body: of heads, trailers and sizes of chunks."""
        self._has_head = self._is_interim = self._is_unanswered = self._is_whole = self._is_kept = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def request(self, data: bytes, listener: Listener) -> None:
        assert self._transport is not None
        assert self._listener is None
        self._listener = listener
        self._parser = httptools.HttpResponseParser(self)
        self._headers = {}
        self._other_bytes = 0
        self._has_head = self._is_whole = self._is_kept = False
        self._is_unanswered = True
        if self.is_open:
            self._transport.write(data)
        else:  # it was closed after the pool gave it out
            self._at = time.perf_counter()
            self._break("the connection was closed")

    def close(self) -> None:
        """Close at once; the listener gets no further calls."""
        self._listener = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._at = at = time.perf_counter()
        listener, parser = self._listener, self._parser
        if listener is None or parser is None:
            self.close()  # no request is open
            return
        self._is_unanswered = False
        self._other_bytes += len(data)
        reason = None
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            reason = "the server changed to another protocol"
        except httptools.HttpParserError as error:
            reason = _explain_parse_error(error)
        bodies = self._bodies
        if bodies:
            self._other_bytes = 0
            listener.on_body(bodies[0] if len(bodies) == 1 else b"".join(bodies), at)
            bodies.clear()
        if self._is_whole or reason is not None or self._other_bytes > MAX_HEAD_BYTES:
            self._conclude(
                reason or f"the head of the response is longer than {MAX_HEAD_BYTES} bytes", is_clean=reason is None
            )

    def _conclude(self, reason: str, *, is_clean: bool) -> None:
        """The response is whole, or can't become so for that reason. is_clean: no bytes followed it."""
        if not self._is_whole:
            self._break(reason)
        elif self._listener is not None:
            listener, self._listener = self._listener, None
            if self._is_kept and is_clean and self.is_open:
                self._on_idle(self)
            else:
                self.close()
            listener.on_end(self._at)

    def connection_lost(self, error: Exception | None) -> None:
        self._at = time.perf_counter()
        if error is None and self._ends_with_connection:
            self._is_whole = True
            self._conclude("", is_clean=False)
        else:
            self._break(
                "the connection was closed" if error is None else f"the connection broke ({type(error).__name__})"
            )
        self._on_lost(self)

    @property
    def _ends_with_connection(self) -> bool:
        """RFC 9112, section 6.3: a body without a length, unless its last coding is chunked."""
        if not self._has_head or "content-length" in self._headers:
            return False
        return not self._headers.get("transfer-encoding", "").lower().endswith("chunked")

    def _break(self, reason: str) -> None:
        listener, is_unanswered = self._listener, self._is_unanswered
        self.close()
        if listener is not None:
            listener.on_broken(reason, self._at, is_unanswered)

    # httptools

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise _Surplus

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # behind the body come trailers
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._listener is not None
        assert self._parser is not None
        status = self._parser.get_status_code()
        self._is_interim = status < 200
        if self._is_interim:
            self._headers = {}
        else:
            self._has_head = True
            self._listener.on_head(status, self._headers)

    @property
    def on_body(self) -> Callable[[bytes], None]:
        return self._bodies.append

    def on_message_complete(self) -> None:
        assert self._transport is not None
        assert self._parser is not None
        if not self._is_interim:
            self._is_whole = True
            # one that answered before it had the whole request has not read the rest
            self._is_kept = self._parser.should_keep_alive() and not self._transport.get_write_buffer_size()


class _Surplus(Exception):
    """More than one response came."""


def _explain_parse_error(error: httptools.HttpParserError) -> str:
    """The sentence for a parser's error. Raises what a listener raised, since that is no error of the server."""
    cause = error.__context__
    if cause is not None and not isinstance(cause, httptools.HttpParserError | _Surplus):
        raise cause from None
    return "what came is not HTTP/1.1"


class Connections:
    """Connections to one origin, kept while they are idle; their number is not limited."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._addresses = Addresses(origin.host, origin.port)
        self._tls = ssl.create_default_context() if origin.is_tls else None
        self._idle: dict[Connection, None] = {}
        self._open: set[Connection] = set()

    def take_idle(self) -> Connection | None:
        """An open connection that carries no request, the last used one first. Returns None if there is none."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_open:
                return connection
        return None

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> Connection:
        """A new connection, made within `timeout_s`. Raises TargetUnreachable."""
        where = self.origin.host_header
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._dial(timeout_s)
        except TimeoutError:
            raise TargetUnreachable(f"{where} did not take the connection within {timeout_s:g} s.") from None
        except ssl.SSLError as error:
            raise TargetUnreachable(f"{where} can't be spoken to by TLS: {_explain_tls_error(error)}.") from None
        except OSError as error:
            raise TargetUnreachable(f"{where} can't be reached: {_explain_os_error(error)}.") from None
        if connection.is_open:
            self._open.add(connection)
        return connection

    def close(self) -> None:
        """Close all connections, whatever they carry."""
        self._idle.clear()
        for connection in list(self._open):
            connection.close()

    async def wait_closed(self) -> None:
        """Wait until the connections that were closed are gone, at most CLOSE_TIMEOUT_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._open:  # noqa: ASYNC110 (connection_lost is called in the loop's next rounds)
                    await asyncio.sleep(0)

    async def _dial(self, timeout_s: float) -> Connection:
        """Every address has its share of the time, so that one which does not answer leaves some to the others."""
        tried: set[str] = set()
        while True:
            address = await self._addresses.next()
            try:
                async with asyncio.timeout(timeout_s / self._addresses.count):
                    return await self._dial_at(address)
            except OSError:
                tried.add(address)
                self._addresses.exclude(address)
                if not self._addresses.has_untried(tried):
                    raise

    async def _dial_at(self, address: str) -> Connection:
        loop = asyncio.get_running_loop()
        name = self.origin.host if self.origin.is_tls else None
        began = time.perf_counter()
        _, connection = await loop.create_connection(
            self._new, address, self.origin.port, ssl=self._tls, server_hostname=name
        )
        connection.round_trip_s = time.perf_counter() - began
        return connection

    def _new(self) -> Connection:
        return Connection(self._on_idle, self._on_lost)

    def _on_idle(self, connection: Connection) -> None:
        self._idle[connection] = None

    def _on_lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)


def _explain_os_error(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (connection refused)"
    if isinstance(error, socket.gaierror):
        return "the name is not known"
    return error.strerror or type(error).__name__


def _explain_tls_error(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    return (error.reason or type(error).__name__).lower().replace("_", " ")
