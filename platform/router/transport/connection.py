"""One HTTP connection: uvicorn's protocol over httptools, with bounds on what a peer without a key may cost.

Not the register of all connections (`connections`), not requests (`exchange`). httptools bounds neither the head of a
request nor the time that it takes, and uvicorn ends only connections that rest. Here a head has a deadline, a most
number of bytes and of header lines; requests sent ahead are few; a body comes in chunks of some size; the rest of one
that nobody will read is thrown away for a while, then the connection ends. Invariant: none of these deadlines runs
while an answer is under way.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.base.errors import PenstockError
from penstock.router.transport.addresses import Addresses
from penstock.router.transport.connections import Closable, ConnectionLimits, Connections
from penstock.router.transport.turns import Turns
from penstock.wire.errors import BodyTooSlow, HeadTooLarge, InvalidRequest, error_json, http_error

MAX_HEAD_BYTES = 2**15
"""Largest head of a request, and of what may stand between the parts of a body: as nginx and most proxies allow."""
MAX_HEADERS = 100
"""Most header lines of a request."""
MAX_PIPELINED = 16
"""Most requests that a peer may send ahead of the answer under way."""
MAX_DISCARDED_BYTES = 2**25
"""Bytes of a body that are thrown away after the answer is sent, so that a client that sends first and reads then
learns why it was refused."""
MAX_SMALL_PARTS = 1024
"""Parts of one body, in the framing of a chunked one, that may be of any size."""
MIN_PART_BYTES = 256
"""Least mean size of the parts beyond: each costs a microsecond, however little it brings."""
LINGER_S = 1.0
"""Time in which a refused peer may read why, while bytes that it sends are thrown away; closing at once would reset the
connection, and the answer with it."""
MAX_LINGER_BYTES = 2**18
"""Most that is thrown away of them."""
EXTENSION = "penstock.connection"
"""Key of the connection in the `extensions` of an ASGI scope."""


class Connection(HttpToolsProtocol):
    """The protocol of one connection."""

    def __init__(
        self,
        register: Connections,
        addresses: Addresses,
        limits: ConnectionLimits,
        turns: Turns,
        *,
        opening: Closable | None = None,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._opening = opening
        """What stands in the register for this connection until it is made."""
        self._register = register
        self._addresses = addresses
        self._limits = limits
        self._turns = turns
        self._unread: list[bytes] | None = None
        """Bytes received that wait for their turn; None: there are none."""
        self._tenant: str | None = None
        """Tenant whose key was shown last."""
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        """Ends a connection whose peer does not read."""
        self._on_parts_closed: set[Callable[[], None]] = set()
        """Functions by which those who write parts without asking are told that they must ask again."""
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered, or was last; `cycle` is the latest one that came."""
        self._is_in_head = False
        self._is_in_body = False
        self._is_refused = False
        self._refusal: PenstockError = InvalidRequest("The request is not valid HTTP.")
        self._lost: asyncio.Future[None] | None = None
        """Done when the connection is lost; None: nobody waits for that."""
        self._num_pending = 0
        """Bytes received since the parser last completed a head or gave a part of a body."""
        self._num_headers = 0
        self._num_discarded = 0
        self._parts: list[bytes] = []
        """Parts of the body under way that the bytes just received have brought."""
        self._num_parts = self._num_body_bytes = 0
        """Counts for the body under way; each arrival of bytes counts as one part less than it brings."""

    @property
    def peer(self) -> str | None:
        """IP address of the other end."""
        return None if self.client is None else self.client[0]

    def address(self, forwarded_for: list[bytes]) -> str | None:
        """Address of the client of one request. Returns None if it is not known."""
        return self._addresses.of_request(self.peer, forwarded_for)

    def prove(self, tenant: str) -> None:
        """Note that a request on this connection has shown a valid key of a tenant."""
        self._tenant = tenant
        self._register.prove(self, tenant)
        self._register.note_known(self.peer)

    async def hold(self, delay_s: float) -> None:
        """Wait before the answer to a request whose body nobody will read, and which is no tenant's; nothing more is
        read from the peer meanwhile, and the connection may have to give way. Returns sooner if it is lost."""
        if self.transport.is_closing():
            return
        self.flow.pause_reading()
        if not self.pipeline:
            self.cycle.body.clear()
        self._lost = self.loop.create_future()
        self._register.rest(self)
        try:
            await asyncio.wait([self._lost], timeout=delay_s)
        finally:
            self._register.wake(self)

    def write_part(self, scope: Scope, data: bytes) -> bool:
        """Write a part of the streamed answer to the request of this scope as uvicorn would, without the messages and
        coroutines that it takes for that. Returns False where only uvicorn can: the answer is not in chunks, not begun,
        or over, the peer is gone, or it does not read."""
        if not data or not self._takes_parts(scope):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def open_parts(self, scope: Scope, on_close: Callable[[], None]) -> Callable[[bytes], None] | None:
        """A function that writes as `write_part` does, a part with its length before it, without asking again whether
        it may: only until `on_close` is called, which comes before that changes. Returns None where `write_part` would
        return False."""
        if not self._takes_parts(scope):
            return None
        self._on_parts_closed.add(on_close)
        return self.transport.write

    def _takes_parts(self, scope: Scope) -> bool:
        cycle = self._answered
        if cycle is None or cycle.scope is not scope or self.flow.write_paused:
            return False
        return bool(cycle.chunked_encoding) and not (cycle.disconnected or cycle.response_complete)

    def _close_parts(self) -> None:
        for on_close in self._on_parts_closed:
            on_close()
        self._on_parts_closed.clear()

    def abort(self) -> None:
        self._close_parts()
        self.transport.abort()

    # the connection
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if self._opening is not None:
            self._register.remove(self._opening)
        if not self._register.add(self, self._addresses.of_connection(self.peer)):
            self._is_refused = True
            transport.abort()
            return
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_parts()
        self._clear_deadline()
        self._clear_stall()
        self._unset_keepalive_if_required()  # uvicorn leaves it, and all that hangs on it, where the peer reset
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)
        self._register.remove(self)
        super().connection_lost(exc)
        if self._is_answering:  # uvicorn tells the latest request only
            assert self._answered is not None
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._let_go()

    def _let_go(self) -> None:
        """Drop what refers back to this connection, which is lost, so that it is freed with the last who knows it. The
        garbage collector would take tens of milliseconds at once for what a flood leaves."""
        self.cycle = self._answered = self.scope = None  # type: ignore[assignment]  # as uvicorn begins
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._num_discarded += len(data)
            if self._num_discarded > MAX_LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        if self._unread is not None:
            self._unread.append(data)
            self.flow.pause_reading()
        elif self._turns.take():
            self._read(data)
        else:
            self._unread = [data]
            self.flow.pause_reading()
            is_known = self._tenant is not None or self._register.is_known(self.peer)
            self._turns.wait(self._tenant or self.peer or "", self._read_unread, is_known=is_known)

    def _read_unread(self) -> None:
        """Read what waited for its turn."""
        assert self._unread is not None
        data, self._unread = b"".join(self._unread), None
        if self.parser is not None and not self._is_refused and not self.transport.is_closing():
            self.flow.resume_reading()
            self._read(data)

    def _read(self, data: bytes) -> None:
        self._num_pending += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request is answered as if it had not asked for another protocol
        except httptools.HttpParserError:
            self._refuse()
            return
        self._hand_over_body()
        if self._num_pending > MAX_HEAD_BYTES:
            self._refusal = _head_too_large()
            self._refuse()
        elif self._deadline is None and not self._is_in_body and not self._is_answering:
            self._set_deadline()

    def pause_writing(self) -> None:
        self._close_parts()
        super().pause_writing()
        is_post = self._answered is not None and self._answered.scope["method"] == "POST"
        if not is_post:  # an answer to a post has a deadline of its own
            self._set_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._clear_stall()

    # the parser's callbacks: what one raises, `feed_data` raises as an HttpParserError
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[dict-item]  # an extension of ours

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= (0 if self._is_in_head else self._num_headers) + MAX_HEADERS:
            self._refusal = _head_too_large()
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_headers = len(self.headers)
        if self._num_pending > MAX_HEAD_BYTES and self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = _head_too_large()
            raise self._refusal
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refusal
        self._num_pending = self._num_discarded = self._num_parts = self._num_body_bytes = 0
        self._is_in_head, self._is_in_body = False, True
        self._register.wake(self)
        if self._deadline is not None:
            self._clear_deadline()
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        if self.cycle.response_complete:
            self._num_discarded += len(body)
            if self._num_discarded > MAX_DISCARDED_BYTES:
                raise self._refusal
        self._num_body_bytes += len(body)
        if self._parts:
            self._num_parts += 1
            if self._num_parts > MAX_SMALL_PARTS + self._num_body_bytes // MIN_PART_BYTES:
                self._refusal = _too_many_parts()
                raise self._refusal
        self._parts.append(body)

    def _hand_over_body(self) -> None:
        """Give what the body has gained to its request, at once: uvicorn copies all of it for each part."""
        if self._parts:
            body = b"".join(self._parts)
            self._parts.clear()
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._hand_over_body()
        self._is_in_body = False
        self._num_pending = 0
        if len(self.headers) > self._num_headers:
            del self.headers[self._num_headers :]  # trailers; nobody reads them
        if self._deadline is not None:
            self._clear_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._close_parts()
        is_last = not self.pipeline
        if not is_last:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self.transport.is_closing() or self.flow.write_paused:
            self._set_stall()
        if is_last:
            self._register.rest(self)
            if (self._is_in_body or self._is_in_head) and self._deadline is None:
                self._set_deadline()

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    @property
    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    # deadlines
    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self._limits.head_timeout_s, self._give_up)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _set_stall(self) -> None:
        if self._stall is None:
            self._stall = self.loop.call_later(self._limits.stall_s, self.transport.abort)

    def _clear_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _close(self) -> None:
        """End the connection once what was written is sent, and at the latest after `stall_s`."""
        self.transport.close()
        self._set_stall()

    def _give_up(self) -> None:
        """The head, or the rest of a body that nobody reads, has not come in time. Where no head has begun nothing is
        said: the peer might take it for the answer to its next request."""
        self._deadline = None
        if not self._is_in_head:
            self._close()
            return
        self._refusal = BodyTooSlow(
            f"The request's head was not complete within {self._limits.head_timeout_s:g} seconds."
        )
        self._refuse()

    def _refuse(self) -> None:
        """End the connection, and say why unless an answer has begun: that would tear it."""
        self._is_refused = True
        self._clear_deadline()
        cycle = self.cycle
        has_begun = bool(self.pipeline) or (cycle is not None and cycle.response_started)
        if self.transport.is_closing() or (has_begun and (self._is_answering or self._is_in_body)):
            self.transport.abort()
            return
        if self._is_answering:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False  # there is nothing more to be written
            cycle.message_event.set()
        body = error_json(self._refusal)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[http_error(self._refusal).status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._deadline = self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self._close()


def _too_many_parts() -> InvalidRequest:
    return InvalidRequest(
        f"The request's body comes in more than {MAX_SMALL_PARTS} chunks of less than {MIN_PART_BYTES} bytes on"
        " average; send larger ones."
    )


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"The head of the request has more than {MAX_HEAD_BYTES} bytes or more than {MAX_HEADERS} header lines."
    )
