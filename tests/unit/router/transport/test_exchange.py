import asyncio
from typing import Any

import pytest

from penstock.router.transport.client import ClientGone
from penstock.router.transport.exchange import EVENTS, Exchange


class Server:
    """The server's side of an exchange; it makes senders wait while `may_send` is not set."""

    def __init__(self) -> None:
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.sent: list[bytes] = []
        self.error: OSError | None = None

    async def send(self, message: Any) -> None:
        if not self.may_send.is_set():
            await self.may_send.wait()
        if self.error is not None:
            raise self.error
        self.sent.append(message.get("body", b"start"))

    async def exchange(self) -> Exchange:
        async def receive() -> Any:
            raise AssertionError("nothing is read")

        exchange = Exchange({"method": "POST", "path": "/", "headers": []}, receive, self.send, "r", 0.0)
        await exchange.start(200, EVENTS, ())
        return exchange


async def test_a_write_without_waiting_is_sent_at_once() -> None:
    server = Server()
    exchange = await server.exchange()
    exchange.write_now(b"a")

    assert server.sent == [b"start", b"a"]
    assert exchange.is_writable


async def test_when_the_client_does_not_read_the_next_write_waits_and_order_is_kept() -> None:
    server = Server()
    exchange = await server.exchange()
    server.may_send.clear()
    exchange.write_now(b"a")
    assert not exchange.is_writable
    writing = asyncio.create_task(exchange.write(b"b"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert server.sent == [b"start"]
    server.may_send.set()
    await writing

    assert server.sent == [b"start", b"a", b"b"]
    assert exchange.is_writable


async def test_while_a_write_waits_nothing_is_written_past_it() -> None:
    server = Server()
    exchange = await server.exchange()
    server.may_send.clear()
    writing = asyncio.create_task(exchange.write(b"a"))
    await asyncio.sleep(0)

    assert not exchange.is_writable
    server.may_send.set()
    await writing
    assert exchange.is_writable


async def test_a_client_that_went_during_a_write_without_waiting_is_noticed_by_the_next() -> None:
    server = Server()
    exchange = await server.exchange()
    server.error = ConnectionResetError()
    exchange.write_now(b"a")

    with pytest.raises(ClientGone):
        await exchange.write(b"b")
