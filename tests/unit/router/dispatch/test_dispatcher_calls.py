"""Answers with tool calls on their way through dispatch: from a provider, merged for a slow reader, over the loss of a
replica."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from penstock.router.completions.text_assembly import Shown, TextAssembler, TextPiece
from penstock.router.completions.tool_assembly import AnswerTools, ToolAssembler
from penstock.router.config import ProviderConfig
from penstock.router.dispatch.mailbox import Mailbox, merge_deltas
from penstock.router.routing.request import CallDelta, Generation, ProviderRequest, Route, TextDelta
from penstock.text.tools.forms import OWN_FORM
from penstock.wire.frames import Delta, Finish, SamplingParams, pack_token_ids, unpack_token_ids
from penstock.wire.openai import ChatMessageIn, ChatRequest, FunctionDefinition, ToolDefinition
from tests.unit.router.fleet_fakes import Cluster, FakeMember, settle
from tests.unit.router.http_fakes import IM_END, TOKENIZER

A, B = FakeMember("a"), FakeMember("b")
PROMPT = list(range(10, 40))
ARGUMENTS = '{"city": "Rome", "days": [1, 2]}'
ANSWER = f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TOOL = ToolDefinition(type="function", function=FunctionDefinition(name="get_weather"))
EVENTS = (
    {"delta": {"role": "assistant", "content": "I look."}},
    {"delta": {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "get_weather", "arguments": ""}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS[:9]}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS[9:]}}]}},
    {"delta": {}, "finish_reason": "tool_calls"},
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def assembler() -> ToolAssembler:
    tools = AnswerTools(frozenset({"get_weather"}), is_parallel=True, is_stream=True)
    return ToolAssembler(TextAssembler(TOKENIZER, shown=Shown(call_markers=True)), tools, OWN_FORM, seed=1)


def whole(pieces: Sequence[TextPiece]) -> tuple[str, str, list[str | None], str | None]:
    """Content, arguments, names and finish of an answer with one call."""
    calls = [call for piece in pieces for call in piece.calls]
    assert {call.number for call in calls} == {0}
    return (
        "".join(piece.text for piece in pieces).strip(),
        "".join(call.arguments for call in calls),
        [call.name for call in calls if call.name is not None],
        pieces[-1].finish,
    )


@asynccontextmanager
async def upstream(requests: list[bytes]) -> AsyncIterator[str]:
    """A provider that answers every request with the events. requests: takes their bodies."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = [
                int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length")
            ]
            requests.append(await reader.readexactly(length))
            events = [b"data: " + msgspec.json.encode({"choices": [event]}) + b"\n\n" for event in EVENTS]
            writer.write(HEAD + b"".join(events) + b"data: [DONE]\n\n")
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


async def pieces_of(stream: Mailbox, subject: ToolAssembler) -> list[TextPiece]:
    pieces: list[TextPiece] = []
    while not pieces or pieces[-1].finish is None:
        pieces.append(subject.push(await stream.next()))
    return pieces


def generation(request: ChatRequest | None = None, **fields: object) -> Generation:
    given = {
        "request_id": "r",
        "pools": ("pool",),
        "packed_token_ids": pack_token_ids(PROMPT),
        "num_prompt_tokens": len(PROMPT),
        "sampling": SamplingParams(500, seed=5),
        "tenant": "tenant",
        "salt": b"salt",
        "deadline": time.monotonic() + 20,
        "provider_request": None if request is None else ProviderRequest(request),
    }
    return Generation(**given | fields)  # type: ignore[arg-type]


async def test_a_providers_calls_come_through_and_it_gets_the_tools() -> None:
    request = ChatRequest(
        model="m",
        messages=[ChatMessageIn(role="user", content="Rome?")],
        tools=[TOOL],
        tool_choice="required",
    )
    requests: list[bytes] = []
    async with asyncio.timeout(20), upstream(requests) as url:
        up = ProviderConfig(name="up", base_url=url, model="large", served_names=("m",))
        async with Cluster(providers=[up]) as cluster:
            routes = (Route("cloud", (), provider="up"),)
            stream = await cluster.dispatcher.start(generation(request, pools=("up",), routes=routes))
            pieces = await pieces_of(stream, assembler())
            stream.close()

    sent = msgspec.json.decode(requests[0])
    assert whole(pieces) == ("I look.", ARGUMENTS, ["get_weather"], "tool_calls")
    assert [call.id for piece in pieces for call in piece.calls if call.name] == ["x"]
    assert (sent["tool_choice"], sent["tools"][0]["function"]["name"]) == ("required", "get_weather")


def test_parts_of_calls_that_wait_for_a_reader_are_kept_in_their_order() -> None:
    parts = (CallDelta(0, id="x", name="f"), CallDelta(0, '{"a"'), CallDelta(0, ": 1}"), CallDelta(1, id="y", name="g"))
    first = TextDelta(1, [], text="a", num_tokens=1, calls=parts[:2])
    second = TextDelta(1, [], text="b", num_tokens=1, calls=parts[2:])

    merged = merge_deltas([first, second, TextDelta(1, [], finish=Finish.STOP)])

    assert isinstance(merged, TextDelta)
    assert (merged.text, merged.calls, merged.finish) == ("ab", parts, Finish.STOP)


@pytest.mark.parametrize("num_before", [3, 30, 60, len(ANSWER) - 2])
async def test_a_call_goes_on_after_its_replica_is_lost(num_before: int) -> None:
    answer = [*ANSWER.encode(), IM_END]
    async with Cluster(A, B) as cluster:
        stream = await cluster.dispatcher.start(generation())
        first = cluster.replicas[stream.receipt.replica]
        reading = asyncio.ensure_future(pieces_of(stream, assembler()))
        first.send(Delta(first.last_sid, answer[:num_before], num_cached_tokens=0))
        await settle()
        first.die()
        await settle()
        (second,) = [replica for replica in cluster.replicas.values() if replica.running]
        second.running.clear()  # the test sends the rest itself
        second.send(Delta(second.last_sid, answer[num_before:], finish=Finish.STOP, num_cached_tokens=0))
        pieces = await reading
        stream.close()

    assert unpack_token_ids(second.submits[-1].packed_token_ids) == PROMPT + answer[:num_before]
    assert whole(pieces) == ("I look.", ARGUMENTS, ["get_weather"], "tool_calls")
