"""Requests with tools through the whole platform, on the demo model, by the unmodified `openai` client.

The demo model is small and seldom calls by itself, so what it says of its own accord is only compared: whole and
streamed, with tools and without.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from bench.support.platform_process import PlatformProcess, running_platform
from tests.integration.replica_processes import kill_replica
from tests.integration.sizes import full

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{port: {port}}}
pools:
- {{name: demo, model: demo, served_names: [demo], replicas: 2, engine: {{exact: true}}}}
"""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
CITIES = ("Rome", "Bern", "Lima")


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        yield running


def asked(city: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is the weather in {city}?"}


def called(city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{city}", "type": "function", "function": function}],
    }


def result(city: str, weather: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{city}", "content": weather}


def ask(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    given: Any = {"model": "demo", "tools": [TOOL], "temperature": 0, "max_tokens": 48, "messages": messages} | fields
    return client.chat.completions.create(**given)


def streamed(client: openai.OpenAI, messages: list[Any]) -> tuple[str, str]:
    """Content and arguments of a streamed answer."""
    content = arguments = ""
    for chunk in ask(client, messages, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            arguments += "".join(call.function.arguments for call in choice.delta.tool_calls or ())
    return content, arguments


@pytest.mark.parametrize("city", CITIES)
def test_an_answer_with_tools_is_the_same_whole_and_streamed(client: openai.OpenAI, city: str) -> None:
    message = ask(client, [asked(city)]).choices[0].message
    whole = message.content or "", "".join(call.function.arguments for call in message.tool_calls or ())

    assert whole == streamed(client, [asked(city)])
    assert any(whole)


def test_tools_calls_and_results_are_part_of_the_prompt(client: openai.OpenAI) -> None:
    turns = [asked("Rome"), called("Rome"), result("Rome", "25 degrees and sun")]
    without, with_tools, with_result = (
        ask(client, messages, tools=tools).usage.prompt_tokens
        for messages, tools in ((turns[:1], None), (turns[:1], [TOOL]), (turns, [TOOL]))
    )

    assert without < with_tools < with_result


def test_the_result_of_a_call_is_used_in_the_answer(client: openai.OpenAI) -> None:
    answer = ask(client, [asked("Rome"), called("Rome"), result("Rome", "25 degrees and sun")], tools=None)

    assert "25 degrees" in answer.choices[0].message.content


def test_with_the_choice_none_there_is_text_alone(client: openai.OpenAI) -> None:
    choice = ask(client, [asked("Rome")], tool_choice="none").choices[0]
    plain = ask(client, [asked("Rome")], tools=None).choices[0]

    assert choice.message.tool_calls is None
    assert choice.message.content == plain.message.content != ""


# --- calls that a request demands

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "book_table": {
        "type": "object",
        "properties": {
            "restaurant": {"type": "string", "maxLength": 20},
            "guests": {"type": "integer", "minimum": 1, "maximum": 12},
            "outside": {"type": "boolean"},
            "when": {
                "type": "object",
                "properties": {
                    "day": {"enum": ["Friday", "Saturday", "Sunday"]},
                    "time": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
                },
                "required": ["day", "time"],
                "additionalProperties": False,
            },
        },
        "required": ["restaurant", "guests", "when"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
BOOKING = TOOLS[1]
QUESTIONS = ("What is the weather in Rome?", "A table for four, please.", "Hello!", "Write a poem about the sea.")
ASKED = [
    (question, temperature)
    for number, question in enumerate(QUESTIONS)
    for temperature in range(2)
    if (number + temperature) % full(1, 2) == 0
]


def check(call: Any) -> None:
    """Raises unless the call is of a function of ours, with arguments that its schema accepts."""
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize(("question", "temperature"), ASKED)
def test_a_demanded_call_always_parses_and_its_arguments_are_as_declared(
    client: openai.OpenAI, question: str, temperature: int
) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": question}],
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=temperature,
        seed=11,
        n=4,
        max_tokens=400,
    )

    for choice in answer.choices:
        assert choice.message.tool_calls, choice.message.content
        (call,) = choice.message.tool_calls
        check(call)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_a_named_function_is_called_whatever_the_question(client: openai.OpenAI, name: str) -> None:
    answer = ask(
        client,
        [{"role": "user", "content": "Hello!"}],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": name}},
        max_tokens=400,
    )
    choice = answer.choices[0]

    (call,) = choice.message.tool_calls
    assert call.function.name == name
    check(call)


def test_a_streamed_demanded_call_is_the_whole_one(client: openai.OpenAI) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"seed": 3, "temperature": 1, "max_tokens": 400}
    messages: Any = [{"role": "user", "content": "A table for four, please."}]
    whole = ask(client, messages, **fields).choices[0].message.tool_calls[0]
    with client.chat.completions.stream(model="demo", messages=messages, **fields) as stream:
        final: Any = stream.get_final_completion()

    (call,) = final.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == (whole.function.name, whole.function.arguments)
    check(call)


@pytest.mark.parametrize("city", CITIES)
def test_the_result_of_a_demanded_call_is_used_in_the_next_turn(client: openai.OpenAI, city: str) -> None:
    first = ask(client, [asked(city)], tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = first.message.tool_calls
    told = {"role": "tool", "tool_call_id": call.id, "content": "25 degrees and sun"}
    second = ask(client, [asked(city), first.message, told], tool_choice="none").choices[0]

    assert (call.function.name, set(json.loads(call.function.arguments))) == ("get_weather", {"city"})
    assert "25 degrees" in second.message.content


def test_all_calls_of_an_answer_that_may_have_several_are_as_declared(client: openai.OpenAI) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "temperature": 1, "seed": 2}
    choice = ask(client, [asked("Rome")], **fields).choices[0]

    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        check(call)


def test_beside_tools_an_answer_keeps_to_its_schema_or_is_calls(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "mood", "schema": schema}}
    for seed in range(4):
        fields: Any = {"tools": TOOLS, "parallel_tool_calls": False, "response_format": wanted}
        fields |= {"max_tokens": 400, "temperature": 1, "seed": seed}
        choice = ask(client, [asked("Rome")], **fields).choices[0]

        for call in choice.message.tool_calls or ():
            check(call)
        if choice.message.content is not None:
            jsonschema.validate(json.loads(choice.message.content), schema)
        assert choice.message.tool_calls or choice.message.content


def arguments(platform: PlatformProcess, client: openai.OpenAI, *, is_disturbed: bool) -> list[str]:
    """The parts of a seeded call's arguments; disturbed: the replica is killed behind some of them."""
    parts: list[str] = []
    with client.chat.completions.with_streaming_response.create(
        model="demo",
        messages=[asked("Rome")],
        tools=[BOOKING],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=5,
        max_tokens=300,
        stream=True,
    ) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    parts.append(call["function"]["arguments"])
            if is_disturbed and len(parts) > 5:
                kill_replica(platform, response.headers["x-penstock-replica"])
                is_disturbed = False
    assert not is_disturbed
    return parts


def test_a_seeded_call_is_the_same_after_its_replica_was_killed(
    platform: PlatformProcess, client: openai.OpenAI
) -> None:
    expected = "".join(arguments(platform, client, is_disturbed=False))

    found = "".join(arguments(platform, client, is_disturbed=True))

    assert platform.metric("penstock_route_attempts_total", reason="resume") == 1
    assert found == expected
    jsonschema.validate(json.loads(expected), SCHEMAS["book_table"])
