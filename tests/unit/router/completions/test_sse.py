import asyncio
import itertools

import msgspec
import pytest

from penstock.router.completions.completion import Choice
from penstock.router.completions.formats import ResponseMeta, TextFormat
from penstock.router.completions.sse import EventStream
from penstock.router.completions.text_assembly import TextAssembler, TextPiece
from penstock.router.routing.request import Generation, Receipt
from penstock.router.transport.exchange import Exchange
from penstock.wire.errors import ReplicaLost
from penstock.wire.frames import SamplingParams
from penstock.wire.openai import ChatCompletionChunk, ErrorResponse, PromptTokensDetails, TextCompletion, Usage
from tests.unit.router.http_fakes import IM_END, TOKENIZER, Script, events, running_gateway


async def test_a_chat_streams_role_text_finish_and_done() -> None:
    async with running_gateway(Script("Hé!")) as world:
        response = await world.chat(stream=True)
        *data, done = events(response)
        chunks = [msgspec.json.decode(item, type=ChatCompletionChunk) for item in data]

        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-penstock-replica"] == "replica-1"
        assert done == "[DONE]"
        assert [msgspec.to_builtins(chunk.choices[0].delta) for chunk in chunks] == [
            {"role": "assistant", "content": "H"},
            {"content": "é"},
            {"content": "!"},
            {},
        ]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
        assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
        assert "usage" not in response.text


async def test_the_first_chunk_leaves_at_once_even_without_text() -> None:
    async with running_gateway(Script(deltas=[[0xC3], [0xA9]])) as world:
        *data, _ = events(await world.chat(stream=True))

        assert [msgspec.json.decode(item)["choices"][0]["delta"].get("content") for item in data] == ["", "é", None]


async def test_usage_comes_last_and_is_null_before() -> None:
    async with running_gateway(Script("ab")) as world:
        for response in (
            await world.chat(stream=True, stream_options={"include_usage": True}),
            await world.complete(stream=True, stream_options={"include_usage": True}),
        ):
            *data, last, done = events(response)

            assert done == "[DONE]"
            assert all(msgspec.json.decode(item)["usage"] is None for item in data)
            assert msgspec.json.decode(last)["choices"] == []
            assert msgspec.json.decode(last)["usage"]["completion_tokens"] == 2


async def test_with_continuous_usage_each_chunk_has_what_its_choice_has_used() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running_gateway(Script("abc")) as world:
        for response in (
            await world.chat(stream=True, n=2, stream_options=options),
            await world.complete(stream=True, n=2, stream_options=options),
        ):
            *data, last, done = events(response)
            chunks = [msgspec.json.decode(item) for item in data]
            num_prompt = msgspec.json.decode(last)["usage"]["prompt_tokens"]
            of_second = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == 1]

            assert done == "[DONE]"
            assert [usage["completion_tokens"] for usage in of_second] == [1, 2, 3, 3]
            assert {usage["total_tokens"] - usage["completion_tokens"] for usage in of_second} == {num_prompt}
            assert {usage["prompt_tokens_details"]["cached_tokens"] for usage in of_second} == {16}
            assert msgspec.json.decode(last)["usage"]["completion_tokens"] == 6
            kind = ChatCompletionChunk if chunks[0]["object"] == "chat.completion.chunk" else TextCompletion
            assert all(msgspec.json.decode(item, type=kind).usage for item in data)


async def test_continuous_usage_alone_changes_nothing() -> None:
    async with running_gateway(Script("abc")) as world:
        response = await world.chat(stream=True, stream_options={"continuous_usage_stats": True})

        assert "usage" not in response.text


async def test_a_completion_streams_text() -> None:
    async with running_gateway(Script('a"\n')) as world:
        *data, _ = events(await world.complete(stream=True))
        chunks = [msgspec.json.decode(item, type=TextCompletion) for item in data]

        assert [chunk.choices[0].text for chunk in chunks] == ["a", '"', "\n", ""]
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_token_ids_and_logprobs_are_in_every_chunk_and_lose_nothing(endpoint: str) -> None:
    logprobs: dict[str, object] = {"logprobs": True} if endpoint == "chat" else {"logprobs": 0}
    async with running_gateway(Script(deltas=[[0xC3], [0xA9, 0x61], [IM_END]])) as world:
        *data, _ = events(await getattr(world, endpoint)(stream=True, return_token_ids=True, **logprobs))
        choices = [msgspec.json.decode(item)["choices"][0] for item in data]

        assert [choice["token_ids"] for choice in choices] == [[0xC3], [0xA9, 0x61], [IM_END], []]
        sizes = [len(choice["logprobs"]["content" if endpoint == "chat" else "tokens"]) for choice in choices[:-1]]
        assert sizes == [1, 2, 1]


async def test_choices_interleave_each_in_its_own_order() -> None:
    async with running_gateway(Script("abcdef")) as world:
        *data, done = events(await world.chat(stream=True, n=3, stream_options={"include_usage": True}))
        chunks = [msgspec.json.decode(item, type=ChatCompletionChunk) for item in data]
        choices = sorted((chunk.choices[0] for chunk in chunks[:-1]), key=lambda choice: choice.index)

        assert done == "[DONE]"
        for _, group in itertools.groupby(choices, key=lambda choice: choice.index):
            own = list(group)
            assert own[0].delta.role == "assistant"
            assert "".join(choice.delta.content or "" for choice in own) == "abcdef"
            assert [choice.finish_reason for choice in own].count("stop") == 1
        assert world.dispatcher.num_open == 0


async def test_a_failure_after_the_first_token_is_an_event_that_ends_the_stream() -> None:
    async with running_gateway(Script("ab", error=ReplicaLost("the replica is gone"))) as world:
        response = await world.chat(stream=True)
        data = events(response)

        assert response.status_code == 200
        assert "[DONE]" not in data
        assert msgspec.json.decode(data[-1], type=ErrorResponse).error.code == "replica_lost"
        assert len(data) == 3


async def test_an_unexpected_failure_after_the_first_token_says_nothing_of_itself() -> None:
    async with running_gateway(Script("ab", error=ZeroDivisionError("secret"))) as world:
        data = events(await world.chat(stream=True))

        assert msgspec.json.decode(data[-1], type=ErrorResponse).error.code == "internal_error"
        assert "secret" not in data[-1]


async def test_choices_that_finish_before_the_response_has_started_all_arrive() -> None:
    """The start may wait on a connection whose last answer is not yet read."""
    sent: list[dict[str, object]] = []
    may_send = asyncio.Event()

    async def send(message: dict[str, object]) -> None:
        await may_send.wait()
        sent.append(message)

    async def receive() -> dict[str, object]:
        raise AssertionError("nothing is read")

    scope = {"method": "POST", "path": "/v1/completions", "headers": []}
    exchange = Exchange(scope, receive, send, "r", 0.0)  # type: ignore[arg-type]
    stream = EventStream(exchange, TextFormat(ResponseMeta("cmpl-r", 0, "tiny", "fp_", TOKENIZER)), 2)
    emits = [
        asyncio.create_task(stream.emit(_begun(index), TextPiece(f"text {index}", [97], "stop"))) for index in range(2)
    ]
    await asyncio.sleep(0)
    may_send.set()
    await asyncio.gather(*emits)
    await stream.end(Usage(1, 2, 3, PromptTokensDetails(0)))

    body = b"".join(message["body"] for message in sent[1:])  # type: ignore[misc]
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert b"text 0" in body
    assert b"text 1" in body
    assert body.count(b'"finish_reason":"stop"') == 2
    assert body.endswith(b"data: [DONE]\n\n")


def _begun(index: int) -> Choice:
    generation = Generation("r", (), b"", 1, SamplingParams(1), "tenant-1", b"salt", 0.0)
    return Choice(index, generation, TextAssembler(TOKENIZER), Receipt("r"))


@pytest.mark.parametrize("is_continuous", [True, False])
async def test_tokens_that_come_past_the_reader_have_their_usage_too(is_continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": is_continuous}
    async with running_gateway(Script("ab", hold_after=1)) as world:
        asking = asyncio.create_task(world.chat(stream=True, stream_options=options))
        await world.dispatcher.until(lambda: bool(world.dispatcher.streams))
        (stream,) = world.dispatcher.streams
        for _ in range(20):
            await asyncio.sleep(0)
        has_fast_path = stream.listener is not None
        stream.resume()
        await asking

        assert has_fast_path is not is_continuous
