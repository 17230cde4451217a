"""/tokenize and /detokenize as structs: a prompt's token ids without an answer to it, and the text of token ids.

Source: vLLM's entrypoints/serve/tokenize/protocol.py (main branch at 030ea52e).
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.wire.openai import MAX_MESSAGES, MAX_PROMPT_ITEMS, MAX_TOOLS, ChatMessageIn, ToolDefinition


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a text or a conversation, one of them."""

    model: Annotated[str, Meta(min_length=1, description="May be left out where only one is served")] | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessageIn], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS, description="With messages")] | None = None
    return_token_strs: Annotated[bool, Meta(description="Adds the tokens as the vocabulary spells them")] | None = None
    add_special_tokens: Annotated[bool, Meta(description="Of a prompt; false: the text as it is")] | None = None
    add_generation_prompt: Annotated[bool, Meta(description="Of messages")] | None = None
    continue_final_message: Annotated[bool, Meta(description="Of messages")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Of messages")] | None = None


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    """Tokens of prompt and answer together."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    model: Annotated[str, Meta(min_length=1, description="May be left out where only one is served")] | None = None
    tokens: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_PROMPT_ITEMS)]


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
    """Text of the tokens, special ones included."""
