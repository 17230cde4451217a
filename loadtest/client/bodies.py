"""A planned request as the JSON it is sent as, the fields to leave out for servers that refuse them, and the error that
a response's body describes. Pure."""

import re
from collections.abc import Collection, Sequence

import msgspec

from penstock_loadtest.planned import Message, Planned

OPTIONAL = ("return_token_ids", "ignore_eos", "seed", "stream_options")
"""Fields that a server may refuse: requests go without them then, and what they would have shown is unverified.
`ignore_eos` alone asks for exactly max_tokens; `min_tokens`, which some servers know too, costs a mask per step in
some, so it would change what is measured."""

PATHS = {"chat": "/chat/completions", "completions": "/completions"}

_encode = msgspec.json.Encoder().encode


def encode_body(
    planned: Planned, model: str, history: Sequence[Message] = (), *, refused: Collection[str] = ()
) -> bytes:
    """The body, with every field that the plan asks for but the refused ones. history: the messages of a
    session before this turn."""
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
    return _encode({name: value for name, value in body.items() if name not in refused} if refused else body)


def has_field(body: bytes, field: str) -> bool:
    """Whether a body that `encode_body` made has the field. Inside a text the quotes would be escaped."""
    return b'"%s":' % field.encode() in body


def remove_fields(body: bytes, fields: Collection[str]) -> bytes:
    """The body that `encode_body` made, without these fields."""
    if not any(has_field(body, field) for field in fields):
        return body
    decoded = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return _encode({name: value for name, value in decoded.items() if name not in fields})


class _Error(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _Invalid(msgspec.Struct):
    """One entry of FastAPI's list of invalid fields."""

    loc: list[str | int] = []


class _ErrorBody(msgspec.Struct):
    error: _Error | str | None = None
    message: str | None = None
    type: str | None = None
    code: str | int | None = None
    detail: list[_Invalid] | str | None = None

    @property
    def inner(self) -> _Error:
        """The error, in whichever place it stands."""
        if isinstance(self.error, _Error):
            return self.error
        place = self.detail[0].loc[-1] if isinstance(self.detail, list) and self.detail and self.detail[0].loc else None
        message = self.error or self.message or (self.detail if isinstance(self.detail, str) else None)
        return _Error(message, self.type, None if place is None else str(place), self.code)


_IDENTIFIER = re.compile(r"[A-Za-z_][\w.:-]{0,63}")
_FIELD = re.compile("|".join(rf"\b{name}\b" for name in OPTIONAL))


def describe_error(body: bytes) -> str:
    """Type, code and parameter that an error's body names. Not its sentence: servers quote prompts and keys in theirs,
    and a record must hold neither."""
    error = _decode_error(body).inner
    kind = next(
        (str(name) for name in (error.code, error.type) if isinstance(name, str) and _IDENTIFIER.fullmatch(name)), ""
    )
    place = error.param or ""
    return f"{kind} ({place})".lstrip() if _IDENTIFIER.fullmatch(place) else kind


def find_refused_field(body: bytes) -> str | None:
    """The optional field that the body of a 400 or 422 is about."""
    error = _decode_error(body).inner
    if error.param in OPTIONAL:
        return error.param
    named = _FIELD.search(error.message or "")
    return named[0] if named is not None else None


def _decode_error(body: bytes) -> _ErrorBody:
    try:
        return msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _ErrorBody()
