import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.bodies import decode_chat
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatRequest
from penstock.wire.support import check
from penstock.wire.tools import (
    MAX_DEPTH,
    MAX_PARAMETERS_BYTES,
    NO_PARAMETERS,
    Function,
    RequestedTools,
    ToolChoice,
    read_tools,
)

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}


def chat(**fields: object) -> ChatRequest:
    return decode_chat(msgspec.json.encode({"model": "m", "messages": [USER], **fields}))


def nested(depth: int) -> object:
    """Arrays in each other, with an object around them: `depth` of them in all."""
    value: object = 1
    for _ in range(depth - 1):
        value = [value]
    return {"x": value}


def refusal(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_tools(chat(**fields))
    return caught.value


def test_tools_are_read_with_their_parameters() -> None:
    tools = read_tools(chat(tools=[WEATHER, {"type": "function", "function": {"name": "now", "strict": True}}]))

    assert tools is not None
    assert tools.functions == (Function("get_weather", "d", SCHEMA), Function("now", None, NO_PARAMETERS))
    assert (tools.choice, tools.is_parallel, tools.names) == (ToolChoice(), True, {"get_weather", "now"})
    assert tools.num_chars > len("get_weather") + len(msgspec.json.encode(SCHEMA))


@pytest.mark.parametrize("fields", [{}, {"tools": None}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_that_may_be_called_there_are_none(fields: dict[str, object]) -> None:
    assert read_tools(chat(**fields)) is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("required", ToolChoice(True)),
        (NAMED, ToolChoice(True, "get_weather")),
    ],
)
def test_the_choice_is_read(choice: object, expected: ToolChoice) -> None:
    request = chat(tools=[WEATHER], tool_choice=choice)
    tools = read_tools(request)

    assert tools is not None
    assert tools.choice == expected


@pytest.mark.parametrize(("value", "expected"), [(None, True), (True, True), (False, False)])
def test_parallel_calls_are_allowed_unless_refused(value: bool | None, expected: bool) -> None:
    tools = read_tools(chat(tools=[WEATHER], parallel_tool_calls=value))

    assert isinstance(tools, RequestedTools)
    assert tools.is_parallel is expected


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "Tools of type 'custom' are not supported"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "needs a 'function'"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "Two tools are named 'get_weather'"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "letters, digits, underscores, dots and dashes",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a\n"}}]},
            "tools[0].function.name",
            "letters, digits",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]},
            "tools[0].function.parameters",
            "must hold a JSON object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": nested(MAX_DEPTH + 1)}}]},
            "tools[0].function.parameters",
            f"nested more than {MAX_DEPTH} deep",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": name, "parameters": {"x": "y" * (MAX_PARAMETERS_BYTES // 2)}},
                    }
                    for name in "ab"
                ]
            },
            "tools",
            f"more than {MAX_PARAMETERS_BYTES} bytes together",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice", "needs 'tools'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "'allowed_tools'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.type", "with the function's name"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            "'x', which is not among the tools",
        ),
    ],
)
def test_what_is_no_tool_is_refused_with_its_place(fields: dict[str, object], param: str, words: str) -> None:
    error = refusal(**fields)

    assert error.param == param
    assert words in error.message


def test_what_is_nested_as_deep_as_is_allowed_is_read() -> None:
    tools = read_tools(chat(tools=[{"type": "function", "function": {"name": "a", "parameters": nested(MAX_DEPTH)}}]))

    assert tools is not None
    assert tools.functions[0].parameters == nested(MAX_DEPTH)


@pytest.mark.parametrize("fields", [{"tools": [WEATHER] * 129}, {"tools": "x"}, {"tool_choice": "any"}, {"tools": [1]}])
def test_what_is_of_another_type_is_refused_when_it_is_decoded(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="Invalid value for 'tool"):
        chat(**fields)


# --- messages


def test_calls_and_results_are_accepted() -> None:
    check(
        chat(
            messages=[
                USER,
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "21 °C"},
                {"role": "assistant", "content": "Warm.", "tool_calls": []},
            ]
        )
    )


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "tool_call_id": "a"}, "messages[0].content"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}, "messages[0].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].type"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
    ],
)
def test_calls_and_results_in_the_wrong_place_are_refused(message: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(chat(messages=[message]))

    assert caught.value.param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "function", "name", "parameters", "x"]), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(JSON, JSON, JSON)
def test_any_json_ends_in_tools_or_a_refusal(tools: object, choice: object, parallel: object) -> None:
    message, found = "Fine", None
    try:
        found = read_tools(chat(tools=tools, tool_choice=choice, parallel_tool_calls=parallel))
    except InvalidRequest as error:
        message = error.message

    assert message[0].isupper() or message[0] == "'"
    assert len(message) < 500
    assert found is None or found.functions


@pytest.mark.parametrize("depth", [500, 20_000])
def test_parameters_nested_beyond_reason_end_in_a_refusal(depth: int) -> None:
    function = b'{"name": "a", "parameters": {"x": ' + b"[" * depth + b"]" * depth + b"}}"
    body = msgspec.json.encode({"model": "m", "messages": [USER], "tools": [{"type": "function", "function": None}]})

    with pytest.raises(InvalidRequest, match="nested"):
        read_tools(decode_chat(body.replace(b"null", function)))
