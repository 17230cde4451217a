"""Anthropic's Messages API as Penstock implements it: requests, answers and errors as msgspec structs, from which
/openapi.json is made.

Not how a request becomes a chat (`router.dialects`). A request declares the fields that are honoured; what becomes of
others is in the table of `wire.dialect_fields`, and what is in no table is unknown. Null means absent everywhere.
Source: Anthropic's API reference, POST /v1/messages, and the types of its Python client.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.wire.errors import error_body, http_error
from penstock.wire.openai import MAX_MESSAGES, MAX_STOPS, MAX_TOOL_NAME_CHARS, MAX_TOOLS, Count, Json, StopString

_ABSENT: Any = None
"""The default of a member that is JSON as it stands in the body."""
Name = Annotated[str, Meta(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]


# --- requests


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a system prompt or of a tool's result."""

    type: Annotated[str, Meta(description="Only `text` is supported")]
    text: str | None = None


class BlockIn(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a message's content."""

    type: Annotated[
        str,
        Meta(
            description="`text`, `tool_use`, `tool_result`; `thinking` and `redacted_thinking` are not shown to a model"
        ),
    ]
    text: str | None = None
    id: str | None = None
    """Id of a call; of `tool_use`."""
    name: Name | None = None
    """Function that was called; of `tool_use`."""
    input: Json = _ABSENT
    """Arguments of the call, an object; of `tool_use`."""
    tool_use_id: str | None = None
    """Id of the call that this is the result of; of `tool_result`."""
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_MESSAGES)] | None = None
    """The result; of `tool_result`."""
    is_error: bool | None = None
    """Whether the call failed; of `tool_result`."""


class MessageIn(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[BlockIn], Meta(max_length=MAX_MESSAGES)]


class ToolIn(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    type: Annotated[str, Meta(description="Only `custom` is supported, a function of the caller's")] | None = None
    description: str | None = None
    input_schema: Json = _ABSENT
    """JSON Schema of the arguments, an object."""
    strict: bool | None = None


class ToolChoiceIn(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Tool that must be called; of `tool`."""
    disable_parallel_tool_use: bool | None = None
    """Whether the answer has one call at most."""


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: Json = _ABSENT


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[MessageIn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextPart], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ToolIn], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceIn | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables of the chat template")] | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """Body of POST /v1/messages. A subclass because msgspec has no other way to
    put one struct's fields into another's JSON object."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    output_config: OutputConfig | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


# --- answers

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextOut(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ToolUseOut(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    """The arguments; empty where they are cut off."""


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the prompt are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    """Prompt tokens that were computed."""
    cache_read_input_tokens: int
    """Prompt tokens whose KV was found in a replica's cache."""
    cache_creation_input_tokens: int = 0
    output_tokens: int


class Message(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextOut | ToolUseOut]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The data of an event, whose further members depend on its type, as in Anthropic's reference."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int


# --- errors

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]
ERROR_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types by HTTP status; any other is an `invalid_request_error`."""


class MessagesErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    type: ErrorType
    message: str


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str


def messages_error(error: BaseException, request_id: str) -> bytes:
    """The error as Anthropic's JSON. Text of unexpected exceptions is withheld, as in `errors.error_body`."""
    kind = ERROR_TYPES.get(http_error(error).status, "invalid_request_error")
    detail = MessagesErrorDetail(type=kind, message=error_body(error)["error"]["message"])
    return msgspec.json.encode(MessagesError(error=detail, request_id=request_id))
