"""What servers send of an answer: a chunk of a stream, or a whole answer, as far as the tester reads it. Pure.

Servers differ in what they add, leave out, set to null or give another type; all of that is read as far as it goes.
Only what is no JSON object is no chunk.
"""

from typing import Annotated, TypeVar

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Part(msgspec.Struct, gc=False):
    """One part of a message whose content is a list."""

    text: str | None = None


class Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, gc=False):
    function: Function | None = None


class Message(msgspec.Struct, gc=False):
    """A message of chat, or what a chunk adds to it."""

    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def answer(self) -> str:
        """Text that a conversation goes on with."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""

    @property
    def reasoning_text(self) -> str:
        return self.reasoning_content or self.reasoning or ""

    @property
    def text(self) -> str:
        """All that was generated: also what the model thought, and which tools it calls."""
        calls = [
            f"{call.function.name or ''}{call.function.arguments or ''}"
            for call in self.tool_calls or ()
            if call.function is not None
        ]
        return "".join([self.reasoning_text, self.answer, self.refusal or "", *calls])


class Choice(msgspec.Struct, gc=False):
    delta: Message | None = None
    message: Message | None = None
    text: str | None = None
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None

    @property
    def generated_text(self) -> str:
        """All text that was generated, reasoning and tool calls included."""
        message = self.delta or self.message
        return (self.text or "") if message is None else message.text

    @property
    def answer(self) -> str:
        """Text that a conversation goes on with."""
        message = self.delta or self.message
        return (self.text or "") if message is None else message.answer


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, gc=False):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: object = None
    sort: str | None = msgspec.field(name="object", default=None)

    @property
    def is_error(self) -> bool:
        return bool(self.error) or self.sort == "error"


_decode = msgspec.json.Decoder(Chunk).decode
_Part = TypeVar("_Part", bound=msgspec.Struct)
_PARTS: dict[str, type[msgspec.Struct]] = {
    "usage": Usage,
    "prompt_tokens_details": PromptDetails,
    "delta": Message,
    "message": Message,
    "function": Function,
}
_LISTS: dict[str, type[msgspec.Struct]] = {"choices": Choice, "tool_calls": ToolCall}


def read_chunk(data: bytes) -> Chunk | None:
    """The chunk that an event or a body holds; None where it is no JSON object."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _read_odd(data)


def _read_odd(data: bytes) -> Chunk | None:
    """A chunk with fields of unexpected types; bytes that are no UTF-8 are replaced, as readers of event streams do."""
    try:
        found = msgspec.json.decode(data.decode("utf-8", errors="replace"))
    except (msgspec.DecodeError, RecursionError):
        return None
    return _keep_valid_fields(found, Chunk) if isinstance(found, dict) else None


def _keep_valid_fields(found: dict[str, object], kind: type[_Part]) -> _Part:
    """An object of `kind` from the fields that have the declared type; the others are left out."""
    fields: dict[str, object] = {}
    for field in msgspec.structs.fields(kind):
        value = found.get(field.encode_name)
        if field.name in _PARTS and isinstance(value, dict):
            fields[field.name] = _keep_valid_fields(value, _PARTS[field.name])
        elif field.name in _LISTS and isinstance(value, list):
            fields[field.name] = [
                _keep_valid_fields(each, _LISTS[field.name]) for each in value if isinstance(each, dict)
            ]
        elif field.name not in _PARTS:
            fields[field.name] = _convert_or_none(value, field.type)
    return kind(**fields)


def _convert_or_none(value: object, kind: object) -> object:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


def spread_tokens(tokens: int, chunks: int) -> list[int]:
    """The number of tokens of each chunk, where the server reports only their sum: one token in the first chunk, which
    prefill makes; the others evenly over the later chunks."""
    if chunks < 2 or not tokens:
        return [tokens] * chunks
    later, gaps = tokens - 1, chunks - 1
    return [1, *((gap + 1) * later // gaps - gap * later // gaps for gap in range(gaps))]
