"""/v1/messages and /v1/responses through the whole platform, on the demo model, by the unmodified `anthropic` and
`openai` clients: whole and streamed, with tool calls that a request demands, and what a tenant is charged."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from bench.support.platform_process import PlatformProcess, running_platform

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{port: {port}}}
pools:
  - name: demo
    served_names: [demo]
    engine: {{kv_memory_bytes: 100_000_000, max_num_seqs: 16, threads: 1}}
"""
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "get_weather", "description": "The weather in a city now", "input_schema": PARAMETERS}
FUNCTION: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city now",
    "parameters": PARAMETERS,
    "strict": True,
}
COLD = {"temperature": 0}
"""What Anthropic's client no longer names in its own arguments."""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        yield running


@pytest.fixture
def claude(platform: PlatformProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=platform.url, api_key=platform.key, max_retries=0, timeout=120) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_the_same_question_gets_the_same_text_by_every_api_whole_and_streamed(
    claude: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    chat = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=12, temperature=0)
    asked: Any = {"model": "demo", "messages": QUESTION, "max_tokens": 12, "extra_body": COLD}
    message = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed = "".join(stream.text_stream)
    wanted: Any = {"model": "demo", "input": QUESTION, "max_output_tokens": 12, "temperature": 0}
    response = client.responses.create(**wanted)
    with client.responses.stream(**wanted) as events:
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")

    text = chat.choices[0].message.content
    assert text
    assert [text_of(message), streamed, response.output_text, deltas] == [text] * 4
    assert chat.usage is not None
    assert response.usage is not None
    read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert (read, response.usage.input_tokens) == (chat.usage.prompt_tokens, chat.usage.prompt_tokens)
    assert claude.messages.count_tokens(model="demo", messages=QUESTION).input_tokens == read


def test_a_demanded_call_is_read_by_anthropics_client_and_its_result_is_used(claude: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": "demo",
        "tools": [TOOL],
        "extra_body": COLD,
        "max_tokens": 96,
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    }
    wish: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    whole = claude.messages.create(**asked, tool_choice=wish)
    with claude.messages.stream(**asked, tool_choice=wish) as stream:
        streamed = stream.get_final_message()
    (call,) = [block for block in whole.content if block.type == "tool_use"]
    (same,) = [block for block in streamed.content if block.type == "tool_use"]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "25 degrees and sun"}
    turns: Any = [
        *asked["messages"],
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(**{**asked, "messages": turns, "tools": []})

    jsonschema.validate(call.input, PARAMETERS)
    assert (whole.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
    assert same.input == call.input
    assert "25 degrees" in text_of(second)


def test_a_demanded_call_is_read_by_openais_client_and_its_result_is_used(client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    given: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 96}
    wish: Any = {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.responses.create(input=asked, **given, **wish)
    with client.responses.stream(input=asked, **given, **wish) as stream:
        streamed = stream.get_final_response()
    (call,) = [item for item in whole.output if item.type == "function_call"]
    (same,) = [item for item in streamed.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "25 degrees and sun"}
    sent: Any = [*asked, *[item.model_dump() for item in whole.output], result]
    second = client.responses.create(input=sent, **given)

    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    assert same.arguments == call.arguments
    assert "25 degrees" in second.output_text


def test_a_schema_is_kept_to_by_both(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    message = claude.messages.create(
        model="demo", messages=QUESTION, max_tokens=96, extra_body={"output_config": config, "seed": 3}
    )
    form: Any = {"format": {"type": "json_schema", "name": "city", "schema": PARAMETERS, "strict": True}}
    response = client.responses.create(
        model="demo", input=QUESTION, max_output_tokens=96, text=form, extra_body={"seed": 3}
    )

    jsonschema.validate(json.loads(text_of(message)), PARAMETERS)
    assert response.output_text == text_of(message)
