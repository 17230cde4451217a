"""Floods of connections and requests, over real sockets, and what others have beside them."""

import asyncio
import gc
import socket
import struct
from contextlib import suppress
from itertools import pairwise

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.router.transport.acceptor import MOST_ACCEPTED
from penstock.router.transport.connection import Connection
from tests.unit.router.transport.edges import REQUEST, SHORT_S, Edge, edge, is_ok, one_answer, run
from tests.unit.router.transport.test_listener import rest_of

KEPT_BY_CIRCLES = (Connection, RequestResponseCycle)


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

    async def main() -> None:
        async with edge() as subject:
            await reset(subject)
            await asyncio.sleep(SHORT_S)
            gc.collect()
            gc.disable()
            try:
                before = {id(each) for each in gc.get_objects() if type(each) in KEPT_BY_CIRCLES}

                def left() -> list[object]:
                    kept = (each for each in gc.get_objects() if type(each) in KEPT_BY_CIRCLES)
                    return [each for each in kept if id(each) not in before]

                await reset(subject)
                with suppress(TimeoutError):
                    await subject.until(lambda: not left())

                assert left() == []
            finally:
                gc.enable()

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
