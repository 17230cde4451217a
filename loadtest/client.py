"""Sends planned requests and returns their records: the instrument's own client, on one event loop.

It never raises for what a server does: refused, broken, late or odd, it is in the record. Cancelling the task of a request cuts it, and the
record comes back all the same.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from penstock_loadtest.bodies import PATHS, body_of, refused_field, without
from penstock_loadtest.connection import Connection, Connections, origin_of
from penstock_loadtest.errors import TargetUnreachable
from penstock_loadtest.exchange import Exchange
from penstock_loadtest.records import Record
from penstock_loadtest.target import Target, get
from penstock_loadtest.workload.planned import Message, Planned


class Clock:
    """Seconds since `start`, on the monotonic clock."""

    def __init__(self) -> None:
        self.zero_s = time.perf_counter()

    def start(self) -> None:
        self.zero_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.zero_s


class Answer(NamedTuple):
    record: Record
    text: str
    """What the server said, kept for turns of a session only."""
    body: bytes
    """As sent."""


class Client:
    """Connections are kept and never limited: an open loop must not wait for one."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self.clock = clock
        self._target = target
        self._connections = Connections(origin_of(target.url))
        self._refused: frozenset[str] = frozenset()
        """Optional fields that the server does not take."""
        self._heads: dict[tuple[str, str], str] = {}

    def prepare(self, planned: Planned, history: Sequence[Message] = ()) -> bytes:
        """The body of a request; callable from any thread."""
        return body_of(planned, self._target.model, history)

    async def send(self, planned: Planned, *, intended_s: float, deadline_s: float, history: Sequence[Message] = ()) -> Answer:
        """Send now. Times are the clock's; at deadline_s an answer that has not ended is `unfinished`."""
        return await self.send_body(planned, self.prepare(planned, history), intended_s=intended_s, deadline_s=deadline_s)

    async def send_body(self, planned: Planned, body: bytes, *, intended_s: float, deadline_s: float) -> Answer:
        """`send` of a body that `prepare` made."""
        while True:
            if self._refused:
                body = without(body, self._refused)
            exchange = await self._exchange(planned, body, intended_s, deadline_s)
            record = exchange.record
            field = refused_field(exchange.error_body) if record.status == 400 else None
            if field is None or field in self._refused:
                return Answer(record, exchange.text, body)
            self._refused |= {field}  # and once more without it

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a page of this or another server. Raises TargetUnreachable."""
        origin = origin_of(url)
        connections = self._connections if origin == self._connections.origin else Connections(origin)
        return await get(connections, "/" + url.partition("://")[2].partition("/")[2], timeout_s)

    async def close(self) -> None:
        self._connections.close()
        await asyncio.sleep(0)  # transports are told in the loop's next round

    async def _exchange(self, planned: Planned, body: bytes, intended_s: float, deadline_s: float) -> Exchange:
        loop = asyncio.get_running_loop()
        exchange = Exchange(
            self._record(planned, intended_s),
            self.clock.zero_s,
            stream=planned.stream,
            wants_usage=planned.stream and "stream_options" not in self._refused,
            keeps_text=planned.session is not None,
        )
        timers = [loop.call_later(deadline_s - self.clock.now(), exchange.expire)]
        if planned.cancel_after_s is not None:
            timers.append(loop.call_later(planned.cancel_after_s, exchange.hang_up))
        try:
            await self._deliver(exchange, self._head(planned, len(body)) + body)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            exchange.cut()
        finally:
            for timer in timers:
                timer.cancel()
        return exchange

    async def _deliver(self, exchange: Exchange, data: bytes) -> None:
        connection = self._connections.idle()
        is_reused = connection is not None
        if connection is None:
            connection = await self._connect(exchange)
        while connection is not None:
            self._write(exchange, connection, data)
            await exchange.done
            if not (is_reused and exchange.is_unheard):
                return
            # the server had closed an idle connection: that is no failure of this request
            exchange.reset()
            is_reused = False
            connection = await self._connect(exchange)

    async def _connect(self, exchange: Exchange) -> Connection | None:
        """None: the exchange has ended meanwhile, or there is no connection to be had, which ends it."""
        try:
            connection = await self._connections.fresh()
        except TargetUnreachable as error:
            exchange.fail(str(error).rstrip("."))
            return None
        if exchange.done.done():
            connection.close()
            return None
        return connection

    def _write(self, exchange: Exchange, connection: Connection, data: bytes) -> None:
        exchange.connection = connection
        exchange.record.sent_s = exchange.at(time.perf_counter())
        connection.request(data, exchange)

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
            path = "/" + self._target.url.partition("://")[2].partition("/")[2] + PATHS[planned.endpoint]
            key = self._target.keys.get(planned.tenant)
            authorization = f"authorization: Bearer {key}\r\n" if key else ""
            head = f"POST {path} HTTP/1.1\r\nhost: {self._connections.origin.host_header}\r\ncontent-type: application/json\r\n{authorization}content-length: "
            self._heads[planned.endpoint, planned.tenant] = head
        return f"{head}{length}\r\n\r\n".encode()
