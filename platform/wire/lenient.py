"""The request structs once more, so that they take members that they do not declare: what a body that has some is read
as.

They stand apart because a body that has none, which is most, tells so by being read as the strict ones. Their instances
are those structs' instances.
"""

from typing import Annotated

from msgspec import Meta

from penstock.wire.openai import (
    MAX_MESSAGES,
    ChatMessageIn,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
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


class LenientMessage(ChatMessageIn, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A message with any members."""

    content: str | Annotated[list[LenientPart], Meta(max_length=MAX_MESSAGES)] | None = None  # type: ignore[assignment]


_Messages = Annotated[list[LenientMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class LenientChatRequest(ChatRequest, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Body of POST /v1/chat/completions with any members."""

    messages: _Messages  # type: ignore[assignment]
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


class LenientDetokenizeRequest(DetokenizeRequest, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Body of POST /detokenize with any members."""
