"""OpenAI's Responses API as Penstock implements it, without any state: requests and answers as msgspec structs, from
which /openapi.json is made.

Not how a request becomes a chat (`router.dialects`). A request declares the fields that are honoured; what becomes of
others is in the table of `wire.dialect_fields`, and what is in no table is unknown. Null means absent everywhere.
Source: OpenAI's API reference, POST /v1/responses, and the types of its Python client (3.52).
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.wire.openai import MAX_MESSAGES, MAX_TOOL_NAME_CHARS, MAX_TOOLS, Count, Json

_ABSENT: Any = None
"""The default of a member that is JSON as it stands in the body."""
Name = Annotated[str, Meta(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


# --- requests


class InputPart(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[str, Meta(description="`input_text` and `output_text` are supported")]
    text: str | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item of the conversation. Those of an earlier answer may be sent back as they were received."""

    type: (
        Annotated[
            str,
            Meta(
                description="`message` (the default), `function_call`, `function_call_output`; `reasoning` is not shown"
                " to a model"
            ),
        ]
        | None
    ) = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[InputPart], Meta(max_length=MAX_MESSAGES)] | None = None
    call_id: str | None = None
    name: Name | None = None
    arguments: Annotated[str, Meta(description="JSON of an object")] | None = None
    output: str | Annotated[list[InputPart], Meta(max_length=MAX_MESSAGES)] | None = None


class ResponseTool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Annotated[str, Meta(description="Only `function` is supported")]
    name: Name | None = None
    description: str | None = None
    parameters: Json = _ABSENT
    """JSON Schema of the arguments, an object; absent: the function has none."""
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A demand that the answer calls this function."""

    type: Annotated[str, Meta(description="Only `function` is supported")]
    name: str | None = None


class TextForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    schema: Json = _ABSENT
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: TextForm | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing of it is honoured: its table says what is accepted."""


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/responses."""

    model: Annotated[str, Meta(min_length=1)]
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables of the chat template")] | None = None


# --- answers

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = []
    logprobs: list[str] = []


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    """Prompt tokens whose KV was found in a replica's cache."""
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ReasoningOut(msgspec.Struct, frozen=True, kw_only=True):
    effort: None = None
    summary: None = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, with the parts of the request that say how it came about."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningOut = ReasoningOut()
    store: Literal[False] = False
    """Nothing is kept: there is no page of an earlier answer."""
    temperature: float
    text: TextConfig
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice
    tools: list[ResponseTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The data of an event, whose further members depend on its type, as in OpenAI's reference."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    """0, 1 and so on through the stream."""
