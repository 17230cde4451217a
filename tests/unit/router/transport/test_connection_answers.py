"""Answers over real sockets: streams that no deadline cuts, pages that are left unread, peers that hang up."""

import asyncio

import pytest

from tests.unit.router.transport.edges import NUM_PARTS, REQUEST, SHORT_S, edge, is_ok, run
from tests.unit.router.transport.test_listener import rest_of

AMPLE_S = 0.5
"""A deadline before which a test does something, on a slow machine too."""
POST_WHOLE = b"POST /whole HTTP/1.1\r\ncontent-length: 0\r\n"


def test_no_deadline_cuts_a_stream_or_a_slow_body() -> None:
    async def main() -> None:
        async with edge(head_timeout_s=AMPLE_S, keep_alive_s=AMPLE_S) as subject:
            reader, _ = await subject.connect(b"GET /stream HTTP/1.1\r\n\r\n")
            slow, writer = await subject.connect(b"POST /body HTTP/1.1\r\ncontent-length: 10\r\n\r\n")
            await reader.readuntil(b"begun")
            for _ in range(10):
                writer.write(b"x")
                await asyncio.sleep(AMPLE_S / 4)
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


def test_a_part_that_is_written_at_once_is_what_uvicorn_writes() -> None:
    async def main() -> None:
        async with edge() as subject:
            reader, _ = await subject.connect(b"POST /parts HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            answer = await reader.readuntil(b"0\r\n\r\n")

            _, _, body = answer.partition(b"\r\n\r\n")
            long = b"258\r\n" + b"{}" * 300 + b"\r\n"
            assert body == b"1\r\na\r\n" * 2 + long * 2 + b"2\r\nok\r\n0\r\n\r\n"
            assert subject.app.are_written == [True, True, False, False]

    run(main)


def test_no_part_is_written_to_an_answer_without_chunks() -> None:
    async def main() -> None:
        async with edge() as subject:
            reader, _ = await subject.connect(b"HEAD /parts-none HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await subject.until(lambda: len(subject.app.are_written) == 2)

            assert subject.app.are_written == [False, False]

    run(main)


def test_parts_are_written_without_asking_until_the_peer_does_not_read_and_none_is_lost() -> None:
    async def main() -> None:
        async with edge() as subject:
            reader, _ = await subject.connect(b"POST /direct HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await subject.until(lambda: subject.app.num_closed == 1)
            num_parts = subject.app.num_parts

            part = b"10000\r\n{" + b"-" * (2**16 - 2) + b"}\r\n"
            assert await reader.readexactly(num_parts * len(part)) == num_parts * part
            assert await reader.readuntil(b"0\r\n\r\n") == b"6\r\nwaited\r\n3\r\nend\r\n2\r\nok\r\n0\r\n\r\n"
            assert subject.app.num_closed == 2  # the answer is over

    run(main)


def test_a_peer_that_hangs_up_closes_the_parts_that_are_written_without_asking() -> None:
    async def main() -> None:
        async with edge() as subject:
            _, writer = await subject.connect(b"POST /direct HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            await subject.until(lambda: subject.app.num_parts > 0)
            writer.transport.abort()

            await subject.until(lambda: subject.app.num_closed > 0)
            await subject.until_open(0)

    run(main)
