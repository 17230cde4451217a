"""/v1/responses by the unmodified `openai` package, and held against its own types."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from penstock.wire.errors import Overloaded, ReplicaLost
from tests.unit.router.dialects.events import ANSWER, ARGUMENTS, FUNCTION, ROOMY, named_events, prompt
from tests.unit.router.http_fakes import KEY, MODEL, Script, World, listening, running_gateway

EVENTS: Any = pydantic.TypeAdapter(ResponseStreamEvent)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCRIPTS = [
    (Script("Paris."), {}),
    (Script(""), {}),
    (Script(ANSWER), {"tools": [FUNCTION], "tool_choice": "auto", "parallel_tool_calls": True}),
    (Script("ab", error=ReplicaLost("gone")), {"instructions": "i", "metadata": {"a": "b"}}),
    (Script("{}"), {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}}),
    (Script("x"), {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "get_weather"}}),
]


@asynccontextmanager
async def talking(script: Script) -> AsyncIterator[tuple[openai.AsyncOpenAI, World]]:
    async with (
        running_gateway(script, model=ROOMY) as world,
        listening(world.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=20) as client,
    ):
        yield client, world


@pytest.mark.parametrize(("script", "fields"), SCRIPTS)
async def test_every_event_is_of_the_clients_own_types(script: Script, fields: dict[str, Any]) -> None:
    if not script.text:
        script = Script(deltas=[[257]])
    async with running_gateway(script, model=ROOMY) as world:
        response = await world.post("/v1/responses", input="Hi", stream=True, **fields)

        for name, data in named_events(response):
            event = EVENTS.validate_python(data, strict=True)
            assert (event.type, type(event).model_fields["type"].annotation.__args__) == (name, (name,))


@pytest.mark.parametrize(("script", "fields"), [each for each in SCRIPTS if each[0].error is None and each[0].text])
async def test_a_whole_answer_is_of_the_clients_own_type(script: Script, fields: dict[str, Any]) -> None:
    async with running_gateway(script, model=ROOMY) as world:
        answer = await world.post("/v1/responses", input="Hi", **fields)

        assert Response.model_validate(answer.json()).status == "completed"


async def test_a_text_is_answered_whole_and_streamed() -> None:
    async with talking(Script("Paris.")) as (client, _):
        whole = await client.responses.create(model=MODEL, input="Capital of France?", instructions="Be brief.")
        async with client.responses.stream(model=MODEL, input="Capital of France?") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()

        assert (whole.output_text, whole.status, whole.instructions) == ("Paris.", "completed", "Be brief.")
        assert ("".join(deltas), final.output_text) == ("Paris.", "Paris.")
        assert whole.usage is not None
        assert whole.usage.output_tokens == len("Paris.")


async def test_calls_are_read_and_their_results_are_in_the_next_turns_prompt() -> None:
    asked: list[Any] = [{"role": "user", "content": "Rome and Bern?"}]
    async with talking(Script(ANSWER)) as (client, world):
        async with client.responses.stream(model=MODEL, input=asked, tools=[FUNCTION]) as stream:
            async for _event in stream:
                pass
            first: Any = await stream.get_final_response()
        calls = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"{number} degrees"}
            for number, call in enumerate(calls)
        ]
        world.dispatcher.script = Script("Warm.")
        sent: Any = [*asked, *[item.model_dump(exclude={"parsed_arguments"}) for item in first.output], *results]
        second = await client.responses.create(model=MODEL, input=sent, tools=[FUNCTION])

        assert [json.loads(call.arguments) for call in calls] == [json.loads(text) for text in ARGUMENTS]
        assert second.output_text == "Warm."
        told = prompt(world.dispatcher.generations[1])
        assert "I look.\n<tool_call>" in told
        assert "<tool_response>\n0 degrees\n</tool_response>\n<tool_response>\n1 degrees\n</tool_response>" in told


async def test_errors_are_its_own_exceptions() -> None:
    async with talking(Script(refusal=Overloaded("full", retry_after_s=1))) as (client, _):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model=MODEL, input="x", stream=True)

        assert bad.value.param == "previous_response_id"
