"""Requests that end from our side: hanging up as planned, deadlines, cancelled tasks, a client that is closed."""

import asyncio
import socket

import pytest

from penstock_loadtest.client.client import Client, Clock
from penstock_loadtest.client.target import Target
from penstock_loadtest.results.records import Record
from tests.real_time import real_time
from tests.unit.loadtest.client.client_world import CHAT, IDS, LONG_S, changed, open_world, recorded, says, whole
from tests.unit.loadtest.raw_server import Wire, head_of_stream, response

pytestmark = pytest.mark.uvloop  # the loop that the tester runs on


class Watched:
    """A server that starts an answer, waits, and notices that the client has gone."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts
        self.started = asyncio.Event()
        self.is_gone = asyncio.Event()

    async def __call__(self, wire: Wire) -> None:
        await wire.read_request()
        await wire.send(*self.parts)
        self.started.set()
        await wire.wait_closed()
        self.is_gone.set()


@real_time
async def test_a_planned_hanging_up_closes_the_connection_and_keeps_what_came() -> None:
    server = Watched(head_of_stream() + IDS[0] + IDS[1])

    async with open_world(server) as world:
        record = (await world.send(changed(cancel_after_s=0.5))).record
        async with asyncio.timeout(LONG_S):
            await server.is_gone.wait()

        assert (record.outcome, record.error, record.tokens, record.violations) == ("cancelled", None, 2, [])
        assert record.sent_s is not None
        assert record.end_s is not None
        assert record.end_s - record.sent_s >= 0.495
        assert record.answer_digest is not None


def test_an_answer_that_ends_before_the_planned_hanging_up_is_finished() -> None:
    assert recorded(says(whole()), changed(cancel_after_s=LONG_S)).outcome == "finished"


@real_time
@pytest.mark.parametrize(("parts", "tokens"), [((head_of_stream() + IDS[0],), 1), ((), 0)])
async def test_at_its_deadline_a_request_is_unfinished(parts: tuple[bytes, ...], tokens: int) -> None:
    server = Watched(*parts)

    async with open_world(server) as world:
        record = (await world.send(deadline_s=0.5)).record
        async with asyncio.timeout(LONG_S):
            await server.is_gone.wait()

        assert (record.outcome, record.error, record.tokens, record.is_cut) == (
            "unfinished",
            "its timeout passed",
            tokens,
            False,
        )


async def test_a_request_without_a_connection_by_its_deadline_is_unfinished() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]  # more than the system takes for it
        for other in waiting:
            other.setblocking(False)
            other.connect_ex(("127.0.0.1", port))
        client = Client(Target(f"http://127.0.0.1:{port}/v1", "m", ["m"], {}, None, None), Clock())
        record = (await client.send(CHAT, intended_s=client.clock.now(), deadline_s=client.clock.now() + 0.1)).record
        for other in waiting:
            other.close()

    assert (record.outcome, record.error, record.sent_s) == ("unfinished", "its timeout passed", None)


async def test_cancelling_the_task_gives_the_record_as_it_stands() -> None:
    server = Watched(head_of_stream() + IDS[0] + IDS[1])

    async with open_world(server) as world:
        task = asyncio.create_task(world.send())
        async with asyncio.timeout(LONG_S):
            await server.started.wait()
            while not next(iter(world.client._under_way)).record.chunk_s:  # noqa: ASYNC110 (a chunk has no event)
                await asyncio.sleep(0)
            task.cancel()
            record = (await task).record
            await server.is_gone.wait()

        assert (record.outcome, record.error, record.is_cut, record.tokens) == ("unfinished", "the run ended", True, 2)
        assert record.end_s is not None
        assert not world.client._under_way


async def test_cancelling_the_task_of_a_request_that_has_just_ended_changes_nothing() -> None:
    async with open_world(says(whole())) as world:
        task = asyncio.create_task(world.send())
        await asyncio.sleep(0)
        exchange = next(iter(world.client._under_way))
        async with asyncio.timeout(LONG_S):
            while not exchange.is_over:  # noqa: ASYNC110 (the test must run before the task does)
                await asyncio.sleep(0)
        task.cancel()
        record = (await task).record

        assert (record.outcome, record.is_cut, record.error) == ("finished", False, None)


async def test_a_request_that_was_cut_while_a_field_was_refused_does_not_go_again() -> None:
    refusal = b'HTTP/1.1 400 Bad\r\ncontent-length: 99\r\n\r\n{"error": "return_token_ids"}'
    server = Watched(refusal)

    async with open_world(server) as world:
        task = asyncio.create_task(world.send())
        async with asyncio.timeout(LONG_S):
            await server.started.wait()
            while next(iter(world.client._under_way)).record.status is None:  # noqa: ASYNC110 (a head has no event)
                await asyncio.sleep(0)
            task.cancel()
            record = (await task).record

        assert (record.outcome, record.is_cut, record.is_resent) == ("unfinished", True, False)
        assert len(world.there.connections) == 1


async def test_a_request_that_was_cut_just_when_a_field_was_refused_does_not_go_again() -> None:
    async with open_world(says(response(b'{"error": "no return_token_ids"}', status="400 Bad Request"))) as world:
        task = asyncio.create_task(world.send())
        await asyncio.sleep(0)
        exchange = next(iter(world.client._under_way))
        async with asyncio.timeout(LONG_S):
            while not exchange.is_over:  # noqa: ASYNC110 (the test must run before the task does)
                await asyncio.sleep(0)
            task.cancel()
            record = (await task).record

        assert (record.outcome, record.status, record.is_resent, record.is_cut) == ("failed", 400, False, False)


async def test_a_task_whose_request_was_cut_can_go_on() -> None:
    server = Watched(head_of_stream() + IDS[0])

    async with open_world(server) as world:

        async def sends() -> tuple[Record, int]:
            answer = await world.send()
            task = asyncio.current_task()
            assert task is not None
            return answer.record, task.cancelling()

        task = asyncio.create_task(sends())
        async with asyncio.timeout(LONG_S):
            await server.started.wait()
            task.cancel()
            record, cancelling = await task

        assert record.is_cut
        assert cancelling == 0


async def test_a_request_that_was_cut_while_it_connected_is_never_sent() -> None:
    async with open_world(says(whole())) as world:
        task = asyncio.create_task(world.send())
        await asyncio.sleep(0)
        assert world.client._under_way
        await world.client.close()
        async with asyncio.timeout(LONG_S):
            record = (await task).record

        assert (record.outcome, record.is_cut, record.sent_s) == ("unfinished", True, None)


async def test_closing_the_client_cuts_what_is_under_way() -> None:
    server = Watched(head_of_stream() + IDS[0])

    async with open_world(server) as world:
        task = asyncio.create_task(world.send())
        async with asyncio.timeout(LONG_S):
            await server.started.wait()
            await world.client.close()
            record = (await task).record
            await server.is_gone.wait()

        assert (record.outcome, record.is_cut) == ("unfinished", True)
