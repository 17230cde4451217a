"""The `openai` package, unmodified, against the gateway over a real socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from penstock.wire.errors import Overloaded, ReplicaLost
from tests.unit.router.http_fakes import KEY, MODEL, Script, World, listening, running_gateway

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Capital of France?"}]


@asynccontextmanager
async def talking(script: Script | None = None, key: str = KEY) -> AsyncIterator[tuple[openai.AsyncOpenAI, World]]:
    async with (
        running_gateway(script) as world,
        listening(world.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client, world


async def test_a_chat_is_answered_whole() -> None:
    async with talking() as (client, _):
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, n=2, logprobs=True, top_logprobs=1
        )

        assert [choice.message.content for choice in answer.choices] == ["Paris.", "Paris."]
        assert answer.usage.prompt_tokens_details.cached_tokens == 16
        assert answer.choices[0].logprobs.content[0].bytes == [ord("P")]
        assert answer.id == f"chatcmpl-{answer._request_id}"


async def test_a_chat_is_streamed() -> None:
    async with talking() as (client, _):
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        chunks = [chunk async for chunk in stream]

        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Paris."
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == 6
        choices = [chunk.choices[0] for chunk in chunks[:-1]]
        token_ids = [token for choice in choices for token in choice.token_ids]  # type: ignore[attr-defined]
        assert token_ids == list(b"Paris.")


async def test_completions_are_answered_and_streamed() -> None:
    async with talking() as (client, _):
        answer = await client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
        stream = await client.completions.create(model=MODEL, prompt=[1, 2, 3], stream=True)

        assert [choice.text for choice in answer.choices] == ["Paris.", "Paris."]
        assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4, 5]
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Paris."


async def test_models_are_listed() -> None:
    async with talking() as (client, _):
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "penstock"


async def test_errors_are_its_own_exceptions() -> None:
    async with talking() as (client, _):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-9", messages=MESSAGES)

        assert (bad.value.param, missing.value.code) == ("temperature", "model_not_found")
    async with talking(key="sk-penstock-" + "0" * 48) as (client, _):
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with talking(Script(refusal=Overloaded("full", retry_after_s=1))) as (client, _):
        with pytest.raises(openai.InternalServerError) as full:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)

        assert full.value.response.headers["retry-after"] == "1"


async def test_a_failure_within_a_stream_is_raised() -> None:
    async with talking(Script("ab", error=ReplicaLost("the replica is gone"))) as (client, _):
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        texts = [(await anext(stream)).choices[0].delta.content for _ in "ab"]
        with pytest.raises(openai.APIError, match="the replica is gone"):
            await anext(stream)

        assert texts == ["a", "b"]


async def test_a_stream_that_is_closed_early_is_aborted() -> None:
    async with talking(Script("abcdef", hold_after=3)) as (client, world):
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await world.dispatcher.until(lambda: world.dispatcher.num_open == 0)
