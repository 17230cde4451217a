"""The fields of OpenAI's API that are ignored or refused, and the sentence of each refusal; all others of `wire.openai`
are honoured.

Fields that change nothing of the answer are ignored: labels, hints, storage. Fields that would change it and are not
implemented are refused, except with the values that have no effect.
"""

from typing import Literal, NamedTuple

import msgspec

from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatMessageIn, ChatRequest, CompletionRequest
from penstock.wire.tools import check_tool_message

Verdict = Literal["honoured", "ignored", "400"]
_MAX_ACCEPTED_BYTES = 64
"""Longest JSON that is compared with the accepted values of a refused field; theirs is far shorter."""


class Refusal(NamedTuple):
    """Why a field is refused."""

    sentence: str
    accepted: tuple[object, ...] = ()
    """Values besides null that are accepted."""


_FUNCTIONS = "Functions in their form before tools are not supported; send 'tools' and 'tool_choice' instead"

REFUSED: dict[type, dict[str, Refusal]] = {
    ChatRequest: {
        "audio": Refusal("Audio output is not supported"),
        "function_call": Refusal(_FUNCTIONS, ("none", "auto")),
        "functions": Refusal(_FUNCTIONS, ([],)),
        "modalities": Refusal("Only the modality 'text' is supported", (["text"],)),
        "moderation": Refusal("Moderation is not supported"),
        "reasoning_effort": Refusal("Reasoning effort can't be set for this model", ("none",)),
        "response_format": Refusal("Only the response format {'type': 'text'} is supported", ({"type": "text"},)),
        "verbosity": Refusal("Verbosity can't be set for this model", ("medium",)),
        "web_search_options": Refusal("Web search is not supported"),
    },
    CompletionRequest: {
        "best_of": Refusal("'best_of' other than 'n' is not supported"),  # compared with n in `check`
        "echo": Refusal("Echoing the prompt is not supported", (False,)),
        "suffix": Refusal("Inserting before a suffix is not supported", ("",)),
    },
    ChatMessageIn: {
        "audio": Refusal("Audio in messages is not supported"),
        "function_call": Refusal(
            "Function calls in their form before tools are not supported; send 'tool_calls' instead"
        ),
    },
}

IGNORED: dict[type, frozenset[str]] = {
    ChatRequest: frozenset(
        {
            "user",
            "metadata",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
        }
    ),
    CompletionRequest: frozenset({"user"}),
    ChatMessageIn: frozenset({"name", "refusal", "annotations"}),
}


_UNREAD: dict[type, tuple[str, ...]] = {
    struct: tuple(
        field.name
        for field in msgspec.structs.fields(struct)
        if field.name in IGNORED[struct] or field.name in REFUSED[struct]
    )
    for struct in REFUSED
}


def verdict(struct: type, field: str) -> Verdict:
    """Whether a declared field is honoured, ignored or refused (400)."""
    return "ignored" if field in IGNORED[struct] else "400" if field in REFUSED[struct] else "honoured"


def check(request: ChatRequest | CompletionRequest) -> None:
    """Raises InvalidRequest for the first field that is set and not supported."""
    _check_fields(request, "")
    if isinstance(request, ChatRequest):
        for index, message in enumerate(request.messages):
            _check_message(message, f"messages[{index}]")


def forget_unread(request: ChatRequest | CompletionRequest) -> None:
    """Drop the JSON of all fields that are not honoured, which keeps the whole body in memory. Only after `check`."""
    _forget(request)
    if isinstance(request, ChatRequest):
        for message in request.messages:
            _forget(message)


def _forget(struct: ChatRequest | CompletionRequest | ChatMessageIn) -> None:
    for name in _UNREAD[type(struct)]:
        if getattr(struct, name) is not None:
            msgspec.structs.force_setattr(struct, name, None)


def _read(value: object) -> object:
    """The value of a refused field. What is too long for an accepted value, or malformed, stays as it is."""
    if not isinstance(value, msgspec.Raw) or len(value) > _MAX_ACCEPTED_BYTES:
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return value


def _check_fields(struct: ChatRequest | CompletionRequest | ChatMessageIn, prefix: str) -> None:
    for name, refusal in REFUSED[type(struct)].items():
        value = getattr(struct, name)
        if value is None:
            continue
        value = _read(value)
        if value is None or value in refusal.accepted:
            continue
        if name == "best_of" and isinstance(struct, CompletionRequest) and value == (struct.n or 1):
            continue
        raise InvalidRequest(f"{refusal.sentence}; leave out '{prefix}{name}'.", param=prefix + name)


def _check_message(message: ChatMessageIn, path: str) -> None:
    if message.role == "function":
        raise InvalidRequest(
            "Messages of role 'function' are not supported; send results of calls as role 'tool'.", param=f"{path}.role"
        )
    _check_fields(message, f"{path}.")
    check_tool_message(message, path)
    if isinstance(message.content, list):
        for index, part in enumerate(message.content):
            place = f"{path}.content[{index}]"
            if part.type != "text":
                raise InvalidRequest(
                    f"Content parts of type '{part.type[:40]}' are not supported; this model reads text only.",
                    param=f"{place}.type",
                )
            if part.text is None:
                raise InvalidRequest("A content part of type 'text' needs a 'text'.", param=f"{place}.text")
    elif message.content is None and message.role != "assistant":
        raise InvalidRequest(f"A message of role '{message.role}' needs a 'content'.", param=f"{path}.content")
