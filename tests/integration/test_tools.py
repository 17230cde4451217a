"""Tool calls through the whole platform, on the demo model, by the unmodified `openai` client."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import psutil
import pytest

from bench.support.platform_process import PlatformProcess, running_platform

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
WEATHER = {"Paris": "18 degrees and rain", "Oslo": "3 degrees and snow"}
CITIES = ("Rome", "Bern", "Lima", "Cairo", "Tokyo", "Berlin")
RESULT = "25 degrees and sun"


class Conversation(NamedTuple):
    """A question, the call that it led to, and the answer that uses the call's result."""

    call: Any
    finish: str
    answer: str


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        yield running


@pytest.fixture
def client(platform: PlatformProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0, timeout=120) as client:
        yield client


def asked(city: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is the weather in {city}?"}


def turns() -> Iterator[dict[str, Any]]:
    """Turns as they were: question, call, result, answer. The demo model is small, so they show it how calls look."""
    for city, weather in WEATHER.items():
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        yield asked(city)
        yield {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"call_{city}", "type": "function", "function": function}],
        }
        yield {"role": "tool", "tool_call_id": f"call_{city}", "content": weather}
        yield {"role": "assistant", "content": f"In {city} there are {weather}."}


def ask(client: openai.OpenAI, messages: list[Any], *, is_stream: bool = False, **fields: Any) -> Any:
    """The one choice of an answer, whole or put together by the client from its stream."""
    given: Any = {"model": "demo", "tools": [TOOL], "temperature": 0, "max_tokens": 64, "messages": messages} | fields
    if not is_stream:
        return client.chat.completions.create(**given).choices[0]
    with client.chat.completions.stream(**given) as stream:
        return stream.get_final_completion().choices[0]


def converse(client: openai.OpenAI, city: str, *, is_stream: bool) -> Conversation:
    messages = [*turns(), asked(city)]
    first = ask(client, messages, is_stream=is_stream)
    assert first.message.tool_calls, first.message.content
    (call,) = first.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    second = ask(client, [*messages, first.message, result], is_stream=is_stream)
    return Conversation(call, first.finish_reason, second.message.content or "")


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("city", CITIES)
def test_a_call_is_read_and_its_result_is_used_in_the_next_turn(
    client: openai.OpenAI, city: str, is_stream: bool
) -> None:
    found = converse(client, city, is_stream=is_stream)

    assert (found.call.type, found.call.function.name) == ("function", "get_weather")
    assert json.loads(found.call.function.arguments) == {"city": city}
    assert found.finish == "tool_calls"
    assert "25 degrees" in found.answer


def test_with_the_choice_none_there_is_text_alone(client: openai.OpenAI) -> None:
    choice = ask(client, [asked("Rome")], tool_choice="none")
    plain = ask(client, [asked("Rome")], tools=None)

    assert (choice.message.tool_calls, choice.finish_reason in ("stop", "length")) == (None, True)
    assert choice.message.content == plain.message.content != ""


def test_each_of_several_choices_has_calls_with_ids_of_their_own(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=[*turns(), asked("Rome")], tools=[TOOL], temperature=0, max_tokens=64, n=3
    )
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or ()]

    assert [call.function.arguments for call in calls] == ['{"city": "Rome"}'] * 3
    assert len({call.id for call in calls}) == 3


def kill(platform: PlatformProcess, replica_id: str) -> None:
    """Serve names a replica's log after its id."""
    (pid,) = [
        pid for pid in platform.replicas if any(replica_id in file.path for file in psutil.Process(pid).open_files())
    ]
    os.kill(pid, signal.SIGKILL)


def arguments(platform: PlatformProcess, client: openai.OpenAI, *, is_disturbed: bool) -> list[str]:
    """The parts of a seeded call's arguments; disturbed: the replica is killed behind the first of them."""
    parts: list[str] = []
    with client.chat.completions.with_streaming_response.create(
        model="demo", messages=[*turns(), asked("Rome")], tools=[TOOL], seed=5, max_tokens=64, stream=True
    ) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    parts.append(call["function"]["arguments"])
            if is_disturbed and parts:
                kill(platform, response.headers["x-penstock-replica"])
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
    assert "city" in json.loads(expected)
