"""/v1/messages by the unmodified `anthropic` package, and held against its own types."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic.types import Message, RawMessageStreamEvent

from penstock.wire.errors import Overloaded, ReplicaLost
from penstock.wire.frames import Finish
from tests.unit.router.dialects.events import ANSWER, ARGUMENTS, ASKED, ROOMY, TOOL, named_events, prompt
from tests.unit.router.http_fakes import KEY, MODEL, Script, World, listening, running_gateway

EVENTS: Any = pydantic.TypeAdapter(RawMessageStreamEvent)
SCRIPTS = [
    (Script("Paris."), {}),
    (Script("Paris.", finish=Finish.LENGTH), {}),
    (Script("Paris."), {"stop_sequences": ["is"]}),
    (Script(ANSWER), {"tools": [TOOL]}),
]


@asynccontextmanager
async def talking(script: Script, key: str = KEY) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, World]]:
    async with (
        running_gateway(script, model=ROOMY) as world,
        listening(world.app) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=20) as client,
    ):
        yield client, world


@pytest.mark.parametrize(("script", "fields"), SCRIPTS)
async def test_answers_and_events_are_of_the_clients_own_types(script: Script, fields: dict[str, Any]) -> None:
    async with running_gateway(script, model=ROOMY) as world:
        body: dict[str, Any] = {"max_tokens": 400, "messages": ASKED, **fields}
        whole = await world.post("/v1/messages", **body)
        stream = await world.post("/v1/messages", stream=True, **body)

        assert Message.model_validate(whole.json()).role == "assistant"
        for name, data in named_events(stream):
            if name != "ping":  # the package skips it, and has no type for it
                assert EVENTS.validate_python(data, strict=True).type == name


async def test_a_text_is_answered_whole_and_streamed() -> None:
    async with talking(Script("Paris.")) as (client, _):
        asked: Any = {"model": MODEL, "max_tokens": 9, "messages": ASKED, "system": "Be brief."}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            text = "".join([part async for part in stream.text_stream])
            final = await stream.get_final_message()

        assert [block.text for block in whole.content if block.type == "text"] == ["Paris."]
        assert (text, final.stop_reason, final.usage.output_tokens) == ("Paris.", "end_turn", 6)
        assert whole.id == f"msg_{whole._request_id}"


async def test_calls_are_read_and_their_results_are_in_the_next_turns_prompt() -> None:
    async with talking(Script(ANSWER)) as (client, world):
        asked: Any = {"model": MODEL, "max_tokens": 400, "tools": [TOOL]}
        async with client.messages.stream(messages=ASKED, **asked) as stream:
            first = await stream.get_final_message()
        calls = [block for block in first.content if block.type == "tool_use"]
        results: Any = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"{number} degrees"}
            for number, call in enumerate(calls)
        ]
        world.dispatcher.script = Script("Warm.")
        turns: Any = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await client.messages.create(messages=turns, **asked)

        assert first.stop_reason == "tool_use"
        assert [call.input for call in calls] == [json.loads(text) for text in ARGUMENTS]
        assert [block.text for block in second.content if block.type == "text"] == ["Warm."]
        told = prompt(world.dispatcher.generations[1])
        assert "I look.\n<tool_call>" in told
        assert "<tool_response>\n0 degrees\n</tool_response>\n<tool_response>\n1 degrees\n</tool_response>" in told


async def test_tokens_are_counted() -> None:
    async with talking(Script("Paris.")) as (client, world):
        asked: Any = {"model": MODEL, "messages": ASKED, "tools": [TOOL]}
        counted = await client.messages.count_tokens(**asked)
        await client.messages.create(max_tokens=9, **asked)

        assert counted.input_tokens == world.dispatcher.generations[0].num_prompt_tokens


async def test_errors_are_its_own_exceptions() -> None:
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": ASKED}
    async with talking(Script("ab", error=ReplicaLost("the replica is gone"))) as (client, _):
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**asked, extra_body={"temperature": 9})
        with pytest.raises(anthropic.APIStatusError, match="the replica is gone"):
            async with client.messages.stream(**asked) as stream:
                await stream.get_final_message()
    async with talking(Script("x"), key="sk-penstock-" + "0" * 48) as (client, _):
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**asked)
    async with talking(Script(refusal=Overloaded("full", retry_after_s=1))) as (client, _):
        with pytest.raises(anthropic.InternalServerError) as full:
            await client.messages.create(**asked)

        assert full.value.status_code == 503
