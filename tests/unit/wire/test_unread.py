import contextlib
import time
import tracemalloc

import msgspec
import pytest

from penstock.wire.bodies import decode_chat, decode_completion
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatRequest, CompletionRequest
from penstock.wire.unread import MAX_NAME_CHARS, MAX_NAMED, OTHER, IgnoredField, check_strictly, header_value
from tests.real_time import real_time

USER = {"role": "user", "content": "Hi"}


def chat(**fields: object) -> tuple[ChatRequest, list[IgnoredField]]:
    ignored: list[IgnoredField] = []
    return decode_chat(msgspec.json.encode({"model": "m", "messages": [USER], **fields}), ignored), ignored


def completion(**fields: object) -> tuple[CompletionRequest, list[IgnoredField]]:
    ignored: list[IgnoredField] = []
    return decode_completion(msgspec.json.encode({"model": "m", "prompt": "Hi", **fields}), ignored), ignored


def refusal(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value


def named(ignored: list[IgnoredField]) -> str:
    return header_value(ignored).decode()


def test_a_body_of_declared_members_has_nothing_ignored() -> None:
    request, ignored = chat(temperature=0.5, stream=True, stream_options={"include_usage": True})

    assert (request.temperature, ignored) == (0.5, [])


def test_harmless_and_unknown_members_are_taken_and_named_in_their_order() -> None:
    request, ignored = chat(user="u", foo=1, temperature=0.5, metadata={"a": [1]}, bar=None, seed=3)

    assert (request.temperature, request.seed) == (0.5, 3)
    assert named(ignored) == "user, foo, metadata, bar"
    assert [field.label for field in ignored] == ["user", OTHER, "metadata", OTHER]


def test_members_of_messages_parts_and_options_are_taken_likewise_each_named_once() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "x"}}, {"type": "text", "text": "b", "z": 1}]
    messages = [
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": "c", "name": "you", "weight": 1},
    ]
    request, ignored = chat(messages=messages, stream=True, stream_options={"include_obfuscation": True, "y": 1})

    assert [message.role for message in request.messages] == ["user", "assistant"]
    assert named(ignored).split(", ") == [
        "stream_options.include_obfuscation",
        "stream_options.y",
        "messages.name",
        "messages.content.cache_control",
        "messages.content.z",
        "messages.weight",
    ]
    assert [field.is_known for field in ignored] == [True, False, True, True, False, False]


def test_members_of_nested_objects_are_taken_and_named_in_their_order() -> None:
    wanted = {"z": 1, "type": "json_schema", "json_schema": {"name": "n", "schema": {"own": 1}, "y": 1}}
    ignored = chat(response_format=wanted, structured_outputs={"x": 1, "disable_fallback": True})[1]

    assert named(ignored).split(", ") == [
        "response_format.z",
        "response_format.json_schema.y",
        "structured_outputs.x",
        "structured_outputs.disable_fallback",
    ]
    assert [field.is_known for field in ignored] == [False, False, False, True]


def test_members_of_a_prediction_and_its_parts_are_taken_likewise() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]
    request, ignored = chat(prediction={"type": "content", "content": parts, "z": 1})

    assert request.prediction is not None
    assert named(ignored) == "prediction.z, messages.content.cache_control"
    assert refusal(prediction={"type": "content", "content": "a", "contnt": "b"}).param == "prediction.contnt"


def test_a_name_with_a_dot_is_not_looked_into() -> None:
    assert chat(**{"response_format.json_schema": {"strct": 1}})[1] == [
        IgnoredField("response_format.json_schema", is_known=False, can_be_named=False)
    ]


def test_members_of_tools_calls_and_a_choice_are_taken_likewise() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", "q": 1}, "index": 0}
    tool = {"type": "function", "function": {"name": "f", "q": 1}, "cache_control": {"type": "x"}}
    choice = {"type": "function", "function": {"name": "f", "q": 1}, "q": 1}
    messages = [USER, {"role": "assistant", "tool_calls": [call, call], "foo": 1}]
    request, ignored = chat(messages=messages, tools=[tool], tool_choice=choice)

    assert request.tools is not None
    assert request.tools[0].function is not None
    assert request.tools[0].function.name == "f"
    assert named(ignored).split(", ") == [
        "tool_choice.q",
        "tool_choice.function.q",
        "messages.foo",
        "messages.tool_calls.index",
        "messages.tool_calls.function.q",
        "tools.cache_control",
        "tools.function.q",
    ]
    assert [field.is_known for field in ignored] == [False, False, False, True, False, True, False]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].custom"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice.allowed_tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]}, "tools[0].function.paramters"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "argument": ""}}]}
                ]
            },
            "messages[0].tool_calls[0].function.argument",
        ),
    ],
)
def test_refused_and_misspelled_members_of_tools_are_named_with_their_place(
    fields: dict[str, object], param: str
) -> None:
    assert refusal(**fields).param == param


def test_null_is_the_same_as_leaving_a_known_field_out() -> None:
    assert chat(user=None, tools=None)[1] == []


@pytest.mark.parametrize(
    "name", ["a b", "a\r\nx: y", "é", "1a", "a.b", "", "x" * (MAX_NAME_CHARS + 1), "messages.name"]
)
def test_a_name_that_is_no_plain_identifier_is_taken_but_not_named(name: str) -> None:
    ignored = chat(**{name: 1})[1]

    assert header_value(ignored) == b""
    assert [field.label for field in ignored] == [OTHER]


def test_no_more_than_so_many_are_named() -> None:
    ignored = chat(**{f"x{number}": 1 for number in range(40)}, user="u")[1]

    assert named(ignored).split(", ") == [f"x{number}" for number in range(MAX_NAMED)]


def test_strictly_the_first_unknown_member_is_refused_and_harmless_ones_are_not() -> None:
    check_strictly(chat(user="u", messages=[{**USER, "name": "x"}])[1])
    with pytest.raises(InvalidRequest, match=r"argument supplied: messages\.foo") as caught:
        check_strictly(chat(messages=[{**USER, "foo": 1}], user="u")[1])

    assert caught.value.param == "messages.foo"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_token": 5}, "Unrecognized request argument supplied: max_token; did you mean 'max_tokens'?"),
        ({"temprature": 0}, "Unrecognized request argument supplied: temprature; did you mean 'temperature'?"),
        ({"stop_sequences": ["a"]}, "Unrecognized request argument supplied: stop_sequences; did you mean 'stop'?"),
        (
            {"messages": [USER, {**USER, "tool_call": 1}]},
            "Unrecognized request argument supplied: messages[1].tool_call; did you mean 'tool_calls'?",
        ),
        ({"messages": [{**USER, "prefix": True}]}, None),
        ({"web_search_options": {}}, "Web search is not supported; leave out 'web_search_options'."),
        ({"prompt": "x"}, "'prompt' belongs to /v1/completions; leave out 'prompt'."),
    ],
)
def test_what_was_probably_meant_otherwise_is_refused(fields: dict[str, object], message: str | None) -> None:
    found = refusal(**fields).message

    assert message is None or found == message


def test_a_field_of_the_other_endpoint_is_refused_unless_it_is_harmless_or_asks_for_nothing() -> None:
    assert named(completion(metadata={}, store=True)[1]) == "metadata, store"
    assert completion(tools=[])[1] == []
    with pytest.raises(InvalidRequest, match="'max_completion_tokens' belongs to /v1/chat/completions"):
        completion(max_completion_tokens=5)


def test_a_wrong_type_beside_an_unknown_field_is_still_named() -> None:
    assert refusal(foo=1, temperature="hot").param == "temperature"
    assert refusal(foo=1, messages=[{"role": "user", "content": 5, "bar": 1}]).param == "messages[0].content"


@pytest.mark.parametrize("value", [b"1", b'"x"', b"[[[[1]]]]", b'{"a":{"b":[]}}'])
def test_ten_thousand_unknown_names_cost_milliseconds_and_a_small_multiple_of_the_body(value: bytes) -> None:
    names = b",".join(b'"field_of_nobody_%d":%s' % (number, value) for number in range(10_000))
    body = b'{"model":"m","messages":[{"role":"user","content":"Hi"}],' + names + b"}"
    ignored: list[IgnoredField] = []
    began = time.process_time()
    decode_chat(body, ignored)
    seconds = time.process_time() - began
    tracemalloc.start()
    try:
        decode_chat(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(ignored) == MAX_NAMED
    assert seconds < 0.1
    assert peak < 12 * len(body)


@real_time
def test_messages_with_ten_thousand_unknown_names_are_as_cheap() -> None:
    members = ",".join(f'"field_{number}":{{}}' for number in range(10))
    messages = ",".join(f'{{"role":"user","content":"a",{members}}}' for _ in range(1_000))
    body = f'{{"model":"m","messages":[{messages}]}}'.encode()
    ignored: list[IgnoredField] = []
    began = time.process_time()
    decode_chat(body, ignored)
    seconds = time.process_time() - began

    assert [field.path for field in ignored] == [f"messages.field_{number}" for number in range(10)]
    assert seconds < 0.2


def test_skipped_json_that_is_malformed_is_refused_or_taken_and_never_an_error_of_ours() -> None:
    for body in (
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"x":"\\ud800"}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"x":"\xff"}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"\xff":1}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"x":nul}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"tools":"\\ud800"}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"x":' + b"[" * 100_000,
    ):
        with contextlib.suppress(InvalidRequest):
            decode_chat(body)


def test_a_lenient_request_is_an_instance_of_its_struct() -> None:
    request = chat(foo=1)[0]

    assert isinstance(request, ChatRequest)
    assert [(message.role, message.content) for message in request.messages] == [("user", "Hi")]
