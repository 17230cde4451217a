"""A planned request as the JSON it is sent as, and what to leave out for servers that refuse a field. Pure."""

from collections.abc import Collection, Sequence

import msgspec

from penstock_loadtest.workload.planned import Message, Planned

OPTIONAL = ("return_token_ids", "ignore_eos", "seed", "stream_options")
"""Fields that a server may refuse: requests go without them then, and what they would have told is unverified."""

PATHS = {"chat": "/chat/completions", "completions": "/completions"}

_encode = msgspec.json.Encoder().encode


def body_of(planned: Planned, model: str, history: Sequence[Message] = ()) -> bytes:
    """The body, with every field that the plan asks for. history: what a session has said so far."""
    body: dict[str, object] = {"model": planned.model or model}
    if planned.endpoint == "chat":
        system = [Message("system", planned.system)] if planned.system is not None and not history else []
        body["messages"] = [*system, *history, Message("user", str(planned.prompt))]
    else:
        body["prompt"] = planned.prompt
    body |= {"max_tokens": planned.max_tokens, "temperature": planned.temperature, "return_token_ids": True}
    if planned.seed is not None:
        body["seed"] = planned.seed
    if planned.ignore_eos:
        body["ignore_eos"] = True
    if planned.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return _encode(body)


def without(body: bytes, fields: Collection[str]) -> bytes:
    """The body without these fields."""
    decoded = msgspec.json.decode(body, type=dict[str, object])
    return _encode({name: value for name, value in decoded.items() if name not in fields})


class _Error(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | str | None = None
    message: str | None = None


MAX_ERROR = 200
"""Characters of a server's own words in a record."""


def error_of(body: bytes) -> tuple[str, str | None]:
    """What an error body says, in one bounded line, and the field it is about."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "", None
    error = found.error if isinstance(found.error, _Error) else _Error(message=found.error or found.message)
    words = " ".join((error.message or error.type or "").split())
    code = f"{error.code}: " if error.code is not None else ""
    return f"{code}{words}"[:MAX_ERROR], error.param


def refused_field(body: bytes) -> str | None:
    """The optional field that a 400's body is about."""
    words, param = error_of(body)
    if param in OPTIONAL:
        return param
    return next((name for name in OPTIONAL if name in words), None)
