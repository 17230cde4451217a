import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.channel import HEADER_BYTES, Channel

TIMEOUT_S = 10.0


class End:
    """One end of a connection, and what came to it."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.has_message = asyncio.Event()
        self.ended = asyncio.Event()
        self.writable = asyncio.Event()
        self.connected = asyncio.Event()
        self.channel = Channel(self._on_message, lambda _: self.ended.set(), self.writable.set)

    def accept(self) -> Channel:
        asyncio.get_running_loop().call_soon(self.connected.set)
        return self.channel

    def _on_message(self, message: bytes) -> None:
        self.messages.append(message)
        self.has_message.set()

    async def got(self, count: int) -> list[bytes]:
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.messages) < count:
                self.has_message.clear()
                await self.has_message.wait()
        return self.messages


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[End, End]]:
    loop = asyncio.get_running_loop()
    here, there = End(), End()
    server = await loop.create_server(there.accept, "127.0.0.1", 0)
    await loop.create_connection(here.accept, "127.0.0.1", server.sockets[0].getsockname()[1])
    await there.connected.wait()
    try:
        yield here, there
    finally:
        server.close()
        for end in (here, there):
            if end.channel.is_open:
                end.channel.abort()


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(HEADER_BYTES, "little") + message


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 60), min_size=1))
def test_messages_come_out_whole_and_in_order_however_the_bytes_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    found: list[bytes] = []
    channel = Channel(found.append, lambda _: None)
    channel.is_open = True
    data = b"".join(map(framed, messages))

    position = turn = 0
    while position < len(data):
        size = cuts[turn % len(cuts)]
        channel.data_received(data[position : position + size])
        position, turn = position + size, turn + 1

    assert found == messages


def test_messages_of_any_size_go_both_ways() -> None:
    async def main() -> None:
        async with connection() as (here, there):
            sent = [b"", b"a", b"b" * 3_000_000, b"c"]
            for message in sent:
                here.channel.send(message)
                there.channel.send(message)

            assert await there.got(4) == sent
            assert await here.got(4) == sent

    uvloop.run(main())


def test_an_end_is_told_once_to_both_and_what_was_sent_before_arrives() -> None:
    async def main() -> None:
        async with connection() as (here, there):
            here.channel.send(b"last")
            here.channel.close()
            here.channel.send(b"too late")
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(here.ended.wait(), there.ended.wait())

            assert there.messages == [b"last"]

    uvloop.run(main())


def test_a_peer_that_does_not_read_makes_the_channel_unwritable_until_it_does() -> None:
    async def main() -> None:
        async with connection() as (here, there):
            there.channel._transport.pause_reading()
            while here.channel.is_writable:
                here.channel.send(b"x" * 100_000)
                await asyncio.sleep(0)
            there.channel._transport.resume_reading()

            async with asyncio.timeout(TIMEOUT_S):
                await here.writable.wait()
            assert here.channel.is_writable

    uvloop.run(main())


def test_a_length_beyond_the_bound_ends_the_connection() -> None:
    async def main() -> None:
        async with connection() as (here, there):
            there.channel.max_message_bytes = 10
            here.channel.send(b"x" * 11)
            async with asyncio.timeout(TIMEOUT_S):
                await there.ended.wait()

            assert there.messages == []

    uvloop.run(main())


def test_after_the_owner_has_closed_it_no_message_is_passed_on() -> None:
    found: list[bytes] = []

    def take(message: bytes) -> None:
        found.append(message)
        channel.is_open = False

    channel = Channel(take, lambda _: None)
    channel.is_open = True

    channel.data_received(framed(b"one") + framed(b"two"))

    assert found == [b"one"]


def test_a_channel_closed_before_it_is_made_never_begins() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        here, there = End(), End()
        there.channel.abort()
        server = await loop.create_server(there.accept, "127.0.0.1", 0)
        await loop.create_connection(here.accept, "127.0.0.1", server.sockets[0].getsockname()[1])
        here.channel.send(b"hello")
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(here.ended.wait(), there.ended.wait())
        server.close()

        assert there.messages == []

    uvloop.run(main())
