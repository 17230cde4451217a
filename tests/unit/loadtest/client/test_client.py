"""Requests and their records, against servers that behave and servers that don't."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
import uvloop

from penstock_loadtest.client.client import Answer, Client, Clock
from penstock_loadtest.client.connection import Connection, Connections
from penstock_loadtest.client.exchange import MAX_ERROR_BYTES
from penstock_loadtest.client.target import Target, find_target
from penstock_loadtest.fake.behaviour import Behaviour, Fault, FaultKind, Shedding
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.planned import Message, Planned
from penstock_loadtest.results.records import Record
from penstock_loadtest.scenario import Lengths
from tests.unit.loadtest.raw_server import LAST, Script, Site, Wire, event, head_of_stream, response, site

pytestmark = pytest.mark.uvloop  # the loop that the tester runs on

SECRET = "a prompt that nobody may see"
LONG_S = 20.0
CHAT = Planned(index=3, at_s=0.0, prompt=SECRET, max_tokens=8, ignore_eos=True, tenant="acme", kind="chats")
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 4}}
DONE = event(b"[DONE]")


def changed(**fields: object) -> Planned:
    return Planned(**{name: getattr(CHAT, name) for name in CHAT.__struct_fields__} | fields)


WHOLE = changed(stream=False)


def piece(content: str | None = None, ids: list[int] | None = None, finish: str | None = None, **more: object) -> bytes:
    return event(
        {
            "choices": [{"index": 0, "delta": {"content": content}, "token_ids": ids, "finish_reason": finish}],
            "usage": None,
            **more,
        }
    )


def usage(**fields: object) -> bytes:
    return event({"choices": [], "usage": {**USAGE, **fields}})


IDS = [piece(" a", [11]), piece(" b", [12]), piece(" c", [13]), piece("", [], "length")]
TEXT = [piece(""), piece(" a"), piece(" b"), piece(" c"), piece(None, None, "length")]


class World(NamedTuple):
    client: Client
    there: Site

    async def send(
        self, planned: Planned = CHAT, *, deadline_s: float = LONG_S, history: tuple[Message, ...] = ()
    ) -> Answer:
        now_s = self.client.clock.now()
        return await self.client.send(planned, intended_s=now_s, deadline_s=now_s + deadline_s, history=history)


@asynccontextmanager
async def open_world(script: Script) -> AsyncIterator[World]:
    async with site(script) as there:
        client = Client(Target(there.url, "m", ["m"], {"acme": "sk-secret"}, None, None), Clock())
        try:
            yield World(client, there)
        finally:
            await client.close()


def says(*parts: bytes) -> Script:
    async def script(wire: Wire) -> None:
        while True:
            await wire.read_request()
            await wire.send(*parts)

    return script


def says_and_closes(*parts: bytes) -> Script:
    async def script(wire: Wire) -> None:
        await wire.read_request()
        await wire.send(*parts)

    return script


def says_and_waits(*parts: bytes) -> Script:
    async def script(wire: Wire) -> None:
        await wire.read_request()
        await wire.send(*parts)
        await wire.wait_closed()

    return script


def answered(script: Script, planned: Planned = CHAT, *, deadline_s: float = LONG_S) -> Answer:
    async def main() -> Answer:
        async with open_world(script) as world:
            return await world.send(planned, deadline_s=deadline_s)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def recorded(script: Script, planned: Planned = CHAT, *, deadline_s: float = LONG_S) -> Record:
    record = answered(script, planned, deadline_s=deadline_s).record
    assert len(record.chunk_s) == len(record.chunk_tokens)
    assert record.end_s is not None
    assert SECRET not in repr(record)
    assert "sk-secret" not in repr(record)
    return record


def streamed(*events: bytes, done: bytes = DONE) -> Record:
    return recorded(says(head_of_stream() + b"".join(events) + done + LAST))


# --- streams


def test_a_stream_with_token_ids_is_recorded_token_by_token() -> None:
    record = recorded(says(head_of_stream("x-request-id: r1"), *IDS, usage(), DONE, LAST))

    assert (record.outcome, record.status, record.error, record.violations) == ("finished", 200, None, [])
    assert (record.tokens, record.tokens_from, record.metered_tokens, record.chunk_tokens) == (3, "ids", 3, [1, 1, 1])
    assert (record.prompt_tokens, record.cached_tokens, record.finish_reason) == (5, 4, "length")
    assert (record.index, record.tenant, record.kind, record.model, record.endpoint, record.wanted_tokens) == (
        3,
        "acme",
        "chats",
        "m",
        "chat",
        8,
    )
    assert record.request_id == "r1"
    assert record.sent_s is not None
    assert record.end_s is not None
    assert record.first_s == record.chunk_s[0]
    assert (
        record.intended_s
        <= record.sent_s
        <= record.chunk_s[0]
        <= record.chunk_s[1]
        <= record.chunk_s[2]
        <= record.end_s
    )


def test_text_without_token_ids_is_counted_by_usage_and_spread_over_the_chunks() -> None:
    record = streamed(*TEXT, usage(completion_tokens=5))

    assert (record.tokens, record.tokens_from, record.metered_tokens, record.chunk_tokens) == (5, "usage", 5, [1, 2, 2])


def test_text_without_token_ids_and_usage_is_counted_by_chunks() -> None:
    record = streamed(*TEXT)

    assert (record.tokens, record.tokens_from, record.metered_tokens, record.chunk_tokens) == (
        3,
        "chunks",
        None,
        [1, 1, 1],
    )
    assert record.violations == ["no usage though asked for"]


def test_token_ids_with_a_part_of_the_text_only_are_not_believed() -> None:
    record = streamed(piece(" a", [11]), piece(" b"), piece(" c", [13]), piece("", [], "stop"), usage())

    assert (record.tokens, record.tokens_from) == (3, "usage")


def test_several_tokens_of_a_chunk_share_its_time() -> None:
    record = streamed(piece(" a b c", [11, 12, 13]), piece("", [14]), piece("", [], "stop"), usage(completion_tokens=4))

    assert record.chunk_tokens == [3, 1]
    assert len(set(record.token_s[:3])) == 1


def test_what_a_model_thinks_is_counted_but_is_no_part_of_the_conversation() -> None:
    thought = event({"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": None}]})
    answer = answered(says(head_of_stream() + thought + b"".join(TEXT) + DONE + LAST), changed(session="s", turn=0))

    assert answer.record.tokens == 4
    assert answer.text == " a b c"


def test_text_is_kept_for_sessions_only() -> None:
    assert answered(says(head_of_stream() + b"".join(TEXT) + DONE + LAST)).text == ""


def test_odd_events_of_other_servers_are_read() -> None:
    odd = [
        event({"choices": []}),
        event({"choices": [{}]}),
        event({"id": 1, "choices": [{"delta": None, "logprobs": None, "extra": [1]}]}),
        b"5\r\n: hi\n\r\n",
    ]
    record = streamed(
        *odd,
        *TEXT,
        event({"choices": None, "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": None}}),
    )

    assert (record.outcome, record.tokens, record.cached_tokens, record.violations) == ("finished", 3, None, [])


def test_usage_that_grows_with_every_chunk_is_no_violation() -> None:
    grown = [piece(f" {n}", usage={"completion_tokens": n}) for n in (1, 2, 3)]
    record = streamed(*grown, piece("", None, "stop", usage=USAGE), usage())

    assert (record.tokens, record.metered_tokens, record.violations) == (3, 3, [])


@pytest.mark.parametrize(
    ("events", "done", "violations"),
    [
        ([*IDS, usage()], b"", ["no [DONE]"]),
        ([*IDS], DONE, ["no usage though asked for"]),
        ([*IDS, piece("", [], "stop"), usage()], DONE, ["two ends"]),
        ([*IDS, piece(" d", [14]), usage()], DONE, ["tokens behind the end"]),
        ([*IDS, usage(), usage(completion_tokens=4)], DONE, ["two usages that differ"]),
        ([*IDS, usage(), usage(prompt_tokens=6)], DONE, ["two usages that differ"]),
        ([*IDS, usage(), usage()], DONE, []),
        ([piece(" z", [9], usage={"completion_tokens": 9}), *IDS, usage()], DONE, ["two usages that differ"]),
        ([*IDS, usage()], DONE + usage(), ["data behind [DONE]"]),
        ([*IDS, usage()], DONE + DONE, ["data behind [DONE]"]),
        ([event(b"{nonsense"), *IDS, usage()], DONE, ["an event that is no chunk"]),
        (
            [event(b"{nonsense"), event(b"more"), *IDS, piece("", [], "stop"), usage()],
            b"",
            ["an event that is no chunk", "two ends", "no [DONE]"],
        ),
    ],
)
def test_what_the_protocol_forbids_is_written_down_once_each(
    events: list[bytes], done: bytes, violations: list[str]
) -> None:
    record = streamed(*events, done=done)

    assert record.outcome == "finished"
    assert record.violations == violations


def test_a_stream_without_an_end_has_failed() -> None:
    record = streamed(*IDS[:3])

    assert (record.outcome, record.error, record.tokens) == ("failed", "the stream ended without a finish_reason", 3)
    assert "no finish_reason" in record.violations


def test_an_error_event_fails_the_request_and_keeps_what_came_before() -> None:
    error = event({"error": {"message": SECRET, "type": "server_error", "code": "replica_lost"}})
    record = streamed(*IDS[:2], error, done=b"")

    assert (record.outcome, record.error) == ("failed", "the stream ended with an error replica_lost")
    assert (record.tokens, record.violations) == (2, [])


def test_an_error_event_behind_the_end_is_a_second_end() -> None:
    record = streamed(*IDS, event({"error": {"code": "replica_lost"}}), done=b"")

    assert (record.outcome, record.violations) == ("failed", ["two ends"])


def test_an_error_event_is_why_even_when_the_connection_closes_behind_it() -> None:
    record = recorded(says_and_closes(head_of_stream() + IDS[0] + event({"error": {"code": "replica_lost"}})))

    assert (record.outcome, record.error, record.violations) == (
        "failed",
        "the stream ended with an error replica_lost",
        [],
    )


def test_a_stream_that_breaks_off_has_failed_and_keeps_what_came_before() -> None:
    record = recorded(says_and_closes(head_of_stream() + b"".join(IDS[:2])))

    assert (record.outcome, record.error) == ("failed", "the connection was closed before the answer's end")
    assert (record.tokens, record.violations, record.status) == (2, ["broken off"], 200)


def test_an_answer_that_is_whole_but_for_the_end_of_its_body_is_finished_with_a_violation() -> None:
    record = recorded(says_and_closes(head_of_stream() + b"".join(IDS) + usage() + DONE))

    assert (record.outcome, record.error, record.violations) == ("finished", None, ["broken off"])


def test_an_endless_event_is_given_up() -> None:
    megabyte = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    record = recorded(says_and_waits(head_of_stream() + IDS[0], *[megabyte] * 9))

    assert (record.outcome, record.error, record.tokens) == ("failed", "an event is longer than 8388608 bytes", 1)


# --- whole answers


def whole(**fields: object) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": " a b c"}, "finish_reason": "stop", **fields}
    return response(
        json.dumps({"object": "chat.completion", "choices": [choice], "usage": USAGE}).encode(),
        "content-type: application/json",
    )


def test_a_whole_answer_has_all_its_tokens_at_its_end_and_no_first_token() -> None:
    answer = answered(says(whole(token_ids=[11, 12, 13])), changed(stream=False, session="s"))
    record = answer.record

    assert (record.outcome, record.tokens, record.tokens_from, record.chunk_tokens, record.violations) == (
        "finished",
        3,
        "ids",
        [3],
        [],
    )
    assert record.chunk_s == [record.end_s]
    assert record.is_whole
    assert record.first_s is None
    assert answer.text == " a b c"
    assert "stream_options" not in json.loads(answer.body)


def test_completions_answer_with_text() -> None:
    body = {"choices": [{"text": " a b c", "finish_reason": "stop"}], "usage": USAGE}
    record = recorded(
        says(response(json.dumps(body).encode())), changed(stream=False, endpoint="completions", prompt=[1, 2])
    )

    assert (record.outcome, record.tokens, record.tokens_from, record.endpoint) == (
        "finished",
        3,
        "usage",
        "completions",
    )


def test_a_stream_that_is_answered_whole_is_read_and_written_down() -> None:
    record = recorded(says(whole()))

    assert (record.outcome, record.tokens, record.violations) == (
        "finished",
        3,
        ["a whole answer though a stream was asked for"],
    )


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (response(b"<html>"), "the answer is not an answer's JSON"),
        (response(b'{"choices": []}'), "the answer has no finish_reason"),
        (response(b'{"error": {"message": "x"}}'), "the answer is an error, with status 200"),
        (head_of_stream() + b"".join(IDS) + DONE + LAST, "the answer is not an answer's JSON"),
    ],
)
def test_what_is_no_whole_answer_has_failed(answer: bytes, error: str) -> None:
    record = recorded(says(answer), WHOLE)

    assert (record.outcome, record.error) == ("failed", error)


def test_digests_are_equal_for_equal_answers_only() -> None:
    same = [
        streamed(*IDS, usage()),
        streamed(piece(" a b c", [11, 12, 13]), piece("", [], "length"), usage()),
        recorded(says(whole(token_ids=[11, 12, 13]))),
    ]
    by_text = [streamed(*TEXT), streamed(piece(" a b c", None, "stop")), recorded(says(whole()))]
    others = [streamed(piece(" a", [11]), *IDS, usage()), streamed(piece(" a b d", None, "stop"))]

    assert len({record.answer_digest for record in same}) == 1
    assert len({record.answer_digest for record in by_text}) == 1
    assert len({record.answer_digest for record in [*same, *by_text, *others]}) == 4
    assert streamed(piece("", [], "stop")).answer_digest is None


# --- answers that are errors


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("429 Too Many Requests", "shed"),
        ("503 Service Unavailable", "shed"),
        ("500 Internal Server Error", "failed"),
        ("400 Bad Request", "failed"),
    ],
)
def test_errors_are_told_by_status_and_code(status: str, outcome: str) -> None:
    body = json.dumps(
        {"error": {"message": SECRET, "type": "some_error", "param": None, "code": "overloaded"}}
    ).encode()
    record = recorded(says(response(body, "x-penstock-request-id: r1", status=status)))

    assert (record.outcome, record.status, record.error) == (outcome, int(status[:3]), f"HTTP {status[:3]} overloaded")
    assert record.request_id == "r1"
    assert record.end_s is not None
    assert record.first_s is None
    assert record.violations == []


def test_an_error_whose_body_does_not_end_is_told_all_the_same() -> None:
    long = recorded(says_and_waits(b"HTTP/1.1 500 Oops\r\n\r\n" + b"x" * (MAX_ERROR_BYTES + 1)))
    broken = recorded(says_and_closes(b"HTTP/1.1 503 Busy\r\ncontent-length: 9\r\n\r\nbu"))

    assert (long.outcome, long.error) == ("failed", "HTTP 500")
    assert (broken.outcome, broken.error, broken.violations) == ("shed", "HTTP 503", [])


async def test_a_server_that_is_not_there_has_failed_every_request() -> None:
    async with site(says()) as there:
        url = there.url
    client = Client(Target(url, "m", ["m"], {}, None, None), Clock())
    record = (await client.send(CHAT, intended_s=0.0, deadline_s=LONG_S)).record

    assert record.outcome == "failed"
    assert record.error is not None
    assert record.error.endswith("can't be reached: nothing listens there (connection refused)")
    assert record.sent_s is None


# --- headers and bodies


def test_the_receipt_is_read_from_the_headers() -> None:
    receipt = {
        "request-id": "r7",
        "tier": "cloud",
        "tier-reason": "too long",
        "replica": "r-1",
        "cached-tokens": "16",
        "predicted-ttft-ms": "250.5",
    }
    headers = [f"X-Penstock-{name}: {value}" for name, value in receipt.items()]
    record = recorded(says(head_of_stream("x-request-id: other", *headers) + b"".join(TEXT) + DONE + LAST))

    assert (record.request_id, record.tier, record.tier_reason, record.replica) == ("r7", "cloud", "too long", "r-1")
    assert (record.cached_tokens, record.predicted_ttft_s) == (16, 0.2505)


@pytest.mark.parametrize("value", ["", "many", "nan", "inf"])
def test_a_receipt_of_nonsense_is_left_out(value: str) -> None:
    record = recorded(
        says(
            head_of_stream(f"x-penstock-cached-tokens: {value}", f"x-penstock-predicted-ttft-ms: {value}")
            + b"".join(TEXT)
            + DONE
            + LAST
        )
    )

    assert (record.cached_tokens, record.predicted_ttft_s) == (None, None)


async def test_requests_go_to_their_endpoint_with_their_tenants_key_and_what_was_said_before() -> None:
    received = []

    async def script(wire: Wire) -> None:
        while True:
            received.append(await wire.read_request())
            await wire.send(whole())

    async with open_world(script) as world:
        await world.send(WHOLE, history=(Message("user", "hello"), Message("assistant", "hi")))
        await world.send(changed(stream=False, endpoint="completions", tenant="nobody"))

    assert [request.line for request in received] == [
        "POST /v1/chat/completions HTTP/1.1",
        "POST /v1/completions HTTP/1.1",
    ]
    assert received[0].headers["authorization"] == "Bearer sk-secret"
    assert "authorization" not in received[1].headers
    messages = received[0].json["messages"]
    assert isinstance(messages, list)
    assert [message["content"] for message in messages] == ["hello", "hi", SECRET]


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


def patient(world: World) -> None:
    """Idle connections whose breaking counts as that of a closed one however late it is noticed: the machine may be
    busy."""
    for connection in world.client._connections._idle:
        connection.round_trip_s = LONG_S


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
        patient(world)
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
        patient(world)
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
        patient(world)
        record = (await world.send()).record

        assert (record.outcome, record.is_resent) == ("failed", False)
        assert len(world.there.connections) == 1


# --- ends from our side


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


async def test_a_planned_hanging_up_closes_the_connection_and_keeps_what_came() -> None:
    server = Watched(head_of_stream() + IDS[0] + IDS[1])

    async with open_world(server) as world:
        record = (await world.send(changed(cancel_after_s=0.05))).record
        async with asyncio.timeout(LONG_S):
            await server.is_gone.wait()

        assert (record.outcome, record.error, record.tokens, record.violations) == ("cancelled", None, 2, [])
        assert record.sent_s is not None
        assert record.end_s is not None
        assert record.end_s - record.sent_s >= 0.045
        assert record.answer_digest is not None


def test_an_answer_that_ends_before_the_planned_hanging_up_is_finished() -> None:
    assert recorded(says(whole()), changed(cancel_after_s=LONG_S)).outcome == "finished"


@pytest.mark.parametrize(("parts", "tokens"), [((head_of_stream() + IDS[0],), 1), ((), 0)])
async def test_at_its_deadline_a_request_is_unfinished(parts: tuple[bytes, ...], tokens: int) -> None:
    server = Watched(*parts)

    async with open_world(server) as world:
        record = (await world.send(deadline_s=0.1)).record
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


# --- the fake server, whose truth is known


def faked(behaviour: Behaviour, planned: Planned = CHAT, count: int = 1) -> tuple[list[Record], FakeServer]:
    async def main() -> tuple[list[Record], FakeServer]:
        async with FakeServer(behaviour) as server:
            client = Client(await find_target(server.url, keys={}, timeout_s=LONG_S), Clock())
            now_s = client.clock.now()
            sends = [client.send(planned, intended_s=now_s, deadline_s=now_s + LONG_S) for _ in range(count)]
            records = [(await send).record for send in sends]
            await client.close()
            return records, server

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def behaves(fault: FaultKind | None = None, **fields: object) -> Behaviour:
    faults = [] if fault is None else [Fault(kind=fault, numbers=[0], after_tokens=3, delay_s=0.05)]
    ttft_s, gap_s = Lengths(constant=0.001), Lengths(constant=0.0005)
    return Behaviour(ttft_s=ttft_s, gap_s=gap_s, faults=faults, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_what_the_server_sent_is_what_is_recorded(endpoint: str, stream: bool) -> None:
    records, server = faked(behaves(), changed(endpoint=endpoint, stream=stream), count=3)

    for record, truth in zip(records, server.truths, strict=True):
        assert (record.outcome, record.violations, record.tokens_from) == ("finished", [], "ids")
        assert record.tokens == record.metered_tokens == 8
        assert record.prompt_tokens == truth.prompt_tokens
        assert (record.tier, record.replica) == ("edge", "fake-0")
    assert len({record.answer_digest for record in records}) == 1


@pytest.mark.parametrize(
    ("fault", "outcome", "violations", "tokens"),
    [
        ("close_before_headers", "failed", [], 0),
        ("close_mid_stream", "failed", ["broken off"], 3),
        ("error_event", "failed", [], 3),
        ("no_done", "finished", ["no [DONE]"], 8),
        ("double_finish", "finished", ["two ends"], 8),
        ("wrong_usage", "finished", [], 8),
        ("content_after_finish", "finished", ["tokens behind the end"], 9),
        ("status_500", "failed", [], 0),
        ("slow_headers", "finished", [], 8),
    ],
)
def test_every_fault_of_the_fake_server_is_seen_for_what_it_is(
    fault: FaultKind, outcome: str, violations: list[str], tokens: int
) -> None:
    (record, sound), _ = faked(behaves(fault), count=2)

    assert (record.outcome, record.violations, record.tokens) == (outcome, violations, tokens)
    assert (sound.outcome, sound.violations, sound.tokens) == ("finished", [], 8)


def test_a_server_without_token_ids_and_fields_of_its_own_is_measured_by_usage() -> None:
    records, _ = faked(
        behaves(token_ids=False, refused_fields=["return_token_ids", "ignore_eos", "seed"]), changed(seed=1), count=2
    )

    assert [(record.outcome, record.tokens, record.tokens_from) for record in records] == [("finished", 8, "usage")] * 2
    assert [record.is_resent for record in records] == [True, False]


def test_shed_requests_are_told_from_failed_ones() -> None:
    records, _ = faked(behaves(shedding=Shedding(rate=0.001, burst=1, status=503)), count=3)

    assert [record.outcome for record in records] == ["finished", "shed", "shed"]
    assert records[1].error is not None
    assert records[1].error.startswith("HTTP 503")
