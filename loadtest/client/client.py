"""Sends planned requests and returns their records: the instrument's own client, on one event loop.

It never raises for what a server does: refused, broken, late or odd, it is in the record. Cancelling the task of a
request cuts it: the connection is closed, and the record comes back as it stands, `unfinished` and `is_cut`, in place
of the cancellation.

Decisions: docs/decisions/load-tester.md
"""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from penstock_loadtest.client.bodies import PATHS, encode_body, find_refused_field, has_field, remove_fields
from penstock_loadtest.client.connection import (
    CONNECT_TIMEOUT_S,
    USER_AGENT,
    Connection,
    Connections,
    Origin,
    parse_origin,
)
from penstock_loadtest.client.exchange import Exchange
from penstock_loadtest.client.target import Target, format_authorization, get_page, path_with_query
from penstock_loadtest.errors import TargetUnreachable
from penstock_loadtest.planned import Message, Planned
from penstock_loadtest.results.records import Record

DEADLINE_MARGIN_S = 0.1
"""Seconds after the deadline at which an attempt to connect is given up: by then the request has ended as
`unfinished`."""


class Clock:
    """Seconds since `start`, on the monotonic clock."""

    def __init__(self) -> None:
        self.zero_s = time.perf_counter()

    def start(self) -> None:
        self.zero_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.zero_s


class Answer(NamedTuple):
    """How a request went, with what a session or a repeat needs of it."""

    record: Record
    text: str
    """The text of the server's answer, kept for turns of a session only."""
    body: bytes
    """The request's JSON as it was sent."""


class Client:
    """Connections are kept and never limited: an open loop must not wait for one."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self.clock = clock
        self._target = target
        self._connections = Connections(parse_origin(target.url))
        self._elsewhere: dict[Origin, Connections] = {}
        self._refused: frozenset[str] = frozenset()
        """Optional fields that the server does not take."""
        self._heads: dict[tuple[str, str], str] = {}
        self._under_way: set[Exchange] = set()

    def prepare(self, planned: Planned, history: Sequence[Message] = ()) -> bytes:
        """The body of a request; callable from any thread."""
        return encode_body(planned, self._target.model, history, refused=self._refused)

    async def send(
        self, planned: Planned, *, intended_s: float, deadline_s: float, history: Sequence[Message] = ()
    ) -> Answer:
        """Send now. Times are the clock's; at deadline_s an answer that has not ended is `unfinished`."""
        return await self.send_body(
            planned, self.prepare(planned, history), intended_s=intended_s, deadline_s=deadline_s
        )

    async def send_body(self, planned: Planned, body: bytes, *, intended_s: float, deadline_s: float) -> Answer:
        """`send` of a body that `prepare` made."""
        record = self._record(planned, intended_s)
        while True:
            body = remove_fields(body, self._refused)
            exchange = await self._exchange(planned, record, body, deadline_s)
            field = (
                find_refused_field(exchange.error_body) if record.status in (400, 422) and not exchange.is_cut else None
            )
            if field is None or not has_field(body, field):
                return Answer(record, exchange.text, body)
            self._refused |= {field}  # and once more without it
            record = self._record(planned, intended_s)
            record.sent_s, record.is_resent = exchange.record.sent_s, True

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a small page of any server; a path is one of the target's. Raises TargetUnreachable."""
        if url.startswith("/"):
            return await get_page(self._connections, url, timeout_s, next(iter(self._target.keys.values()), None))
        origin = parse_origin(url)
        if origin not in self._elsewhere:
            self._elsewhere[origin] = Connections(origin)
        return await get_page(self._elsewhere[origin], path_with_query(url) or "/", timeout_s)

    async def close(self) -> None:
        """Requests under way are cut."""
        for exchange in list(self._under_way):
            exchange.cut()
        for connections in (self._connections, *self._elsewhere.values()):
            connections.close()
            await connections.wait_closed()

    async def _exchange(self, planned: Planned, record: Record, body: bytes, deadline_s: float) -> Exchange:
        wants_usage = has_field(body, "stream_options")
        exchange = Exchange(
            record,
            self.clock.zero_s,
            stream=planned.stream,
            wants_usage=wants_usage,
            keeps_text=planned.session is not None,
        )
        exchange.expire_in(deadline_s - self.clock.now())
        self._under_way.add(exchange)
        try:
            await self._deliver(exchange, self._head(planned, len(body)) + body, planned.cancel_after_s, deadline_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            exchange.cut()
        finally:
            self._under_way.discard(exchange)
        return exchange

    async def _deliver(self, exchange: Exchange, data: bytes, cancel_after_s: float | None, deadline_s: float) -> None:
        connection = self._connections.take_idle()
        is_kept = connection is not None
        if connection is None:
            connection = await self._connect(exchange, deadline_s)
        if connection is not None and cancel_after_s is not None:
            exchange.hang_up_in(cancel_after_s)
        while connection is not None:
            await exchange.send_over(connection, data, is_kept=is_kept)
            if exchange.is_over:
                return
            # the server had closed a connection that was idle: no failure of this request
            exchange.record.is_resent, is_kept = True, False
            connection = await self._connect(exchange, deadline_s)

    async def _connect(self, exchange: Exchange, deadline_s: float) -> Connection | None:
        """Open a connection for an exchange. Returns None if the exchange has ended meanwhile, or if no connection can
        be made, which ends it."""
        left_s = max(0.0, deadline_s - self.clock.now()) + DEADLINE_MARGIN_S
        began = time.perf_counter()
        try:
            connection = await self._connections.connect(min(CONNECT_TIMEOUT_S, left_s))
        except TargetUnreachable as error:
            exchange.fail(str(error).rstrip("."))
            return None
        if exchange.is_over:
            connection.close()
            return None
        exchange.mark_sent(began)  # how long a connection takes is the server's doing
        return connection

    def _record(self, planned: Planned, intended_s: float) -> Record:
        return Record(
            index=planned.index,
            intended_s=round(intended_s, 6),
            wanted_tokens=planned.max_tokens,
            tenant=planned.tenant,
            kind=planned.kind,
            model=planned.model or self._target.model,
            endpoint=planned.endpoint,
            is_whole=not planned.stream,
            session=planned.session,
            turn=planned.turn,
        )

    def _head(self, planned: Planned, length: int) -> bytes:
        head = self._heads.get((planned.endpoint, planned.tenant))
        if head is None:
            target = self._target
            head = (
                f"POST {path_with_query(target.url)}{PATHS[planned.endpoint]} HTTP/1.1\r\n"
                f"host: {self._connections.origin.host_header}\r\nuser-agent: {USER_AGENT}\r\n"
                "content-type: application/json\r\n"
                f"{format_authorization(target.keys.get(planned.tenant))}content-length: "
            )
            self._heads[planned.endpoint, planned.tenant] = head
        return f"{head}{length}\r\n\r\n".encode()
