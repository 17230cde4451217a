"""One exchange and its record, without a network: whatever comes over the wire, in whatever pieces, there is one record
and it adds up."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_loadtest.client.connection import Connection
from penstock_loadtest.client.exchange import MAX_HEADER_CHARS, Exchange
from penstock_loadtest.results.records import Record
from tests.unit.loadtest.raw_server import LAST, chunked, head_of_stream

OUTCOMES = {"finished", "cancelled", "shed", "failed", "unfinished"}


class Line(asyncio.Transport):
    """Takes what is written, and closes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def is_closing(self) -> bool:
        return self.is_aborted

    def write(self, data: object) -> None:
        assert not self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return 0


class World:
    """An exchange that has been sent on a connection."""

    def __init__(self, *, stream: bool = True, is_kept: bool = False) -> None:
        self.record = Record(index=0, intended_s=0.0, is_whole=not stream)
        self.exchange = Exchange(self.record, 0.0, stream=stream, wants_usage=stream, keeps_text=True)
        self.line = Line()
        self.lost: list[Connection] = []
        self.connection = self.connect()
        self.sent = asyncio.ensure_future(self.exchange.send_over(self.connection, b"", is_kept=is_kept))

    def connect(self) -> Connection:
        connection = Connection(lambda _: None, self.lost.append)
        connection.connection_made(self.line)
        connection.round_trip_s = 20.0
        return connection

    def hears(self, data: bytes) -> None:
        if not self.line.is_aborted:
            self.connection.data_received(data)

    async def is_over(self) -> None:
        async with asyncio.timeout(20):
            await self.sent
        assert self.exchange.is_over


def run(test: Callable[[World], Awaitable[None]], **options: bool) -> Record:
    async def main() -> Record:
        world = World(**options)
        await asyncio.sleep(0)
        await test(world)
        check(world.record)
        return world.record

    return asyncio.run(main())


def check(record: Record) -> None:
    """What holds for every record, whatever happened."""
    assert record.outcome in OUTCOMES
    assert record.end_s is not None
    assert len(record.chunk_s) == len(record.chunk_tokens)
    assert record.chunk_s == sorted(record.chunk_s)
    assert all(at <= record.end_s for at in record.chunk_s)
    assert record.tokens == sum(record.chunk_tokens) or (
        record.tokens_from == "usage" and record.tokens == record.metered_tokens and not record.chunk_s
    )
    assert len(record.violations) == len(set(record.violations))
    assert (record.outcome == "finished") == (record.error is None) or record.outcome == "cancelled"
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record


odd_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda part: st.lists(part, max_size=3),
    max_leaves=4,
)
choices = st.fixed_dictionaries(
    {},
    optional={
        "delta": st.fixed_dictionaries(
            {},
            optional={"content": st.sampled_from(["x", ""]) | odd_json, "tool_calls": odd_json, "reasoning": odd_json},
        )
        | odd_json,
        "message": odd_json,
        "text": odd_json,
        "token_ids": st.lists(st.integers(-1, 2**64), max_size=3) | odd_json,
        "finish_reason": st.sampled_from(["stop", None]) | odd_json,
    },
)
counts = st.integers(-1, 2**63) | odd_json
usages = st.fixed_dictionaries(
    {"prompt_tokens": counts, "completion_tokens": counts, "prompt_tokens_details": odd_json}
)
chunks = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(choices, max_size=2) | odd_json,
        "usage": usages | odd_json,
        "error": odd_json,
        "object": odd_json,
    },
)
events = st.one_of(
    chunks.map(lambda chunk: b"data: " + json.dumps(chunk).encode() + b"\n\n"),
    st.just(b"data: [DONE]\n\n"),
    st.binary(max_size=8),
)


@settings(max_examples=200)
@given(
    st.lists(events, max_size=6),
    st.sampled_from(["end", "close", "reset", "hang up", "expire", "cut"]),
    st.booleans(),
    st.integers(1, 400),
)
def test_whatever_comes_there_is_one_record_that_adds_up(said: list[bytes], end: str, stream: bool, size: int) -> None:
    async def test(world: World) -> None:
        whole = head_of_stream() + b"".join(map(chunked, filter(None, said))) + (LAST if end == "end" else b"")
        for begin in range(0, len(whole), size):
            world.hears(whole[begin : begin + size])
        if end in ("close", "reset") and not world.line.is_aborted:
            world.line.abort()
            world.connection.connection_lost(None if end == "close" else ConnectionResetError())
        elif end == "hang up":
            world.exchange.hang_up_in(0.0)
        elif end == "expire":
            world.exchange.expire_in(0.0)
        elif end == "cut":
            world.exchange.cut()
        await world.is_over()
        before = msgspec.json.encode(world.record)
        world.exchange.cut()
        world.exchange.fail("too late")

        assert msgspec.json.encode(world.record) == before

    run(test, stream=stream)


def test_a_kept_connection_that_breaks_at_once_leaves_the_request_to_be_sent_again() -> None:
    async def test(world: World) -> None:
        world.line.abort()
        world.connection.connection_lost(None)
        await world.sent

        assert world.exchange.is_unanswered
        assert not world.exchange.is_over
        world.exchange.cut()

    record = run(test, is_kept=True)

    assert (record.outcome, record.is_cut) == ("unfinished", True)


def test_a_request_that_expires_before_it_is_sent_again_is_over() -> None:
    async def test(world: World) -> None:
        world.line.abort()
        world.connection.connection_lost(None)
        world.exchange.expire_in(0.0)
        async with asyncio.timeout(20):
            while not world.exchange.is_over:  # noqa: ASYNC110 (the timer has no event)
                await asyncio.sleep(0)

    assert run(test, is_kept=True).error == "its timeout passed"


def test_a_connection_that_broke_since_it_was_made_is_told_at_once() -> None:
    async def test(world: World) -> None:
        world.line.abort()
        closed = world.connect()
        closed.connection_lost(None)
        record = Record(index=1, intended_s=0.0)
        exchange = Exchange(record, 0.0, stream=True, wants_usage=True, keeps_text=False)
        async with asyncio.timeout(20):
            await exchange.send_over(closed, b"x", is_kept=False)

        assert (record.outcome, record.error) == ("failed", "the connection was closed before the answer's end")
        world.exchange.cut()

    run(test)


@pytest.mark.parametrize(
    ("header", "field", "value"),
    [
        ("x-request-id: " + "r" * 1000, "request_id", "r" * MAX_HEADER_CHARS),
        ("x-penstock-tier: e\x1b[31mdge", "tier", "e[31mdge"),
        ("x-penstock-cached-tokens: 12", "cached_tokens", 12),
        ("x-penstock-cached-tokens: inf", "cached_tokens", None),
        ("x-penstock-cached-tokens: many", "cached_tokens", None),
        ("x-penstock-predicted-ttft-ms: 2.5", "predicted_ttft_s", 0.0025),
        ("x-penstock-predicted-ttft-ms: nan", "predicted_ttft_s", None),
    ],
)
def test_what_a_server_says_of_itself_is_bounded_and_on_one_line(header: str, field: str, value: object) -> None:
    async def test(world: World) -> None:
        world.exchange.on_head(200, dict([header.split(": ", 1)]))
        world.exchange.cut()

    assert getattr(run(test), field) == value


@pytest.mark.parametrize(
    ("kind", "is_stream"),
    [
        ("text/event-stream; charset=utf-8", True),
        ("Text/Event-Stream", True),
        ("", True),
        ("text/plain", True),
        ("application/json", False),
    ],
)
def test_a_stream_is_told_by_its_type_and_by_none(kind: str, is_stream: bool) -> None:
    async def test(world: World) -> None:
        world.exchange.on_head(200, {"content-type": kind} if kind else {})
        world.exchange.on_body(b'data: {"choices": [{"text": "x", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n', 1.0)
        world.exchange.on_end(1.0)

    assert (run(test).outcome == "finished") == is_stream


def test_tool_calls_and_parts_of_odd_types_do_not_break_the_record() -> None:
    deltas: list[object] = [
        {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
        {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}]},
        {"content": 7, "reasoning_content": "hm"},
        None,
    ]

    async def test(world: World) -> None:
        world.hears(head_of_stream())
        for delta in deltas:
            world.hears(
                chunked(b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": ""}]}).encode() + b"\n\n")
            )
        world.hears(
            chunked(
                b'data: {"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "usage": {"completion_tokens": '
                b"3}}\n\ndata: [DONE]\n\n"
            )
            + LAST
        )
        await world.is_over()

    record = run(test)

    assert (record.outcome, record.violations, record.finish_reason) == ("finished", [], "tool_calls")
    assert (record.tokens, record.chunk_tokens) == (3, [1, 1, 1])
