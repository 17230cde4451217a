"""Requests that go again: without a field that a server refuses, and on another connection where one was closed."""

import asyncio
import json

import pytest

from penstock_loadtest.client.connection import Connection, Connections
from penstock_loadtest.results.records import Record
from tests.unit.loadtest.client.client_world import (
    CHAT,
    DONE,
    LONG_S,
    TEXT,
    WHOLE,
    World,
    open_world,
    recorded,
    says,
    says_and_closes,
    whole,
)
from tests.unit.loadtest.raw_server import LAST, Script, Wire, head_of_stream, response

pytestmark = pytest.mark.uvloop  # the loop that the tester runs on


# --- fields that a server refuses


def refuses(*names: str, status: str = "400 Bad Request") -> tuple[Script, list[dict[str, object]]]:
    bodies: list[dict[str, object]] = []

    async def script(wire: Wire) -> None:
        while True:
            body = (await wire.read_request()).json
            bodies.append(body)
            refused = [name for name in names if name in body]
            error = {"error": {"message": f"Unrecognized request argument supplied: {refused[0] if refused else ''}"}}
            await wire.send(response(json.dumps(error).encode(), status=status) if refused else whole())

    return script, bodies


@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity"])
async def test_refused_fields_are_left_out_from_then_on(status: str) -> None:
    script, bodies = refuses("return_token_ids", "ignore_eos", status=status)
    records: list[Record] = []

    async with open_world(script) as world:
        prepared = world.client.prepare(CHAT)
        records.append((await world.send()).record)
        records.append((await world.send()).record)
        records.append((await world.client.send_body(CHAT, prepared, intended_s=0.0, deadline_s=LONG_S)).record)

    assert [record.outcome for record in records] == ["finished"] * 3
    assert [record.is_resent for record in records] == [True, False, False]
    assert len(bodies) == 5
    assert not {"return_token_ids", "ignore_eos"} & (bodies[3].keys() | bodies[4].keys())
    assert bodies[2].keys() == bodies[0].keys() - {"return_token_ids", "ignore_eos"}


async def test_all_requests_that_were_under_way_when_a_field_was_refused_go_again() -> None:
    script, bodies = refuses("return_token_ids")

    async with open_world(script) as world:
        answers = await asyncio.gather(*[world.send() for _ in range(8)])

        assert [answer.record.outcome for answer in answers] == ["finished"] * 8

    assert sum("return_token_ids" in body for body in bodies) == 8


def test_a_request_that_goes_again_keeps_the_time_it_first_left() -> None:
    first_left = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.read_request()
        first_left.set()
        await asyncio.sleep(0.02)
        await wire.send(response(b'{"error": "no return_token_ids"}', status="400 Bad Request"))
        await wire.read_request()
        await wire.send(whole())

    record = recorded(script)

    assert record.outcome == "finished"
    assert record.sent_s is not None
    assert record.first_s is not None
    assert record.first_s - record.sent_s > 0.015


def test_a_server_that_refuses_a_field_that_was_not_sent_is_believed() -> None:
    script, bodies = refuses("messages")
    error = response(b'{"error": {"message": "seed, please", "param": "seed"}}', status="400 Bad Request")
    record = recorded(says(error))

    assert (record.outcome, record.is_resent) == ("failed", False)
    assert recorded(script).outcome == "failed"
    assert len(bodies) == 1


# --- connections


async def test_one_connection_serves_requests_that_follow_each_other() -> None:
    async with open_world(says(head_of_stream() + b"".join(TEXT) + DONE + LAST)) as world:
        for _ in range(5):
            assert (await world.send()).record.outcome == "finished"

        assert len(world.there.connections) == 1


class Slow(Connections):
    """Connections that are made when the test allows it."""

    def __init__(self, world: World) -> None:
        super().__init__(world.client._connections.origin)
        self.is_asked, self.may_come = asyncio.Event(), asyncio.Event()

    async def connect(self, timeout_s: float = LONG_S) -> Connection:
        self.is_asked.set()
        await self.may_come.wait()
        return await super().connect(timeout_s)


async def test_the_time_that_a_connection_takes_is_no_lateness() -> None:
    async with open_world(says(whole())) as world:
        world.client._connections = slow = Slow(world)
        task = asyncio.create_task(world.send(WHOLE))
        async with asyncio.timeout(LONG_S):
            await slow.is_asked.wait()
            requested_s = world.client.clock.now()
            slow.may_come.set()
            record = (await task).record

        assert record.outcome == "finished"
        assert record.sent_s is not None
        assert record.sent_s <= requested_s + 1e-6


def assume_round_trip(world: World, seconds: float) -> None:
    """Idle connections for which a round trip takes so long, whatever was measured on a machine that may be busy:
    twice that time a break counts as that of a connection that had been closed before."""
    for connection in world.client._connections._idle:
        connection.round_trip_s = seconds


async def test_a_kept_connection_that_turns_out_closed_is_replaced_once_and_that_is_noted() -> None:
    async def script(wire: Wire) -> None:
        await wire.read_request()
        await wire.send(whole())
        if wire.number == 0:
            await wire.read_request()  # and closes without a word
        else:
            await wire.wait_closed()

    async with open_world(script) as world:
        first = (await world.send(WHOLE)).record
        assume_round_trip(world, LONG_S)
        second = (await world.send(WHOLE)).record

        assert [(record.outcome, record.is_resent, record.violations) for record in (first, second)] == [
            ("finished", False, []),
            ("finished", True, []),
        ]
        assert len(world.there.connections) == 2


async def test_a_kept_connection_that_the_server_closes_later_has_failed_its_request() -> None:
    async def script(wire: Wire) -> None:
        await wire.read_request()
        await wire.send(whole())
        await wire.read_request()
        await asyncio.sleep(0.1)  # it has the request, and gives up on it

    async with open_world(script) as world:
        await world.send(WHOLE)
        assume_round_trip(world, 0.0)
        record = (await world.send(WHOLE)).record

        assert (record.outcome, record.is_resent) == ("failed", False)
        assert len(world.there.connections) == 1


async def test_a_request_is_sent_no_third_time() -> None:
    async def script(wire: Wire) -> None:
        if wire.number == 0:
            await wire.read_request()
            await wire.send(whole())
        await wire.read_request()

    async with open_world(script) as world:
        await world.send()
        assume_round_trip(world, LONG_S)
        record = (await world.send()).record

        assert (record.outcome, record.error, record.is_resent) == (
            "failed",
            "the connection was closed before the answer's end",
            True,
        )
        assert len(world.there.connections) == 2


async def test_a_request_is_not_sent_again_on_a_fresh_connection_that_closed() -> None:
    async with open_world(says_and_closes()) as world:
        record = (await world.send()).record

        assert (record.outcome, record.is_resent, record.status, record.violations) == ("failed", False, None, [])
        assert len(world.there.connections) == 1


async def test_a_request_is_not_sent_again_once_anything_was_heard() -> None:
    async def script(wire: Wire) -> None:
        await wire.read_request()
        await wire.send(whole())
        await wire.read_request()
        await wire.send(b"HTTP/1.1 ")

    async with open_world(script) as world:
        await world.send()
        assume_round_trip(world, LONG_S)
        record = (await world.send()).record

        assert (record.outcome, record.is_resent) == ("failed", False)
        assert len(world.there.connections) == 1
