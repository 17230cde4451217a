from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams as AnthropicCount
from anthropic.types.message_create_params import MessageCreateParamsBase as AnthropicMessages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion
from openai.types.responses.response_create_params import ResponseCreateParamsBase as OpenAIResponses

from penstock.wire.anthropic import (
    BlockIn,
    CountTokensRequest,
    MessageIn,
    MessagesRequest,
    OutputConfig,
    OutputFormat,
    TextPart,
    ToolChoiceIn,
    ToolIn,
)
from penstock.wire.bodies import decode_chat, decode_completion
from penstock.wire.errors import HTTP_ERRORS, InvalidRequest
from penstock.wire.fields import HARMLESS, REFUSED, TABLE
from penstock.wire.openai import (
    ChatMessageIn,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FunctionDefinition,
    JsonSchemaFormat,
    NamedToolChoice,
    Prediction,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    ToolCallIn,
    ToolDefinition,
)
from penstock.wire.responses import (
    InputItem,
    InputPart,
    ReasoningConfig,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    TextConfig,
    TextForm,
)
from penstock.wire.support import check
from penstock.wire.tokenization import DetokenizeRequest, TokenizeRequest

FOLDER = Path(__file__).resolve().parents[3] / "docs"
DOCS = FOLDER / "openai-api.md"
DIALECTS = FOLDER / "other-apis.md"
TABLES = {
    "## POST /v1/chat/completions": ChatRequest,
    "### Messages": ChatMessageIn,
    "### Content parts": ContentPart,
    "### Tools in requests": ToolDefinition,
    "### Functions of tools": FunctionDefinition,
    "### tool_choice": NamedToolChoice,
    "### tool_calls in messages": ToolCallIn,
    "### stream_options": StreamOptions,
    "### prediction": Prediction,
    "### response_format": ResponseFormat,
    "### response_format.json_schema": JsonSchemaFormat,
    "### structured_outputs": StructuredOutputs,
    "## POST /v1/completions": CompletionRequest,
    "### /tokenize": TokenizeRequest,
    "### /detokenize": DetokenizeRequest,
}
DIALECT_TABLES = {
    "## POST /v1/messages": MessagesRequest,
    "### Messages": MessageIn,
    "### Content blocks": BlockIn,
    "### Texts in system prompts and results": TextPart,
    "### Tools of messages": ToolIn,
    "### tool_choice of messages": ToolChoiceIn,
    "### output_config": OutputConfig,
    "### output_config.format": OutputFormat,
    "### count_tokens": CountTokensRequest,
    "## POST /v1/responses": ResponsesRequest,
    "### Input items": InputItem,
    "### Parts of input items": InputPart,
    "### Tools of responses": ResponseTool,
    "### tool_choice of responses": ResponseToolChoice,
    "### text": TextConfig,
    "### text.format": TextForm,
    "### reasoning": ReasoningConfig,
}
USER = {"role": "user", "content": "Hi"}


def chat(**fields: object) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": [USER], **fields})


def refusal(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check(decode_chat(body))
    return caught.value


def documented(heading: str, page: Path = DOCS) -> dict[str, str]:
    """Verdicts by field, from the table below that heading."""
    section = page.read_text(encoding="utf-8").split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")
    ]
    named = [(name.strip(" `"), row[1]) for row in rows for name in row[0].split(",")]
    assert len(dict(named)) == len(named)
    return dict(named)


# --- the table of fields


@pytest.mark.parametrize("heading", TABLES)
def test_the_documented_table_is_the_schema(heading: str) -> None:
    struct = TABLES[heading]

    assert documented(heading) == {name: row.verdict for name, row in TABLE[struct].items()}


@pytest.mark.parametrize("heading", DIALECT_TABLES)
def test_the_documented_table_of_another_api_is_the_schema(heading: str) -> None:
    struct = DIALECT_TABLES[heading]

    assert documented(heading, DIALECTS) == {name: row.verdict for name, row in TABLE[struct].items()}


@pytest.mark.parametrize(
    ("struct", "theirs"),
    [
        (ChatRequest, OpenAIChat),
        (CompletionRequest, OpenAICompletion),
        (ResponsesRequest, OpenAIResponses),
        (MessagesRequest, AnthropicMessages),
        (CountTokensRequest, AnthropicCount),
    ],
)
def test_every_field_of_the_clients_is_in_the_table(struct: type[msgspec.Struct], theirs: type) -> None:
    assert theirs.__annotations__.keys() - TABLE[struct].keys() == set()


@pytest.mark.parametrize("struct", list(REFUSED))
def test_no_field_has_two_verdicts(struct: type[msgspec.Struct]) -> None:
    declared = {field.name for field in msgspec.structs.fields(struct)}

    assert not REFUSED[struct].keys() & HARMLESS[struct]
    assert not declared & HARMLESS[struct]
    assert not declared & REFUSED[struct].keys()


def test_the_documented_errors_are_those_of_the_table() -> None:
    section = DOCS.read_text(encoding="utf-8").split("## Errors\n", 1)[1]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| ") and line[2].isdigit()
    ]
    documented_rows = {(int(status), code.strip(" `")) for status, codes, _ in rows for code in codes.split(",")}

    assert documented_rows == {(row.status, row.code or "") for row in HTTP_ERRORS.values()} | {(500, "internal_error")}


# --- support


@pytest.mark.parametrize("name", REFUSED[ChatRequest])
def test_a_refused_field_is_named_with_a_sentence(name: str) -> None:
    error = refusal(chat(**{name: {"some": "thing"}}))

    assert error.param == name
    assert error.message.endswith(f"leave out '{name}'.")


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, row in REFUSED[ChatRequest].items() for value in (None, *row.accepted)]
)
def test_a_refused_field_that_asks_for_nothing_is_accepted(name: str, value: object) -> None:
    check(decode_chat(chat(**{name: value})))


@pytest.mark.parametrize("name", sorted(HARMLESS[ChatRequest]))
def test_a_harmless_field_takes_anything(name: str) -> None:
    for value in ("x", 1, {"a": [1]}, None):
        check(decode_chat(chat(**{name: value})))


@pytest.mark.parametrize(
    ("n", "best_of", "stream", "is_fine"),
    [
        (None, 1, False, True),
        (2, 2, True, True),
        (None, 2, False, True),
        (None, 2, True, False),
        (3, 1, False, False),
    ],
)
def test_best_of_is_at_least_n_and_not_streamed(n: int | None, best_of: int, stream: bool, is_fine: bool) -> None:
    body = {"model": "m", "prompt": "x", "n": n, "best_of": best_of, "stream": stream}
    request = decode_completion(msgspec.json.encode(body))

    if is_fine:
        check(request)
    else:
        with pytest.raises(InvalidRequest, match="best_of"):
            check(request)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ],
)
def test_a_message_that_is_not_text_is_refused(message: Mapping[str, object], param: str) -> None:
    assert refusal(chat(messages=[message])).param == param


def test_an_assistants_message_can_be_sent_back_as_it_came() -> None:
    message = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }

    check(decode_chat(chat(messages=[USER, message])))


# --- sentences


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", "Invalid value for 'temperature': expected a number, got 'hot'."),
        ({"temperature": 2.5}, "temperature", "Invalid value for 'temperature': expected a number <= 2.0, got 2.5."),
        ({"n": 0}, "n", "Invalid value for 'n': expected an integer >= 1, got 0."),
        ({"max_tokens": 1.5}, "max_tokens", "Invalid value for 'max_tokens': expected an integer, got 1.5."),
        ({"stream": "yes"}, "stream", "Invalid value for 'stream': expected a boolean, got 'yes'."),
        ({"stop": 5}, "stop", "Invalid value for 'stop': expected a string or an array, got 5."),
        ({"stop": ["a", ""]}, "stop[1]", "Invalid value for 'stop[1]': expected a string of length >= 1, got ''."),
        (
            {"stop": ["a"] * 17},
            "stop",
            "Invalid value for 'stop': expected an array of length <= 16, got an array of 17.",
        ),
        (
            {"messages": []},
            "messages",
            "Invalid value for 'messages': expected an array of length >= 1, got an array of 0.",
        ),
        ({"messages": "hi"}, "messages", "Invalid value for 'messages': expected an array, got 'hi'."),
        (
            {"messages": [{"role": "bot"}]},
            "messages[0].role",
            "Invalid value for 'messages[0].role': invalid enum value 'bot'.",
        ),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing required parameter: 'messages[0].role'."),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call": 1}]},
            "messages[0].tool_call",
            "Unrecognized request argument supplied: messages[0].tool_call; did you mean 'tool_calls'?",
        ),
        (
            {"stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "Unrecognized request argument supplied: stream_options.include_usages; did you mean 'include_usage'?",
        ),
        ({"logit_bias": {"a": 1}}, "logit_bias", "Invalid key in 'logit_bias': token ids are expected as keys."),
        ({"logit_bias": {"1": 101}}, "logit_bias", "Invalid value for 'logit_bias': expected a number <= 100.0."),
        ({"model": None}, "model", "Invalid value for 'model': expected a string, got null."),
        (
            {"stop": "x" * 300},
            "stop",
            "Invalid value for 'stop': expected a string of length <= 256, got a string of 300 characters.",
        ),
    ],
)
def test_a_bad_parameter_is_named_with_a_sentence(fields: Mapping[str, object], param: str, message: str) -> None:
    error = refusal(chat(**fields))

    assert (error.param, error.message) == (param, message)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"model": NaN}', "not valid JSON"),
        (b'{"model": "\xff"}', "not valid UTF-8"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b"[]", "must be a JSON object; it is an array"),
        (b"null", "must be a JSON object; it is null"),
        (b'{"model": "m"}', "Missing required parameter: 'messages'"),
        (b'{"metadata": ' + b"[" * 50_000, "nested too deeply"),
        (b'{"temperature": 1e999}', "number out of range"),
    ],
)
def test_a_malformed_body_is_a_sentence(body: bytes, words: str) -> None:
    assert words in refusal(body).message


@given(st.binary(max_size=64))
def test_any_bytes_end_in_a_request_or_a_refusal(body: bytes) -> None:
    for decode in (decode_chat, decode_completion):
        with pytest.raises(InvalidRequest):
            decode(body)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a loaded machine draws slowly
@given(st.dictionaries(st.sampled_from(sorted(TABLE[ChatRequest])), JSON, max_size=4))
def test_any_json_ends_in_a_request_or_a_refusal(fields: Mapping[str, object]) -> None:
    message = ""
    try:
        check(decode_chat(chat(**fields)))
    except InvalidRequest as error:
        message = error.message

    assert not message or message[0].isupper() or message[0] == "'"
    assert len(message) < 500
