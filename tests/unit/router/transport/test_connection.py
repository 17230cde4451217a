"""Peers without a key, over real sockets: slow ones, large heads, bodies that nobody reads."""

import asyncio
from contextlib import suppress

import pytest

from penstock.router.transport import connection
from penstock.router.transport.connection import (
    MAX_DISCARDED_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_LINGER_BYTES,
    MAX_PIPELINED,
    MAX_SMALL_PARTS,
    MIN_PART_BYTES,
)
from tests.unit.router.transport.edges import LONG_S, REQUEST, SHORT_S, edge, is_ok, one_answer, run
from tests.unit.router.transport.test_listener import rest_of

AMPLE_S = 0.5
"""A deadline before which a test does something, on a slow machine too."""


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n", b"\r\n\r\n", REQUEST + b"GET /"])
def test_a_head_that_does_not_come_ends_the_connection(data: bytes) -> None:
    async def main() -> None:
        async with edge(head_timeout_s=AMPLE_S) as subject:
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
        async with edge(head_timeout_s=AMPLE_S) as subject:
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
        async with edge(head_timeout_s=AMPLE_S) as subject:
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


def test_what_is_sent_after_a_refusal_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", LONG_S)

    async def main() -> None:
        async with edge() as subject:
            _, writer = await subject.connect(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1))
            sent, part = 0, bytes(2**16)
            with suppress(ConnectionError):
                while sent < 1000 * MAX_LINGER_BYTES:
                    writer.write(part)
                    await writer.drain()
                    sent += len(part)

            await subject.until_open(0)

    run(main)
