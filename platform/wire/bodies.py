"""Request bodies into structs; what is wrong with one, in a sentence that names the parameter.

Invariant: whatever the bytes, the outcome is a struct or InvalidRequest.
"""

import re
from typing import TypeVar

import msgspec

from penstock.wire.adapters import AdapterImport
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatRequest, CompletionRequest

T = TypeVar("T")

_adapter_import = msgspec.json.Decoder(AdapterImport)
_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)

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


def decode_chat(body: bytes) -> ChatRequest:
    """Body of POST /v1/chat/completions. Raises InvalidRequest."""
    return _decode(_chat, body)


def decode_adapter_import(body: bytes) -> AdapterImport:
    """Body of POST /v1/adapters as JSON. Raises InvalidRequest."""
    return _decode(_adapter_import, body)


def decode_completion(body: bytes) -> CompletionRequest:
    """Body of POST /v1/completions. Raises InvalidRequest."""
    return _decode(_completion, body)


def _decode(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    try:
        return decoder.decode(body)
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
    if what.startswith("Object contains unknown field"):
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
        value = msgspec.json.decode(body)
        for name, index in _STEP.findall(f".{path}"):
            value = value[name] if name else value[int(index)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return ""
    if isinstance(value, str):
        return f", got '{value}'" if len(value) <= MAX_SHOWN_CHARS else f", got a string of {len(value)} characters"
    if isinstance(value, list):
        return f", got an array of {len(value)}"
    if isinstance(value, dict):
        return ", got an object"
    return f", got {_clip(msgspec.json.encode(value).decode(), MAX_SHOWN_CHARS)}"


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
