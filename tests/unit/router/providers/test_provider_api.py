from typing import Any

import msgspec
import pytest

from penstock.router.config import ProviderConfig
from penstock.router.providers.provider_api import (
    CallNumbers,
    ProviderEvent,
    StreamBroken,
    encode_body,
    is_bound_to_tokens,
    is_understood,
    read_event,
    read_refusal,
    request_path,
)
from penstock.router.routing.request import CallDelta, ProviderRequest
from penstock.wire.bodies import decode_chat, decode_completion
from penstock.wire.errors import ContextTooLong, InvalidRequest, Overloaded
from penstock.wire.frames import Finish
from penstock.wire.openai import ChatRequest, CompletionRequest

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
FINE = {"name": "up", "base_url": "http://x/v1", "model": "large", "served_names": ["m"]}


def provider(**changes: object) -> ProviderConfig:
    return msgspec.convert(FINE | changes, ProviderConfig)


def chat(**fields: object) -> ChatRequest:
    return decode_chat(msgspec.json.encode({"model": "m", "messages": MESSAGES, **fields}))


def completion(**fields: object) -> CompletionRequest:
    return decode_completion(msgspec.json.encode({"model": "m", "prompt": "Once", **fields}))


def body(request: ChatRequest | CompletionRequest, prompt: int = 0, **changes: object) -> Any:
    return msgspec.json.decode(encode_body(ProviderRequest(request, prompt), provider(**changes), 32, 7))


def test_a_chat_goes_as_it_came_under_the_providers_model_name_and_as_a_stream() -> None:
    assert body(chat()) == {
        "model": "large",
        "messages": MESSAGES,
        "max_tokens": 32,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert request_path(ProviderRequest(chat())) == "/chat/completions"


def test_only_what_the_caller_set_is_sent() -> None:
    fields = {
        "temperature": 0.0,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "seed": 99,
        "stop": ["a", "b", "c", "d", "e"],
    }
    found = body(chat(user="somebody", metadata={"a": "b"}, n=3, **fields))

    assert {name: found[name] for name in fields} == fields | {"seed": 7, "stop": ["a", "b", "c", "d"]}
    assert found.keys() == {"model", "messages", "max_tokens", "stream", "stream_options", *fields}


def test_the_bound_of_an_answer_has_the_name_that_the_provider_gives_it() -> None:
    assert body(chat(), max_tokens_field="max_completion_tokens")["max_completion_tokens"] == 32
    assert body(completion(), max_tokens_field="max_completion_tokens")["max_tokens"] == 32


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "x-own": [1.50, None]},
        "strict": True,
    },
}
CALL = {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_tools_calls_and_results_go_as_they_came() -> None:
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "call_a"},
    ]
    choice = {"type": "function", "function": {"name": "f"}}

    found = body(chat(messages=turns, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False))

    assert found["messages"] == turns
    assert (found["tools"], found["tool_choice"], found["parallel_tool_calls"]) == ([TOOL], choice, False)
    assert body(chat(tools=[TOOL], tool_choice="required"))["tool_choice"] == "required"


def test_without_tools_no_field_of_theirs_is_sent() -> None:
    assert not body(chat(tools=[], tool_choice="auto", parallel_tool_calls=True)).keys() & {
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    }


def test_each_prompt_of_a_completion_is_a_request_of_its_own() -> None:
    assert [body(completion(prompt=["a", "b"]), prompt)["prompt"] for prompt in (0, 1)] == ["a", "b"]
    assert request_path(ProviderRequest(completion())) == "/completions"


@pytest.mark.parametrize(
    "request_",
    [
        chat(logprobs=True),
        chat(logit_bias={"5": 1.0}),
        chat(stop_token_ids=[5]),
        chat(return_token_ids=True),
        completion(logprobs=0),
        completion(prompt=[1, 2]),
        completion(prompt=[[1], [2]]),
    ],
)
def test_what_speaks_of_token_ids_is_bound_to_a_vocabulary(request_: ChatRequest | CompletionRequest) -> None:
    assert is_bound_to_tokens(request_)
    assert not is_understood(request_, provider())


@pytest.mark.parametrize("fields", [{"response_format": {"type": "text"}}, {"guided_json": None}])
@pytest.mark.parametrize("request_of", [chat, completion])
def test_a_form_that_any_text_has_is_not_sent(request_of: Any, fields: dict[str, Any]) -> None:
    request = request_of(**fields)

    assert is_understood(request, provider())
    assert body(request) == body(request_of())


def test_members_that_nobody_knows_do_not_reach_a_provider() -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}
    request = chat(response_format={**wanted, "json_schema": {**wanted["json_schema"], "colour": 1}, "hue": 2})

    assert body(request)["response_format"] == wanted


@pytest.mark.parametrize(
    "request_",
    [chat(), chat(logprobs=False, top_k=-1, min_p=0, ignore_eos=False, min_tokens=0), completion(prompt=["a"])],
)
def test_what_asks_for_nothing_special_is_understood(request_: ChatRequest | CompletionRequest) -> None:
    assert not is_bound_to_tokens(request_)
    assert is_understood(request_, provider())


def test_an_extension_is_understood_where_the_provider_is_said_to_know_it() -> None:
    assert not is_understood(chat(top_k=5), provider())
    assert is_understood(chat(top_k=5), provider(extra_fields=["top_k"]))
    assert not is_understood(chat(top_k=5, min_p=0.1), provider(extra_fields=["top_k"]))
    assert body(chat(top_k=5, min_p=0.0), extra_fields=["top_k"])["top_k"] == 5


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}', ProviderEvent()),
        (b'{"choices":[{"delta":{"content":"Hi"},"finish_reason":null}],"usage":null,"x":1}', ProviderEvent("Hi")),
        (b'{"choices":[{"text":"Hi","finish_reason":"stop"}]}', ProviderEvent("Hi", Finish.STOP)),
        (b'{"choices":[{"delta":{},"finish_reason":"length"}]}', ProviderEvent("", Finish.LENGTH)),
        (b'{"choices":[{"delta":{},"finish_reason":"content_filter"}]}', ProviderEvent("", Finish.STOP)),
        (b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}', ProviderEvent("", None, 3, 9)),
        (b'{"choices":[],"usage":{"prompt_tokens":-3,"completion_tokens":900000000000000000}}', ProviderEvent()),
    ],
)
def test_events_are_read(event: bytes, expected: ProviderEvent) -> None:
    assert read_event(event) == expected


CALL_EVENT = b"""{"choices":[{"delta":{"content":null,"tool_calls":[{"index":1,"id":"call_a","type":"function",
"function":{"name":"f","arguments":"{\\"a\\""}}]}}]}"""


@pytest.mark.parametrize(
    ("details", "expected"),
    [("null", None), ("{}", None), ('{"cached_tokens": 7}', 7), ('{"cached_tokens": -1}', None), ('"odd"', None)],
)
def test_tokens_in_the_provider_s_cache_are_read_where_it_tells_them_plausibly(
    details: str, expected: int | None
) -> None:
    usage = f'{{"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {details}}}'

    event = read_event(f'{{"choices": [], "usage": {usage}}}'.encode())

    assert (event.prompt_tokens, event.output_tokens, event.cached_tokens) == (9, 2, expected)


def test_parts_of_tool_calls_are_read() -> None:
    more = b'{"choices":[{"delta":{"tool_calls":[{"index":1,"function":{"arguments":": 1}"}},{"index":2}]}}]}'
    end = b'{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}'

    assert read_event(CALL_EVENT) == ProviderEvent(calls=(CallDelta(1, '{"a"', "call_a", "f"),))
    assert read_event(more).calls == (CallDelta(1, ": 1}"), CallDelta(2))
    assert read_event(end) == ProviderEvent("", Finish.STOP)


def test_calls_are_numbered_as_they_begin_and_named_once_whatever_the_provider_repeats() -> None:
    numbers = CallNumbers()

    first = numbers.renumber([CallDelta(5, "{", "a", "f"), CallDelta(5, "}", "a", "f"), CallDelta(5, "")])
    second = numbers.renumber([CallDelta(2, "{}", "b", "g")])
    same_number = numbers.renumber([CallDelta(2, "{}", "c", "h")])

    assert first == (CallDelta(0, "{", "a", "f"), CallDelta(0, "}"), CallDelta(0, ""))
    assert (second, same_number) == ((CallDelta(1, "{}", "b", "g"),), (CallDelta(2, "{}", "c", "h"),))


@pytest.mark.parametrize("call", [CallDelta(0, "{}"), CallDelta(0, "{}", "a"), CallDelta(0, "{}", None, "f")])
def test_a_call_without_a_beginning_breaks_the_stream(call: CallDelta) -> None:
    with pytest.raises(StreamBroken):
        CallNumbers().renumber([call])


@pytest.mark.parametrize("event", [b"nonsense", b'{"error":{"message":"x"}}', b"\xff", b'{"choices":5}'])
def test_an_event_that_is_none_breaks_the_stream(event: bytes) -> None:
    with pytest.raises(StreamBroken):
        read_event(event)


def test_the_callers_mistakes_are_told_and_say_nothing_of_the_providers_health() -> None:
    found = read_refusal("up", 400, None, b'{"error":{"message":"No such voice.","code":null}}', 0.0)

    assert isinstance(found.error, InvalidRequest)
    assert "No such voice." in found.error.message
    assert not found.is_failure
    assert isinstance(
        read_refusal("up", 400, None, b'{"error":{"message":"x","code":"context_length_exceeded"}}', 0.0).error,
        ContextTooLong,
    )
    assert isinstance(read_refusal("up", 422, None, b"<html>", 0.0).error, InvalidRequest)


@pytest.mark.parametrize(
    ("status", "retry_after", "pause_s"),
    [
        (429, "30", 30.0),
        (429, None, None),
        (429, "Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        (429, "soon", None),
        (429, "nan", None),
        (429, "-1", 0.0),
        (429, "inf", 86_400.0),
        (429, "Fri, 31 Dec 9999 23:59:59 GMT", 86_400.0),
        (503, "5", 5.0),
        (500, "5", None),
        (401, None, None),
    ],
)
def test_the_providers_own_trouble_counts_against_it_and_a_pause_it_asks_for_is_told(
    status: int, retry_after: str | None, pause_s: float | None
) -> None:
    found = read_refusal("up", status, retry_after, b"", 10.0)

    assert isinstance(found.error, Overloaded)
    assert found.error.retry_after_s
    assert (found.is_failure, found.pause_s) == (True, pause_s)


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}},
    ],
)
def test_a_response_format_goes_to_a_provider_as_it_came(wanted: object) -> None:
    request = chat(response_format=wanted)

    assert is_understood(request, provider())
    assert body(request)["response_format"] == wanted


@pytest.mark.parametrize(
    "request_",
    [
        chat(guided_regex="a"),
        chat(guided_choice=["a"]),
        chat(guided_grammar="start: A"),
        chat(guided_json={}),
        chat(structured_outputs={"regex": "a"}),
        completion(response_format={"type": "json_object"}),
    ],
)
def test_a_constraint_that_openais_api_can_not_say_stays_away_from_providers(
    request_: ChatRequest | CompletionRequest,
) -> None:
    assert not is_understood(request_, provider())


@pytest.mark.parametrize(
    ("fields", "is_fine"),
    [
        ({"chat_template_kwargs": {"a": 1}}, False),
        ({"chat_template_kwargs": {}}, True),
        ({"continue_final_message": True}, False),
        ({"continue_final_message": False}, True),
        ({"add_generation_prompt": False}, False),
        ({"add_generation_prompt": True}, True),
        ({"truncate_prompt_tokens": 5}, False),
        ({"skip_special_tokens": False}, False),
        ({"include_stop_str_in_output": True}, False),
        ({"cache_salt": "a"}, False),
    ],
)
def test_what_only_a_prompt_of_tokens_can_honour_goes_to_no_provider(fields: dict[str, Any], is_fine: bool) -> None:
    assert is_understood(chat(**fields), provider(extra_fields=["top_k"])) is is_fine
