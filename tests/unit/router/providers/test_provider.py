"""Reading a provider's stream, and calls of a server that sends exactly what a test wants; what dispatch makes
of them is in test_dispatcher_tiers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import PenstockError
from penstock.base.metrics import Metrics
from penstock.router.config import ProviderConfig
from penstock.router.providers import provider
from penstock.router.providers.provider import Provider, Providers
from penstock.router.providers.provider_api import StreamBroken
from penstock.router.routing.request import CallDelta, ProviderRequest, TextDelta
from penstock.router.routing.spending import NOWHERE, Spending
from penstock.router.routing.tiers import TierReason
from penstock.wire.errors import InvalidRequest, Overloaded, ReplicaLost
from penstock.wire.frames import Delta, Finish
from penstock.wire.openai import ChatMessageIn, ChatRequest

STREAM = (
    'data: {"a":"\u2028 and \x85"}\r\n\r\n: a comment\nevent: x\ndata:{"b":"é"}\n\ndata: [DONE]\n\ndata: last'.encode()
)
EVENTS = ['{"a":"\u2028 and \x85"}'.encode(), '{"b":"é"}'.encode(), b"[DONE]", b"last"]


def events(pieces: list[bytes]) -> list[bytes]:
    async def data() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def main() -> list[bytes]:
        return [event async for event in provider._split_events(data())]

    return asyncio.run(main())


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_events_are_the_same_however_the_bytes_are_cut(places: list[int]) -> None:
    cuts = [0, *sorted(places), len(STREAM)]

    assert events([STREAM[begin:end] for begin, end in pairwise(cuts)]) == EVENTS


def test_an_event_without_end_is_not_collected_for_ever() -> None:
    with pytest.raises(StreamBroken):
        events([b"data: "] + [b"x" * 65536] * 20)


# --- calls

KEY = "a-secret-of-the-provider"
REQUEST = ProviderRequest(
    ChatRequest(model="m", messages=[ChatMessageIn(role="user", content="What is the capital of France?")])
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TEXT = b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def chunked(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)


def whole(status: str, body: bytes = b"", *headers: bytes) -> bytes:
    return b"\r\n".join([f"HTTP/1.1 {status}".encode(), b"content-length: %d" % len(body), *headers, b"", body])


ANSWER = HEAD + chunked(TEXT, FINISH, DONE) + END


@dataclass
class Upstream:
    """A server that sends `replies` in their order, the last one again and again; None: nothing, for ever."""

    replies: list[bytes | None]
    num_connections: int = 0
    requests: list[bytes] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """The client hung up, while it was answered or waited for a reply."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length")
                )
                self.requests.append(head + await reader.readexactly(length))
                reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
                if reply is None:
                    await reader.read()
                    self.hung_up.set()
                    return
                writer.write(reply)
                if not reply.endswith(END) and b"content-length" not in reply:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


class Sink:
    """What a call delivers, and whether it has ended."""

    def __init__(self) -> None:
        self.text = ""
        self.spending = Spending(NOWHERE)
        self.calls: list[CallDelta] = []
        self.ends: list[object] = []
        self.has_ended = asyncio.Event()
        self.has_begun = asyncio.Event()

    def push(self, delta: Delta) -> None:
        assert isinstance(delta, TextDelta)
        self.text += delta.text
        self.calls += delta.calls
        self.has_begun.set()
        if delta.finish is not None:
            self._end(delta.finish)

    def refuse(self, error: PenstockError) -> None:
        self._end(error)

    def break_off(self, error: PenstockError) -> None:
        self._end(error)

    def _end(self, end: object) -> None:
        self.ends.append(end)
        self.has_ended.set()


@dataclass
class World:
    upstream: Upstream
    providers: Providers
    rooms: list[str]
    metrics: Metrics

    @property
    def provider(self) -> Provider:
        return self.providers.by_name["up"]

    def scrape(self, name: str) -> float | None:
        """The provider's metric of that name, as somebody who asks now sees it."""
        self.providers.count_open()
        return self.metrics.registry.get_sample_value(name, {"provider": "up"})

    def begin_call(self) -> tuple[int, Sink]:
        sink = Sink()
        return self.provider.begin(REQUEST, 16, 7, 5, sink), sink

    async def finish_call(self) -> Sink:
        _, sink = self.begin_call()
        async with asyncio.timeout(10):
            await sink.has_ended.wait()
        return sink


@asynccontextmanager
async def served(*replies: bytes | None, **changes: object) -> AsyncIterator[World]:
    upstream = Upstream(list(replies))
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    fields = {
        "name": "up",
        "base_url": f"http://127.0.0.1:{port}/v1",
        "model": "large",
        "served_names": ("m",),
        "timeout_s": 5.0,
    } | changes
    rooms: list[str] = []
    metrics = Metrics()
    async with (
        server,
        Providers([msgspec.convert(fields, ProviderConfig)], {"up": KEY}, rooms.append, metrics) as providers,
    ):
        yield World(upstream, providers, rooms, metrics)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is waited for happens behind a socket, or a timer)
            await asyncio.sleep(0.001)


async def test_answers_one_after_the_other_come_over_one_connection() -> None:
    async with served(ANSWER) as world:
        for _ in range(3):
            sink = await world.finish_call()
            assert (sink.text, sink.ends) == ("Hi", [Finish.STOP])
            await until(
                lambda: not any(task.get_name() == "provider up" for task in asyncio.all_tasks())
            )  # the response has ended too
        assert world.upstream.num_connections == 1
        assert f"authorization: bearer {KEY}".encode() in world.upstream.requests[0].lower()


async def test_a_call_costs_its_tokens_at_the_prices_of_the_provider_those_in_its_cache_at_theirs() -> None:
    counts = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 60}}
    usage = b"data: " + msgspec.json.encode({"choices": [], "usage": counts}) + b"\n\n"
    answer = HEAD + chunked(TEXT, FINISH, usage, DONE) + END
    async with served(answer, input_price=2.0, output_price=8.0, cached_price=0.5) as world:
        sink = await world.finish_call()

        assert sink.spending.is_settled
        assert sink.spending.provided_nano == 40 * 2000 + 60 * 500 + 10 * 8000

    async with served(answer, input_price=2.0, output_price=8.0) as world:
        sink = await world.finish_call()

        assert sink.spending.provided_nano == 100 * 2000 + 10 * 8000


def call_event(**call: object) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"delta": {"tool_calls": [{"index": 0, **call}]}}]}) + b"\n\n"


async def test_tool_calls_come_through_as_parts_of_the_answer() -> None:
    begin = call_event(id="a", type="function", function={"name": "f", "arguments": ""})
    parts = [call_event(function={"arguments": text}) for text in ('{"a"', ": 1}")]
    finish = b'data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}\n\n'
    async with served(HEAD + chunked(begin, *parts, finish, DONE) + END) as world:
        sink = await world.finish_call()

        assert sink.calls == [CallDelta(0, "", "a", "f"), CallDelta(0, '{"a"'), CallDelta(0, ": 1}")]
        assert (sink.text, sink.ends) == ("", [Finish.STOP])


@pytest.mark.parametrize(
    ("reply", "end"),
    [
        (HEAD + chunked(b"data: {not json\n\n") + END, Overloaded),
        (HEAD + chunked(TEXT, b"data: \xff\xfe\n\n") + END, ReplicaLost),
        (HEAD + chunked(TEXT) + END, ReplicaLost),
        (HEAD + chunked(TEXT, b'data: {"error":{"message":"x"}}\n\n') + END, ReplicaLost),
        (HEAD + chunked(TEXT) + b"zz\r\n", ReplicaLost),
        (HEAD + chunked(b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n') + END, Overloaded),
        (whole("200 OK", b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}'), Overloaded),
        (whole("200 OK", b"<html>"), Overloaded),
        (b"nonsense\r\n\r\n", Overloaded),
        (whole("307 Temporary Redirect", b"", b"location: http://127.0.0.1:9/v1/chat/completions"), Overloaded),
        (whole("429 Too Many Requests", b"", b"retry-after: inf"), Overloaded),
        (whole("500 Internal Server Error", b"<html>"), Overloaded),
        (whole("401 Unauthorized", b'{"error":{"message":"Incorrect API key provided: a-sec***"}}'), Overloaded),
        (whole("400 Bad Request", b'{"error":{"message":"No."}}'), InvalidRequest),
    ],
)
async def test_whatever_it_says_a_call_ends_once_and_no_log_holds_the_key(
    reply: bytes, end: type[PenstockError], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with served(reply) as world:
            sink = await world.finish_call()

            (found,) = sink.ends
            assert type(found) is end
            assert found.retry_after_s is None or found.retry_after_s <= 86_400
            assert len(world.upstream.requests) == 1
    assert KEY not in caplog.text


async def test_a_finish_is_told_once_whatever_comes_behind_it() -> None:
    async with served(HEAD + chunked(TEXT, FINISH, DONE) + b"zz\r\n") as world:
        assert (await world.finish_call()).ends == [Finish.STOP]
        assert (await world.finish_call()).ends == [Finish.STOP]
        assert world.upstream.num_connections == 2, "a connection with garbage on it is not used again"


async def test_a_provider_whose_answers_break_off_is_left_alone_after_some_in_a_row() -> None:
    async with served(HEAD + chunked(TEXT) + END, breaker_failures=3) as world:
        for _ in range(3):
            assert world.provider.forecast().obstacle is None
            await world.finish_call()
        assert world.provider.forecast().obstacle is TierReason.BREAKER_OPEN


async def test_the_first_words_of_a_trial_let_the_others_through() -> None:
    async with served(
        whole("500 Oh"), HEAD + chunked(TEXT) + b"ff\r\n" + b" " * 3 + END, breaker_failures=1, breaker_open_s=0.02
    ) as world:
        await world.finish_call()
        await until(lambda: len(world.rooms) == 2)  # the end of the first call, and of the breaker's pause
        assert world.provider.forecast().obstacle is None
        sid, trial = world.begin_call()
        assert world.provider.forecast().obstacle is TierReason.BREAKER_OPEN
        world.rooms.clear()
        await trial.has_begun.wait()

        assert not trial.has_ended.is_set()
        assert world.provider.forecast().obstacle is None
        assert world.rooms == ["up"]
        world.provider.abort(sid)


async def test_the_metrics_say_that_a_breaker_is_open_until_the_provider_has_answered_again() -> None:
    async with served(whole("500 Oh"), ANSWER, breaker_failures=1, breaker_open_s=0.02) as world:
        assert world.scrape("penstock_provider_breaker_open") == 0
        await world.finish_call()
        assert world.scrape("penstock_provider_breaker_open") == 1
        await until(lambda: world.provider.is_available)

        assert world.scrape("penstock_provider_breaker_open") == 1, "a trial may begin, none has succeeded"
        await world.finish_call()
        assert world.scrape("penstock_provider_breaker_open") == 0


async def test_an_abort_hangs_up_before_anything_was_said_too() -> None:
    async with served(None) as world:
        sid, sink = world.begin_call()
        await until(lambda: bool(world.upstream.requests))
        world.provider.abort(sid)
        async with asyncio.timeout(5):
            await world.upstream.hung_up.wait()

        assert sink.ends == []
