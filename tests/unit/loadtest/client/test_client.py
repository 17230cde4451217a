"""Requests and their records, against servers that behave and servers that don't."""

import json

import pytest

from penstock_loadtest.client.client import Client, Clock
from penstock_loadtest.client.exchange import MAX_ERROR_BYTES
from penstock_loadtest.client.target import Target
from penstock_loadtest.planned import Message
from penstock_loadtest.results.records import Record
from tests.unit.loadtest.client.client_world import (
    CHAT,
    DONE,
    IDS,
    LONG_S,
    SECRET,
    TEXT,
    USAGE,
    WHOLE,
    answered,
    changed,
    open_world,
    piece,
    recorded,
    says,
    says_and_closes,
    whole,
)
from tests.unit.loadtest.raw_server import LAST, Script, Wire, event, head_of_stream, response, site

pytestmark = pytest.mark.uvloop  # the loop that the tester runs on


def usage(**fields: object) -> bytes:
    return event({"choices": [], "usage": {**USAGE, **fields}})


def says_and_waits(*parts: bytes) -> Script:
    async def script(wire: Wire) -> None:
        await wire.read_request()
        await wire.send(*parts)
        await wire.wait_closed()

    return script


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
