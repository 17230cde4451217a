"""Request bodies into structs; what is wrong with one, in a sentence that names the parameter.

Invariants: whatever the bytes, the outcome is a struct or InvalidRequest; and what is built in memory on the way is a
small multiple of the body. An array is built before its length is compared with the schema, so the values of a large
body are counted first.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

import msgspec

from penstock.wire.adapters import AdapterImport
from penstock.wire.anthropic import CountTokensRequest, MessagesRequest
from penstock.wire.batches import BatchCreate
from penstock.wire.errors import InvalidRequest
from penstock.wire.lenient import (
    LenientChatRequest,
    LenientCompletionRequest,
    LenientDetokenizeRequest,
    LenientTokenizeRequest,
)
from penstock.wire.openai import ChatRequest, CompletionRequest
from penstock.wire.responses import ResponsesRequest
from penstock.wire.tokenization import DetokenizeRequest, TokenizeRequest
from penstock.wire.unread import IgnoredField, find_ignored

T = TypeVar("T")
Request = TypeVar("Request", bound=msgspec.Struct)

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `(?P<types>[^`]*)`(?P<bound>.*)$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_WORDS = {
    "float": "a number",
    "int": "an integer",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
MAX_SHOWN_CHARS = 40
MAX_UNCOUNTED_BYTES = 64 * 2**10
"""Longest body whose values are not counted."""
MAX_VALUES = 2**16
"""Strings (keys included), arrays and objects in one body: each costs up to a hundred bytes, and half a microsecond.
Literals are not counted, because no array of them is decoded."""
MAX_NUMBERS = 2**18
"""Numbers of one body, counted by the commas outside of strings: they follow each other, but for the first of an
array."""
_MAX_SHOWN_BYTES = 64 * 2**10
"""Longest JSON of an offending value that is read to show it."""
_SLICE_BYTES = 16 * 2**10
"""Bytes of a body that are counted at once: at most about a millisecond."""
_UNKNOWN = "Object contains unknown field"


class _Form(Generic[Request]):
    """A request's body, strict where it can be: whether it has members that are not declared costs nothing to know
    where it has none."""

    def __init__(self, strict: type[Request], lenient: type[Request]) -> None:
        self._struct = strict
        self._strict = msgspec.json.Decoder(strict)
        self._lenient = msgspec.json.Decoder(lenient)

    def read(self, body: bytes, ignored: list[IgnoredField] | None) -> Request:
        try:
            return self._strict.decode(body)
        except msgspec.ValidationError as error:
            if not str(error).startswith(_UNKNOWN):
                raise
        request = self._lenient.decode(body)
        found = find_ignored(body, self._struct)
        if ignored is not None:
            ignored += found
        return request


class _OpenForm(Generic[Request]):
    """A body of another API, whose clients send many members that are not declared."""

    def __init__(self, struct: type[Request]) -> None:
        self._struct = struct
        self._decoder = msgspec.json.Decoder(struct)

    def read(self, body: bytes, ignored: list[IgnoredField] | None) -> Request:
        request = self._decoder.decode(body)
        found = find_ignored(body, self._struct)
        if ignored is not None:
            ignored += found
        return request


_adapter_import = msgspec.json.Decoder(AdapterImport)
_batch = msgspec.json.Decoder(BatchCreate)
_chat: _Form[ChatRequest] = _Form(ChatRequest, LenientChatRequest)
_completion: _Form[CompletionRequest] = _Form(CompletionRequest, LenientCompletionRequest)
_tokenize: _Form[TokenizeRequest] = _Form(TokenizeRequest, LenientTokenizeRequest)
_detokenize: _Form[DetokenizeRequest] = _Form(DetokenizeRequest, LenientDetokenizeRequest)
_messages: _OpenForm[MessagesRequest] = _OpenForm(MessagesRequest)
_count_tokens: _OpenForm[CountTokensRequest] = _OpenForm(CountTokensRequest)
_responses: _OpenForm[ResponsesRequest] = _OpenForm(ResponsesRequest)


def decode_chat(body: bytes, ignored: list[IgnoredField] | None = None, *, is_counted: bool = False) -> ChatRequest:
    """Body of POST /v1/chat/completions. ignored: takes the members that are accepted and change nothing.
    is_counted: the body has gone through `count_values`. Raises InvalidRequest."""
    return _read(partial(_chat.read, ignored=ignored), body, is_counted)


def decode_completion(
    body: bytes, ignored: list[IgnoredField] | None = None, *, is_counted: bool = False
) -> CompletionRequest:
    """Body of POST /v1/completions, as `decode_chat` for chats."""
    return _read(partial(_completion.read, ignored=ignored), body, is_counted)


def decode_tokenize(
    body: bytes, ignored: list[IgnoredField] | None = None, *, is_counted: bool = False
) -> TokenizeRequest:
    """Body of POST /tokenize, as `decode_chat` for chats."""
    return _read(partial(_tokenize.read, ignored=ignored), body, is_counted)


def decode_detokenize(
    body: bytes, ignored: list[IgnoredField] | None = None, *, is_counted: bool = False
) -> DetokenizeRequest:
    """Body of POST /detokenize, as `decode_chat` for chats."""
    return _read(partial(_detokenize.read, ignored=ignored), body, is_counted)


def decode_messages(
    body: bytes, ignored: list[IgnoredField] | None = None, *, is_counted: bool = False
) -> MessagesRequest:
    """Body of POST /v1/messages, as `decode_chat` for chats."""
    return _read(partial(_messages.read, ignored=ignored), body, is_counted)


def decode_count_tokens(
    body: bytes, ignored: list[IgnoredField] | None = None, *, is_counted: bool = False
) -> CountTokensRequest:
    """Body of POST /v1/messages/count_tokens, as `decode_chat` for chats."""
    return _read(partial(_count_tokens.read, ignored=ignored), body, is_counted)


def decode_responses(
    body: bytes, ignored: list[IgnoredField] | None = None, *, is_counted: bool = False
) -> ResponsesRequest:
    """Body of POST /v1/responses, as `decode_chat` for chats."""
    return _read(partial(_responses.read, ignored=ignored), body, is_counted)


def decode_adapter_import(body: bytes) -> AdapterImport:
    """Body of POST /v1/adapters as JSON. Raises InvalidRequest."""
    return _read(_adapter_import.decode, body, is_counted=False)


def decode_batch(body: bytes) -> BatchCreate:
    """Body of POST /v1/batches. Raises InvalidRequest."""
    return _read(_batch.decode, body, is_counted=False)


def count_values(body: bytes) -> Iterator[None]:
    """Look at a large body in steps of a millisecond at most, so that others get their turn between them, and without
    building anything. Raises InvalidRequest for more values than any request needs. Malformed JSON is counted
    up to where the decoder stops."""
    if len(body) <= MAX_UNCOUNTED_BYTES:
        return
    num_values = num_commas = position = 0
    is_in_string = False
    while position < len(body):
        part = body[position : position + _SLICE_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape is not cut in two
            part = body[position : position + _SLICE_BYTES + 1]
        position += len(part)
        if b"\\" in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = part.split(b'"')
        outside = b"".join(parts[is_in_string::2])
        num_values += (len(parts) - is_in_string) // 2 + outside.count(b"[") + outside.count(b"{")
        num_commas += outside.count(b",")
        is_in_string ^= len(parts) % 2 == 0
        if num_values > MAX_VALUES:
            raise InvalidRequest(
                f"The request body holds more than {MAX_VALUES} strings, arrays and objects; send fewer messages or"
                " prompts."
            )
        if num_commas > MAX_NUMBERS:
            raise InvalidRequest(f"The request body holds more than {MAX_NUMBERS} numbers; send fewer token ids.")
        yield


def _read(read: Callable[[bytes], T], body: bytes, is_counted: bool) -> T:
    if not is_counted:
        for _ in count_values(body):
            pass
    try:
        return read(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {_clip(str(error), 200)}.") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None


def _invalid(message: str, body: bytes) -> InvalidRequest:
    """msgspec's message as a sentence. Its forms: `Expected ..., got ...`, `Object contains unknown field`, `Object
    missing required field`, `Invalid enum value`, `Number out of range`, each with the place."""
    match = _PLACE.match(message)
    assert match is not None
    what, path = match["what"], (match["path"] or "").lstrip(".").replace("[...]", "")
    name = _quote(what)
    if what.startswith(_UNKNOWN):
        param = _clip(f"{path}.{name}" if path else name, 200)
        return InvalidRequest(f"Unrecognized request argument supplied: {param}", param=param)
    if what.startswith("Object missing required field"):
        param = f"{path}.{name}" if path else name
        return InvalidRequest(f"Missing required parameter: '{param}'.", param=param)
    if not path:
        return InvalidRequest(f"The request body must be a JSON object; it is {_got(what)}.")
    if match["key"]:
        return InvalidRequest(f"Invalid key in '{path}': token ids are expected as keys.", param=path)
    shown = _shown(body, path) if what.startswith("Expected") and "[...]" not in message else ""
    return InvalidRequest(f"Invalid value for '{path}': {_sentence(what)}{shown}.", param=path)


def _sentence(what: str) -> str:
    match = _EXPECTED.match(what)
    if match is None:
        return what[0].lower() + what[1:]
    kinds = [kind for kind in match["types"].split(" | ") if kind != "null"] or ["null"]
    return f"expected {' or '.join(_WORDS.get(kind, kind) for kind in kinds)}{match['bound'].partition(', got ')[0]}"


def _got(what: str) -> str:
    return _WORDS.get(_quote(what.partition(", got ")[2]), "something else")


def _quote(text: str) -> str:
    """What stands between the first backquote and the last."""
    return text[text.find("`") + 1 : text.rfind("`")]


def _shown(body: bytes, path: str) -> str:
    """`, got 5`: the offending value, where it is short; else its kind. Empty when what follows it is malformed."""
    try:
        raw = msgspec.Raw(body)
        for name, index in _STEP.findall(f".{path}"):
            if name:
                raw = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])[name]
            elif len(raw) <= _MAX_SHOWN_BYTES:
                raw = msgspec.json.decode(raw, type=list[msgspec.Raw])[int(index)]
            else:
                return ""
        return _describe(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError):
        return ""


def _describe(raw: msgspec.Raw) -> str:
    """`, got 5` of one value's JSON. Raises what decoding raises."""
    is_string = bytes(memoryview(raw)[:1]) == b'"'
    if len(raw) > _MAX_SHOWN_BYTES and not is_string:
        return ""
    value = msgspec.json.decode(raw)
    if isinstance(value, str):
        return f", got '{value}'" if len(value) <= MAX_SHOWN_CHARS else f", got a string of {len(value)} characters"
    if isinstance(value, list):
        return f", got an array of {len(value)}"
    if isinstance(value, dict):
        return ", got an object"
    return f", got {_clip(msgspec.json.encode(value).decode(), MAX_SHOWN_CHARS)}"


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
