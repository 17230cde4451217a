"""Conversations as templates are given them, and our own text where a template shows no tools."""

import json
from typing import Any

import pytest

from penstock.text.tools.forms import OWN_FORM, ToolForm
from penstock.text.tools.parser import ToolParser
from penstock.text.tools.prompt import build_conversation, describe, has_tools, short_id
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatMessageIn, ContentPart, FunctionCallIn, ToolCallIn
from penstock.wire.tools import Function, RequestedTools, ToolChoice

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = RequestedTools((Function("get_weather", "Weather of a <city>", SCHEMA), Function("now", None, SCHEMA)))
HERMES = ToolForm("hermes", is_in_template=True)
LLAMA = ToolForm("llama3", is_in_template=True)
MISTRAL = ToolForm("mistral", is_in_template=True)


def message(role: Any, content: Any = None, **fields: Any) -> ChatMessageIn:
    return ChatMessageIn(role=role, content=content, **fields)


def call(call_id: str, name: str = "get_weather", arguments: str = '{"city": "Rome"}') -> ToolCallIn:
    return ToolCallIn(id=call_id, function=FunctionCallIn(name=name, arguments=arguments))


CHAT = [
    message("developer", "Be brief."),
    message("user", [ContentPart(type="text", text="Rome? "), ContentPart(type="text", text="Bern?")]),
    message("assistant", None, tool_calls=[call("a"), call("b", arguments='{"city": "Bern"}')]),
    message("tool", "21", tool_call_id="a"),
    message("tool", "9", tool_call_id="b"),
]


def test_a_template_gets_tools_and_calls_in_openais_form_with_arguments_as_objects() -> None:
    messages, options = build_conversation(CHAT, TOOLS, HERMES)

    assert options["tools"] == [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "Weather of a <city>", "parameters": SCHEMA},
        },
        {"type": "function", "function": {"name": "now", "parameters": SCHEMA}},
    ]
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome? Bern?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}},
                {"id": "b", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bern"}}},
            ],
        },
        {"role": "tool", "content": "21", "tool_call_id": "a", "name": "get_weather"},
        {"role": "tool", "content": "9", "tool_call_id": "b", "name": "get_weather"},
    ]


def test_without_tools_past_calls_are_still_told() -> None:
    messages, options = build_conversation(CHAT, None, HERMES)

    assert options == {}
    assert messages == build_conversation(CHAT, TOOLS, HERMES).messages


def test_a_template_that_refuses_a_second_call_gets_one_to_a_message_each_before_its_result() -> None:
    messages, _ = build_conversation([*CHAT, message("user", "And now?")], TOOLS, LLAMA)

    assert [(item["role"], item.get("tool_call_id"), item["content"]) for item in messages[2:]] == [
        ("assistant", None, ""),
        ("tool", "a", "21"),
        ("assistant", None, ""),
        ("tool", "b", "9"),
        ("user", None, "And now?"),
    ]
    ids: list[Any] = [item["tool_calls"] for item in messages if "tool_calls" in item]
    assert [[one["id"] for one in calls] for calls in ids] == [["a"], ["b"]]


def test_mistrals_ids_have_nine_letters_and_digits_the_same_in_call_and_result() -> None:
    long, fine = call("call_0123456789abcdef"), call("abcDEF123")
    messages, _ = build_conversation(
        [
            message("user", "x"),
            message("assistant", tool_calls=[long, fine]),
            message("tool", "1", tool_call_id=long.id),
            message("tool", "2", tool_call_id=fine.id),
        ],
        TOOLS,
        MISTRAL,
    )
    calls: Any = messages[1]["tool_calls"]

    assert [one["id"] for one in calls] == [short_id(long.id), "abcDEF123"]
    assert [item["tool_call_id"] for item in messages[2:]] == [short_id(long.id), "abcDEF123"]
    assert len(short_id(long.id)) == 9
    assert short_id(long.id).isalnum()


@pytest.mark.parametrize("arguments", ["[1]", "x", '"{}"', "{" * 70 + "}" * 70, '{"a":' * 70 + "1" + "}" * 70])
def test_arguments_that_are_no_object_are_refused_with_their_place(arguments: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_conversation([message("assistant", tool_calls=[call("a", arguments=arguments)])], None, HERMES)

    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_empty_arguments_are_an_empty_object() -> None:
    messages, _ = build_conversation([message("assistant", tool_calls=[call("a", arguments=" ")])], None, HERMES)
    calls: Any = messages[0]["tool_calls"]

    assert calls[0]["function"]["arguments"] == {}


def test_only_a_conversation_with_tools_needs_any_of_this() -> None:
    assert not has_tools([message("user", "x"), message("assistant", "y", tool_calls=[])], None)
    assert has_tools([message("user", "x")], TOOLS)
    assert has_tools(CHAT, None)
    assert has_tools([message("tool", "x", tool_call_id="a")], None)


# --- our own text


def test_our_text_is_in_the_system_message_and_calls_and_results_are_in_turns_of_both() -> None:
    messages, options = build_conversation([*CHAT, message("user", "Thanks.")], TOOLS, OWN_FORM)

    assert options == {}
    assert messages == [
        {"role": "system", "content": f"Be brief.\n\n{describe(TOOLS)}"},
        {"role": "user", "content": "Rome? Bern?"},
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\n21\n</tool_response>\n<tool_response>\n9\n</tool_response>\nThanks.",
        },
    ]


def test_our_text_makes_a_system_message_where_there_is_none() -> None:
    messages, _ = build_conversation([message("user", "x")], TOOLS, OWN_FORM)

    assert messages == [{"role": "system", "content": describe(TOOLS)}, {"role": "user", "content": "x"}]


def test_two_messages_of_the_user_stay_two() -> None:
    messages, _ = build_conversation([message("user", "x"), message("user", "y"), CHAT[3]], None, OWN_FORM)

    assert [item["content"] for item in messages] == ["x", "y", "<tool_response>\n21\n</tool_response>"]


def test_our_text_shows_each_function_as_a_line_of_json() -> None:
    text = describe(TOOLS)

    lines = text.split("<tools>\n", 1)[1].split("\n</tools>", 1)[0].splitlines()
    assert [json.loads(line)["function"]["name"] for line in lines] == ["get_weather", "now"]
    assert "Weather of a <city>" in text


@pytest.mark.parametrize(
    ("choice", "is_parallel", "words"),
    [
        (ToolChoice(), True, "You may call one or more functions"),
        (ToolChoice(), False, "You may call one function"),
        (ToolChoice(True), True, "Call at least one function."),
        (ToolChoice(True), False, "Call exactly one function."),
        (ToolChoice(True, "now"), True, "Call the function now."),
    ],
)
def test_our_text_says_what_is_wanted(choice: ToolChoice, is_parallel: bool, words: str) -> None:
    assert words in describe(RequestedTools(TOOLS.functions, choice, is_parallel))


def test_the_example_in_our_text_is_in_the_format_that_its_answers_are_read_in() -> None:
    text = describe(TOOLS)
    answer = text[text.rindex("<tool_call>\n") :].replace("<function-name>", '"f"').replace("<args-json-object>", "{}")
    parser = ToolParser(OWN_FORM.call_format, frozenset({"f"}), holds_calls=True)

    events = parser.push(answer) + parser.finish()

    assert [type(event).__name__ for event in events] == ["CallBegin", "CallArguments", "CallEnd"]
