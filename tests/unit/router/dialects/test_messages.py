"""Requests of Anthropic's Messages API as chat requests."""

from typing import Any

import msgspec
import pytest

from penstock.router.dialects.messages import chat_of_messages, chat_to_count
from penstock.wire.bodies import decode_count_tokens, decode_messages
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatMessageIn, ChatRequest, NamedToolChoice
from tests.unit.router.dialects.events import ASKED, TOOL

CALL: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "25 degrees"}
THOUGHT: dict[str, Any] = {"type": "thinking", "thinking": "hm", "signature": "s"}


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 5, "messages": ASKED, **fields}
    return chat_of_messages(decode_messages(msgspec.json.encode(body)))


def refusal(**fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value.message


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def shown(message: ChatMessageIn) -> tuple[str, str]:
    content = message.content
    return message.role, content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


def test_what_is_sampled_and_where_it_stops_is_the_chats() -> None:
    request = chat(stop_sequences=["x"], temperature=0.5, top_p=0.25, top_k=3, seed=7, priority=1, cache_salt="s")

    assert (request.max_tokens, request.stop, request.temperature, request.top_p, request.top_k) == (
        *(5, ["x"], 0.5),
        *(0.25, 3),
    )
    assert (request.seed, request.priority, request.cache_salt) == (7, 1, "s")
    assert chat(stop_sequences=[]).stop is None


@pytest.mark.parametrize("system", ["Be brief.", [text("Be "), text("brief.")]])
def test_a_system_prompt_is_the_first_message(system: Any) -> None:
    assert [shown(message) for message in chat(system=system).messages] == [
        ("system", "Be brief."),
        ("user", "Rome and Bern?"),
    ]


def test_results_are_messages_of_their_own_and_all_keeps_its_order() -> None:
    turns = [
        *ASKED,
        {"role": "assistant", "content": [THOUGHT, text("I look."), CALL]},
        {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "b", "content": [text("c")]}, text("So?")]},
    ]
    messages = chat(messages=turns).messages

    assert [shown(message) for message in messages] == [
        ("user", "Rome and Bern?"),
        ("assistant", "I look."),
        ("tool", "25 degrees"),
        ("tool", "c"),
        ("user", "So?"),
    ]
    (call,) = messages[1].tool_calls or ()
    assert call.function is not None
    assert (call.id, call.function.name, call.function.arguments) == ("toolu_1", "get_weather", '{"city":"Rome"}')
    assert [message.tool_call_id for message in messages] == [None, None, "toolu_1", "b", None]


@pytest.mark.parametrize("content", ["no such city", [text("no such city")]])
def test_a_failed_call_says_so_to_the_model(content: Any) -> None:
    turns = [*ASKED, {"role": "assistant", "content": [CALL]}]
    failed = {**RESULT, "content": content, "is_error": True}
    messages = chat(messages=[*turns, {"role": "user", "content": [failed]}]).messages

    assert shown(messages[-1]) == ("tool", "Error: no such city")


def test_an_answer_goes_on_with_the_assistants_last_message() -> None:
    turns = [*ASKED, {"role": "assistant", "content": "In Rome"}]

    assert chat(messages=turns).continue_final_message is True
    assert chat().continue_final_message is None
    assert "must follow" in refusal(messages=[*ASKED, {"role": "assistant", "content": [CALL]}])


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none"), (None, None)],
)
def test_a_tool_choice_is_the_chats(given: Any, expected: str | None) -> None:
    assert chat(tools=[TOOL], tool_choice=given).tool_choice == expected


def test_a_named_tool_and_one_call_at_most_are_the_chats() -> None:
    wish = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    request = chat(tools=[{**TOOL, "type": "custom"}], tool_choice=wish)

    assert isinstance(request.tool_choice, NamedToolChoice)
    assert request.tool_choice.function is not None
    assert (request.tool_choice.function.name, request.parallel_tool_calls) == ("get_weather", False)
    (tool,) = request.tools or ()
    assert tool.function is not None
    assert msgspec.json.decode(tool.function.parameters) == TOOL["input_schema"]


def test_a_schema_of_the_answer_is_the_chats() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    wanted = chat(output_config={"format": form}).response_format

    assert wanted is not None
    assert wanted.json_schema is not None
    assert bytes(wanted.json_schema.schema) == b'{"type":"object"}'


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "Blocks of type 'image' are not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "needs a 'text'"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "Blocks of type 'tool_use' are not supported"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}, *ASKED]}, "Blocks of type 'tool_result' are not"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "needs its 'tool_use_id'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, *ASKED]}, "needs its 'id'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "run on Anthropic's servers"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs the tool's 'name'"),
        ({"max_tokens": None}, "'max_tokens'"),
        ({"temperature": 3}, "'temperature'"),
        ({"n": 2}, "'n' belongs to /v1/chat/completions"),
        ({"max_token": 2}, "did you mean 'max_tokens'?"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "is_eror": True}]}]}, "did you mean 'is_error'?"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**fields)


def test_a_counted_conversation_has_the_same_prompt() -> None:
    fields: dict[str, Any] = {"model": "m", "messages": ASKED, "system": "s", "tools": [TOOL]}
    counted = chat_to_count(decode_count_tokens(msgspec.json.encode(fields)))
    answered = chat(**fields)

    assert (counted.messages, counted.tools) == (answered.messages, answered.tools)
