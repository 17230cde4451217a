"""The request structs once more, so that they take members that they do not declare: what a body that has some is read
as.

They stand apart because a body that has none, which is most, tells so by being read as the strict ones. Their instances
are those structs' instances.
"""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.wire.openai import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatMessageIn,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FunctionCallIn,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    NamedToolChoice,
    Prediction,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    ToolCallIn,
    ToolDefinition,
)
from penstock.wire.tokenization import DetokenizeRequest, TokenizeRequest


class LenientStreamOptions(StreamOptions, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`stream_options` with any members."""


class LenientJsonSchema(JsonSchemaFormat, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`response_format.json_schema` with any members."""


class LenientFormat(ResponseFormat, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`response_format` with any members."""

    json_schema: LenientJsonSchema | None = None


class LenientStructuredOutputs(StructuredOutputs, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`structured_outputs` with any members."""


class LenientPart(ContentPart, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A content part with any members."""


class LenientFunctionCall(FunctionCallIn, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The function of a past call with any members."""


class LenientCall(ToolCallIn, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A past call with any members."""

    function: LenientFunctionCall | None = None


class LenientFunction(FunctionDefinition, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The function of a tool with any members."""


class LenientTool(ToolDefinition, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A tool with any members."""

    function: LenientFunction | None = None


class LenientFunctionName(FunctionName, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The function that a tool choice names, with any members."""


class LenientToolChoice(NamedToolChoice, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A tool choice that names a function, with any members."""

    function: LenientFunctionName | None = None


class LenientMessage(ChatMessageIn, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A message with any members."""

    content: str | Annotated[list[LenientPart], Meta(max_length=MAX_MESSAGES)] | None = None  # type: ignore[assignment]
    tool_calls: Annotated[list[LenientCall], Meta(max_length=MAX_TOOLS)] | None = None  # type: ignore[assignment]


class LenientPrediction(Prediction, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """`prediction` with any members."""

    content: str | Annotated[list[LenientPart], Meta(max_length=MAX_MESSAGES)]  # type: ignore[assignment]


_Messages = Annotated[list[LenientMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
_Tools = Annotated[list[LenientTool], Meta(max_length=MAX_TOOLS)]


class LenientChatRequest(ChatRequest, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Body of POST /v1/chat/completions with any members."""

    messages: _Messages  # type: ignore[assignment]
    tools: _Tools | None = None  # type: ignore[assignment]
    tool_choice: Literal["none", "auto", "required"] | LenientToolChoice | None = None
    prediction: LenientPrediction | None = None
    stream_options: LenientStreamOptions | None = None
    response_format: LenientFormat | None = None
    structured_outputs: LenientStructuredOutputs | None = None


class LenientCompletionRequest(CompletionRequest, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Body of POST /v1/completions with any members."""

    stream_options: LenientStreamOptions | None = None
    response_format: LenientFormat | None = None
    structured_outputs: LenientStructuredOutputs | None = None


class LenientTokenizeRequest(TokenizeRequest, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Body of POST /tokenize with any members."""

    messages: _Messages | None = None  # type: ignore[assignment]
    tools: _Tools | None = None  # type: ignore[assignment]


class LenientDetokenizeRequest(DetokenizeRequest, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Body of POST /detokenize with any members."""
