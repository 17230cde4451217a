"""Requests of OpenAI's Responses API as chat requests."""

from typing import Any

import msgspec
import pytest

from penstock.router.dialects.responses import chat_of_responses, repeated
from penstock.wire.bodies import decode_responses
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatRequest, NamedToolChoice
from penstock.wire.responses import ResponsesRequest
from tests.unit.router.dialects.events import ASKED, FUNCTION

CALL: dict[str, Any] = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": '{"city": "Rome"}'}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "a", "output": "25 degrees"}


def read(**fields: Any) -> ResponsesRequest:
    return decode_responses(msgspec.json.encode({"model": "m", "input": "Hi", **fields}))


def chat(**fields: Any) -> ChatRequest:
    return chat_of_responses(read(**fields))


def refusal(**fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value.message


def test_a_text_is_the_users_and_instructions_stand_before_it() -> None:
    messages = chat(instructions="Be brief.").messages

    assert [(message.role, message.content) for message in messages] == [("system", "Be brief."), ("user", "Hi")]


def test_what_is_sampled_is_the_chats() -> None:
    request = chat(max_output_tokens=5, temperature=0.5, top_p=0.25, seed=7, priority=1, cache_salt="s", stream=True)

    assert (request.max_tokens, request.temperature, request.top_p, request.stream) == (5, 0.5, 0.25, True)
    assert (request.seed, request.priority, request.cache_salt) == (7, 1, "s")


def test_calls_that_follow_each_other_are_of_the_message_before_them() -> None:
    said = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    }
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    messages = chat(input=[*ASKED, thought, said, CALL, {**CALL, "call_id": "b"}, RESULT, {**RESULT, "call_id": "b"}])

    roles = [message.role for message in messages.messages]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert [call.id for call in messages.messages[1].tool_calls or ()] == ["a", "b"]
    assert [message.tool_call_id for message in messages.messages[2:]] == ["a", "b"]


def test_a_call_without_a_text_is_a_message_of_its_own() -> None:
    messages = chat(input=[*ASKED, CALL, RESULT]).messages

    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    assert messages[1].content is None


def test_tools_and_their_choice_are_the_chats() -> None:
    request = chat(tools=[FUNCTION], tool_choice={"type": "function", "name": "get_weather"}, parallel_tool_calls=False)

    (tool,) = request.tools or ()
    assert tool.function is not None
    assert (tool.function.name, tool.function.strict) == ("get_weather", True)
    assert isinstance(request.tool_choice, NamedToolChoice)
    assert request.parallel_tool_calls is False
    assert chat(tools=[FUNCTION], tool_choice="required").tool_choice == "required"


def test_the_form_of_the_text_is_the_chats() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    wanted = chat(text={"format": form}).response_format

    assert wanted is not None
    assert wanted.json_schema is not None
    assert (wanted.json_schema.name, bytes(wanted.json_schema.schema)) == ("n", b'{"type":"object"}')
    assert chat(text={"format": {"type": "text"}}).response_format is not None
    assert chat(text={}).response_format is None


def test_an_answer_repeats_what_its_request_says() -> None:
    said = repeated(read(tools=[FUNCTION], metadata={"a": "b"}, temperature=0.5, instructions="i"))

    assert msgspec.json.decode(msgspec.json.encode(said.tools)) == [FUNCTION]
    assert (said.metadata, said.temperature, said.top_p, said.instructions) == ({"a": "b"}, 0.5, 1.0, "i")
    assert msgspec.json.encode(repeated(read()).text) == b'{"format":{"type":"text"}}'


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"previous_response_id": "resp_1"}, "Nothing is kept between requests"),
        ({"background": True}, "Answers in the background are not supported"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "nothing is kept here"),
        ({"input": [{"type": "computer_call"}]}, "Items of type 'computer_call' are not supported"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "'input' has nothing to answer"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "Parts of type 'input_image' are not"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "needs a 'text'"),
        ({"input": [{"content": "x"}]}, "needs a 'role'"),
        ({"input": [{"role": "user"}]}, "needs a 'content'"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "needs its 'call_id'"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "needs its 'call_id'"),
        ({"input": [*ASKED, *[CALL] * 129]}, "More than 128 calls"),
        ({"tools": [{"type": "web_search"}]}, "Tools of type 'web_search' run on"),
        ({"tools": [{"type": "function"}]}, "needs a 'name'"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}, "of type 'allowed_tools' is not supported"),
        ({"text": {"format": {"type": "json_schema"}}}, "needs a 'name' and a 'schema'"),
        ({"max_tokens": 5}, "'max_tokens' belongs to /v1/chat/completions"),
        ({"instruction": "x"}, "did you mean 'instructions'?"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**fields)
