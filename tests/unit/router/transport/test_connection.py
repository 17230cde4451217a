"""Peers without a key, over real sockets: slow ones, large heads, floods of connections; and answers that go on beside
them."""

import asyncio
import gc
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from bench.support.free_ports import free_port
from penstock.router.transport.acceptor import MOST_ACCEPTED
from penstock.router.transport.connection import (
    EXTENSION,
    LINGER_S,
    MAX_DISCARDED_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_LINGER_BYTES,
    MAX_PIPELINED,
    MAX_SMALL_PARTS,
    MIN_PART_BYTES,
    Connection,
)
from penstock.router.transport.connections import ConnectionLimits
from penstock.router.transport.listener import Listener
from tests.unit.router.transport.test_listener import rest_of

TIMEOUT_S = 10.0
SHORT_S = 0.05
LONG_S = 600.0
NUM_PARTS = 20
"""MiB of an answer that no socket buffers hold."""
POST_WHOLE = b"POST /whole HTTP/1.1\r\ncontent-length: 0\r\n"
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
KEPT_BY_CIRCLES = (Connection, RequestResponseCycle)


class App:
    """Notes each request; answers `ok`, at /big and /whole with many bytes before it, in parts or at once, at /stream
    after `begun` and when it may, at /wait when the client is gone, at /hold after a long wait. A request with a header
    `key` proves its connection."""

    def __init__(self) -> None:
        self.may_finish = asyncio.Event()
        self.heads: list[list[tuple[bytes, bytes]]] = []
        self.num_gone = 0
        self.num_bytes = 0
        """Length of the bodies that were read."""
        self.num_held = 0
        """Waits of /hold that have begun and not ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.heads.append(scope["headers"])
        if b"key" in dict(scope["headers"]):
            scope["extensions"][EXTENSION].prove("tenant-1")
        if scope["path"] == "/body":
            await self._read(receive)
        if scope["path"] in ("/wait", "/late"):
            while (await receive())["type"] != "http.disconnect":
                pass
            self.num_gone += 1
        if scope["path"] in ("/hold", "/late"):
            self.num_held += 1
            await scope["extensions"][EXTENSION].hold(LONG_S)
            self.num_held -= 1
        headers = [(b"content-length", b"2")] if scope["path"] == "/body" or scope["path"] == "/" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            await self.may_finish.wait()
        for _ in range(NUM_PARTS if scope["path"] == "/big" else 0):
            await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
        before = bytes(NUM_PARTS * 2**20) if scope["path"] == "/whole" else b""
        await send({"type": "http.response.body", "body": before + b"ok"})

    async def _read(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_gone += 1
                return
            self.num_bytes += len(message["body"])
            if not message["more_body"]:
                return


Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[Peer]]


class Edge:
    """A listener with an app behind it, and what connects to it."""

    def __init__(self, app: App, listener: Listener, port: int) -> None:
        self.app = app
        self.listener = listener
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, data: bytes = b"", address: str = "127.0.0.1") -> Peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(address, 0))
        self._writers.append(writer)
        writer.write(data)
        return reader, writer

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110  # what is waited for has no event
                await asyncio.sleep(0.001)

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()

    async def until_open(self, count: int) -> None:
        """Wait until that many connections are open."""
        await self.until(lambda: len(self.listener.connections) == count)


@asynccontextmanager
async def edge(trusted_proxies: list[str] | None = None, **limits: float) -> AsyncIterator[Edge]:
    app, port = App(), free_port()
    listener = Listener(
        app,
        "127.0.0.1",
        [port],
        1,
        ConnectionLimits(**{"head_timeout_s": LONG_S, "keep_alive_s": LONG_S, **limits}),  # type: ignore[arg-type]
        trusted_proxies,
    )
    listener.start()
    subject = Edge(app, listener, port)
    try:
        yield subject
    finally:
        subject.hang_up()
        await listener.stop()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(3 * TIMEOUT_S):
            await main()

    uvloop.run(bounded())


def is_ok(answer: bytes) -> bool:
    return answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"ok")


async def one_answer(reader: asyncio.StreamReader) -> bytes:
    """The next answer on a connection that stays open."""
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.readuntil(b"\r\n\r\nok")


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n", b"\r\n\r\n", REQUEST + b"GET /"])
def test_a_head_that_does_not_come_ends_the_connection(data: bytes) -> None:
    async def main() -> None:
        async with edge(head_timeout_s=SHORT_S) as subject:
            reader, _ = await subject.connect(data)

            answer = await rest_of(reader)
            assert (b"HTTP/1.1 408 " in answer) is (b"GET" in data)
            await subject.until_open(0)

    run(main)


def test_a_trickled_head_ends_at_the_deadline_however_steady_it_is() -> None:
    async def main() -> None:
        async with edge(head_timeout_s=4 * SHORT_S) as subject:
            reader, writer = await subject.connect(b"GET / HTTP/1.1\r\n")
            reading = asyncio.create_task(rest_of(reader))
            while not reading.done():
                writer.write(b"a: b\r\n")
                await asyncio.wait([reading], timeout=SHORT_S / 4)

            assert (await reading).startswith(b"HTTP/1.1 408 ")
            assert not subject.app.heads

    run(main)


def test_the_head_of_a_later_request_has_a_deadline_too() -> None:
    async def main() -> None:
        async with edge(head_timeout_s=SHORT_S) as subject:
            reader, writer = await subject.connect(REQUEST)
            assert is_ok(await one_answer(reader))
            writer.write(REQUEST[:-2])

            assert (await rest_of(reader)).startswith(b"HTTP/1.1 408 ")

    run(main)


def test_a_connection_that_rests_ends() -> None:
    async def main() -> None:
        async with edge(keep_alive_s=SHORT_S) as subject:
            reader, _ = await subject.connect(REQUEST)

            assert is_ok(await rest_of(reader))

    run(main)


def test_the_rest_of_a_body_that_nobody_reads_has_a_deadline() -> None:
    async def main() -> None:
        async with edge(head_timeout_s=SHORT_S) as subject:
            reader, writer = await subject.connect(b"GET / HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
            assert is_ok(await one_answer(reader))
            reading = asyncio.create_task(rest_of(reader))
            while not reading.done():
                writer.write(b"x")
                await asyncio.wait([reading], timeout=SHORT_S / 4)

            with suppress(ConnectionResetError):  # a byte was on its way
                assert not await reading
            await subject.until_open(0)

    run(main)


def test_the_rest_of_a_body_that_nobody_reads_is_bounded() -> None:
    async def main() -> None:
        async with edge() as subject:
            reader, writer = await subject.connect(b"GET / HTTP/1.1\r\ncontent-length: 1000000000000\r\n\r\n")
            assert is_ok(await one_answer(reader))
            sent, part = 0, bytes(2**20)
            with suppress(ConnectionError):
                while sent < 4 * MAX_DISCARDED_BYTES:
                    writer.write(part)
                    await writer.drain()
                    sent += len(part)

            assert MAX_DISCARDED_BYTES <= sent < 2 * MAX_DISCARDED_BYTES
            await subject.until_open(0)

    run(main)


CHUNKED = b"POST /body HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


def chunks(count: int, num_bytes: int) -> bytes:
    return (b"%x\r\n" % num_bytes + b"x" * num_bytes + b"\r\n") * count


def test_a_body_in_many_tiny_chunks_is_refused() -> None:
    async def main() -> None:
        async with edge() as subject:
            reader, _ = await subject.connect(CHUNKED + chunks(50 * MAX_SMALL_PARTS, 1))

            answer = await rest_of(reader)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert b"chunks of less than" in answer
            await subject.until(lambda: subject.app.num_gone == 1)
            assert subject.app.num_bytes < 2 * MAX_SMALL_PARTS

    run(main)


@pytest.mark.parametrize(("count", "num_bytes"), [(MAX_SMALL_PARTS, 1), (10 * MAX_SMALL_PARTS, MIN_PART_BYTES)])
def test_a_body_in_chunks_of_some_size_is_taken(count: int, num_bytes: int) -> None:
    async def main() -> None:
        async with edge() as subject:
            reader, _ = await subject.connect(CHUNKED + chunks(count, num_bytes) + b"0\r\n\r\n" + REQUEST)

            assert is_ok(await one_answer(reader))
            assert is_ok(await one_answer(reader))
            assert subject.app.num_bytes == count * num_bytes

    run(main)


def test_a_body_may_come_byte_by_byte_where_it_has_a_length() -> None:
    async def main() -> None:
        async with edge() as subject:
            count = 2 * MAX_SMALL_PARTS
            reader, writer = await subject.connect(b"POST /body HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % count)
            for number in range(count):
                writer.write(b"x")
                await subject.until(lambda number=number: subject.app.num_bytes > number)  # type: ignore[misc]

            assert is_ok(await one_answer(reader))

    run(main)


def test_a_connection_goes_on_after_a_body_that_nobody_reads() -> None:
    async def main() -> None:
        async with edge(head_timeout_s=LONG_S) as subject:
            reader, writer = await subject.connect(b"GET / HTTP/1.1\r\ncontent-length: 5\r\n\r\n")
            assert is_ok(await one_answer(reader))
            writer.write(b"xxxxx" + REQUEST)

            assert is_ok(await one_answer(reader))

    run(main)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\na: " + b"x" * 2 * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\na: " + b"x" * 2 * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /" + b"x" * 2 * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"\r\n" * MAX_HEAD_BYTES,
    ],
    ids=["endless value", "long value", "long path", "many headers", "empty lines"],
)
def test_a_head_beyond_its_bounds_is_refused(data: bytes) -> None:
    async def main() -> None:
        async with edge() as subject:
            reader, _ = await subject.connect(data)

            answer = await rest_of(reader)
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert b"head_too_large" in answer
            assert not subject.app.heads

    run(main)


def test_a_head_that_is_just_within_its_bounds_is_taken() -> None:
    async def main() -> None:
        async with edge() as subject:
            lines = b"a: b\r\n" * (MAX_HEADERS - 1)
            value = b"x" * (MAX_HEAD_BYTES - len(lines) - 100)
            reader, _ = await subject.connect(b"GET / HTTP/1.1\r\n" + lines + b"a: " + value + b"\r\n\r\n")

            assert is_ok(await one_answer(reader))

    run(main)


def test_trailers_are_bounded_and_never_become_headers() -> None:
    async def main() -> None:
        async with edge() as subject:
            body = b"POST /body HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
            reader, _ = await subject.connect(body + b"key: k\r\n\r\n")
            assert is_ok(await one_answer(reader))
            flooding, _ = await subject.connect(body + b"a: " + b"x" * 2**20)

            assert (await rest_of(flooding)).startswith(b"HTTP/1.1 431 ")
            assert [len(headers) for headers in subject.app.heads] == [1, 1]
            assert subject.app.num_gone == 1

    run(main)


def test_requests_sent_ahead_are_few() -> None:
    async def main() -> None:
        async with edge() as subject:
            reader, writer = await subject.connect(b"GET /stream HTTP/1.1\r\n\r\n")
            await reader.readuntil(b"begun")
            writer.write(REQUEST * (MAX_PIPELINED + 2))

            assert b"ok" not in await rest_of(reader)
            assert len(subject.app.heads) == 1
            subject.app.may_finish.set()

    run(main)


def test_requests_sent_ahead_within_the_bound_are_answered_in_order() -> None:
    async def main() -> None:
        async with edge() as subject:
            reader, _ = await subject.connect(REQUEST * MAX_PIPELINED)

            for _ in range(MAX_PIPELINED):
                assert is_ok(await one_answer(reader))

    run(main)


def test_bytes_that_are_not_http_are_refused() -> None:
    async def main() -> None:
        async with edge() as subject:
            reader, _ = await subject.connect(b"\x16\x03\x01 hello\r\n\r\n")

            assert (await rest_of(reader)).startswith(b"HTTP/1.1 400 ")

    run(main)


def test_no_deadline_cuts_a_stream_or_a_slow_body() -> None:
    async def main() -> None:
        async with edge(head_timeout_s=SHORT_S, keep_alive_s=SHORT_S) as subject:
            reader, _ = await subject.connect(b"GET /stream HTTP/1.1\r\n\r\n")
            slow, writer = await subject.connect(b"POST /body HTTP/1.1\r\ncontent-length: 20\r\n\r\n")
            await reader.readuntil(b"begun")
            for _ in range(20):
                writer.write(b"x")
                await asyncio.sleep(SHORT_S / 4)
            subject.app.may_finish.set()

            assert (await rest_of(reader)).endswith(b"ok\r\n0\r\n\r\n")
            assert is_ok(await rest_of(slow))

    run(main)


@pytest.mark.parametrize(("method", "is_cut"), [(b"GET", True), (b"POST", False)])
def test_a_page_that_is_left_unread_ends_the_connection_and_the_answer_to_a_post_goes_on(
    method: bytes, is_cut: bool
) -> None:
    async def main() -> None:
        async with edge(stall_s=SHORT_S) as subject:
            reader, _ = await subject.connect(method + b" /big HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            if is_cut:
                await subject.until_open(0)
                return
            await asyncio.sleep(4 * SHORT_S)

            answer = bytearray()
            while not answer.endswith(b"ok\r\n0\r\n\r\n"):
                answer += await reader.read(2**20)
            assert len(answer) > NUM_PARTS * 2**20

    run(main)


@pytest.mark.parametrize("ahead", [b"GET", b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"], ids=["part", "whole"])
def test_what_is_sent_ahead_keeps_no_unread_page_open(ahead: bytes) -> None:
    async def main() -> None:
        async with edge(stall_s=SHORT_S) as subject:
            reader, _ = await subject.connect(b"GET /big HTTP/1.1\r\n\r\n" + ahead)
            await reader.readuntil(b"\r\n\r\n")

            await subject.until_open(0)

    run(main)


@pytest.mark.parametrize(
    ("data", "limits"),
    [
        (POST_WHOLE + b"\r\n", {"keep_alive_s": SHORT_S}),
        (POST_WHOLE + b"\r\n\r\n", {"head_timeout_s": SHORT_S}),
        (POST_WHOLE + b"connection: close\r\n\r\n", {}),
    ],
    ids=["resting", "no head", "closing"],
)
def test_a_whole_answer_that_is_left_unread_does_not_keep_its_connection(data: bytes, limits: dict[str, float]) -> None:
    async def main() -> None:
        async with edge(stall_s=SHORT_S, **limits) as subject:
            reader, _ = await subject.connect(data)
            await reader.readuntil(b"\r\n\r\n")

            await subject.until_open(0)

    run(main)


def test_a_hang_up_reaches_the_request_under_way_though_others_were_sent_ahead() -> None:
    async def main() -> None:
        async with edge() as subject:
            _, writer = await subject.connect(b"POST /wait HTTP/1.1\r\ncontent-length: 0\r\n\r\n" + REQUEST)
            await subject.until(lambda: len(subject.app.heads) == 1)
            writer.close()

            await subject.until(lambda: subject.app.num_gone == 1)

    run(main)


def test_nobody_waits_for_a_connection_that_is_lost_already() -> None:
    async def main() -> None:
        async with edge() as subject:
            _, writer = await subject.connect(b"GET /late HTTP/1.1\r\n\r\n")
            await subject.until(lambda: len(subject.app.heads) == 1)
            writer.close()

            await subject.until(lambda: subject.app.num_gone == 1 and not subject.app.num_held)

    run(main)


def test_connections_that_are_held_back_leave_room_for_a_new_client() -> None:
    async def main() -> None:
        async with edge(max_connections=2) as subject:
            for count in (1, 2):
                held, writer = await subject.connect(b"GET / HTTP/1.1\r\nkey: k\r\n\r\n")
                assert is_ok(await one_answer(held))
                writer.write(b"GET /hold HTTP/1.1\r\n\r\n")
                await subject.until(lambda count=count: subject.app.num_held == count)
            reader, _ = await subject.connect(REQUEST)

            assert is_ok(await one_answer(reader))

    run(main)


def test_a_flood_of_connections_leaves_room_for_a_new_client_and_for_streams() -> None:
    async def main() -> None:
        async with edge(max_connections=20) as subject:
            stream, _ = await subject.connect(b"GET /stream HTTP/1.1\r\nkey: k\r\n\r\n")
            await stream.readuntil(b"begun")
            for _ in range(60):
                await subject.connect(b"GET / HTTP/1.1\r\n")
            reader, _ = await subject.connect(REQUEST)

            assert is_ok(await one_answer(reader))
            assert len(subject.listener.connections) <= 20
            subject.app.may_finish.set()
            assert (await stream.readuntil(b"ok")).endswith(b"ok")

    run(main)


def test_requests_of_one_address_that_come_together_hold_up_no_other_ones() -> None:
    async def main() -> None:
        async with edge() as subject:
            flood = [await subject.connect(address="127.0.0.9") for _ in range(300)]
            reader, writer = await subject.connect()
            await subject.until_open(len(flood) + 1)
            for _, flooding in flood:
                flooding.write(REQUEST)
            writer.write(b"GET / HTTP/1.1\r\nother: 1\r\n\r\n")

            assert is_ok(await one_answer(reader))
            place = [headers[0][0] for headers in subject.app.heads].index(b"other")
            assert place < 100
            for answering, _ in flood:
                assert is_ok(await one_answer(answering))

    run(main)


def test_a_peer_that_has_shown_its_key_is_let_in_before_many_others_that_have_not() -> None:
    async def main() -> None:
        async with edge() as subject:
            reader, _ = await subject.connect(REQUEST.replace(b"host: x", b"key: 1"))
            assert is_ok(await one_answer(reader))
            others = [
                asyncio.create_task(subject.connect(REQUEST, f"127.0.{number // 200}.{number % 200 + 2}"))
                for number in range(1000)
            ]
            _, (reader, _) = await asyncio.gather(
                asyncio.gather(*others), subject.connect(b"GET / HTTP/1.1\r\nother: 1\r\n\r\n")
            )

            assert is_ok(await one_answer(reader))
            assert [headers[0][0] for headers in subject.app.heads].index(b"other") < 500

    run(main)


def test_connections_that_come_together_are_accepted_a_few_at_a_time() -> None:
    async def main() -> None:
        async with edge() as subject:
            connecting = [asyncio.create_task(subject.connect()) for _ in range(300)]
            counts = [0]
            while counts[-1] < len(connecting):
                await asyncio.sleep(0)
                counts.append(len(subject.listener.connections))
            await asyncio.gather(*connecting)

            assert max(after - before for before, after in pairwise(counts)) <= MOST_ACCEPTED

    run(main)


@pytest.mark.parametrize("data", [REQUEST, REQUEST * 2, b"GET /wait" + REQUEST[5:], b"GET / x\r\n\r\n", b"GET / HT"])
def test_of_a_connection_that_was_reset_nothing_is_left_to_the_garbage_collector(data: bytes) -> None:
    async def reset(subject: Edge) -> None:
        _, writer = await subject.connect(data)
        await asyncio.sleep(SHORT_S)
        linger = struct.pack("ii", 1, 0)
        writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        await subject.until_open(0)
        await asyncio.sleep(SHORT_S)

    async def main() -> None:
        async with edge() as subject:
            await reset(subject)
            gc.collect()
            gc.disable()
            try:
                before = {id(each) for each in gc.get_objects() if type(each) in KEPT_BY_CIRCLES}
                await reset(subject)
                after = {id(each): each for each in gc.get_objects() if type(each) in KEPT_BY_CIRCLES}
            finally:
                gc.enable()

            assert [each for number, each in after.items() if number not in before] == []

    run(main)


def test_a_refused_body_is_not_asked_for() -> None:
    """`write` raises behind `write_eof`, and the app would get that."""

    async def main() -> None:
        async with edge() as subject:
            head = b"POST /body HTTP/1.1\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n"
            reader, _ = await subject.connect(head + b"no length\r\n")

            answer = await rest_of(reader)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert subject.app.num_gone == 1

    run(main)


def test_what_is_sent_after_a_refusal_is_bounded() -> None:
    async def main() -> None:
        async with edge() as subject:
            _, writer = await subject.connect(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1))
            began, sent, part = time.monotonic(), 0, bytes(2**16)
            with suppress(ConnectionError):
                while sent < 1000 * MAX_LINGER_BYTES:
                    writer.write(part)
                    await writer.drain()
                    sent += len(part)

            assert time.monotonic() - began < LINGER_S
            await subject.until_open(0)

    run(main)


def test_one_address_is_limited_where_clients_connect_directly() -> None:
    async def main() -> None:
        async with edge([], max_unproven_per_address=2) as subject:
            proven, writer = await subject.connect(b"GET / HTTP/1.1\r\nkey: k\r\n\r\n")
            assert is_ok(await one_answer(proven))
            peers = [await subject.connect() for _ in range(2)]
            await subject.until_open(3)
            await asyncio.sleep(1.1)  # what is younger than the grace is left alone
            await subject.connect()

            assert not await rest_of(peers[0][0])
            await subject.until_open(3)
            writer.write(REQUEST)
            assert is_ok(await one_answer(proven))

    run(main)
