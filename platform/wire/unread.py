"""Members of a request's JSON that its structs do not declare: refused, or accepted and named.

Not their values: of those only what a refused field may have is read, and that is short. Invariant: a body of any
number of unknown names costs time and memory in proportion to its bytes, and a bounded number of names is kept.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from penstock.wire.dialect_fields import NESTED
from penstock.wire.errors import InvalidRequest
from penstock.wire.fields import PLACES, REFUSED, find_row, matters, meant_by
from penstock.wire.near_misses import NearMisses
from penstock.wire.openai import (
    ChatMessageIn,
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
from penstock.wire.rows import Refusal

MAX_NAMED = 16
"""Names in the response's header."""
MAX_NAME_CHARS = 64
MAX_COMPARED = 64
"""Unknown names of one body that are compared with those that matter: it costs some microseconds each."""
OTHER = "other"
"""Label of a name outside the table."""
_MAX_ACCEPTED_BYTES = 64
"""Longest JSON that is compared with the accepted values of a refused field; theirs is far shorter."""

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_declared: dict[type, frozenset[str]] = {
    struct: frozenset(field.encode_name for field in msgspec.structs.fields(struct)) for struct in REFUSED
}
_near_misses = {struct: NearMisses(matters(struct), meant_by(struct)) for struct in REFUSED}
_NESTED: dict[str, type] = {
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
    "structured_outputs": StructuredOutputs,
    "response_format.json_schema": JsonSchemaFormat,
    "tool_choice": NamedToolChoice,
    "tool_choice.function": FunctionName,
    "prediction": Prediction,
}
"""Structs of members that are objects, by their paths."""


class IgnoredField(NamedTuple):
    """A member that was accepted and changes nothing."""

    path: str
    """Place and name, such as `metadata` or `messages.name`."""
    is_known: bool
    """Whether the table has it; else the name is what the caller made up."""
    can_be_named: bool = True
    """Whether the path may stand in a header."""

    @property
    def label(self) -> str:
        """Value for a metric's label."""
        return self.path if self.is_known else OTHER


def find_ignored(body: bytes, struct: type[msgspec.Struct]) -> list[IgnoredField]:
    """What a body has that its structs do not declare, each member once; of unknown ones the first MAX_NAMED. body: one
    that has been read as such a struct.

    Raises InvalidRequest for a member that is refused, or that is nearly one that matters; and what msgspec raises for
    JSON that was skipped when the body was read.
    """
    search = _Search()
    if struct in NESTED:
        _examine_nested(search, body, struct, "")
        return list(search.found.values())
    members = search.examine_all(body, struct, "")
    if "messages" in _declared[struct]:
        for index, message in _enumerate(members.get("messages")):
            _examine_message(search, message, f"messages[{index}].")
    prediction = members.get("prediction") if "prediction" in _declared[struct] else None
    if prediction is not None and _begins(prediction, b"{"):
        _examine_parts(search, _members.decode(prediction).get("content"), "prediction.")
    if "tools" in _declared[struct]:
        for index, tool in _enumerate(members.get("tools")):
            _examine_with_function(search, tool, ToolDefinition, FunctionDefinition, f"tools[{index}].")
    return list(search.found.values())


def header_value(ignored: Iterable[IgnoredField]) -> bytes:
    """Names for a response's header; empty if none can be named."""
    named = [field.path for field in ignored if field.can_be_named]
    return ", ".join(named[:MAX_NAMED]).encode("ascii")


def check_strictly(ignored: Sequence[IgnoredField]) -> None:
    """Raises InvalidRequest for the first member that is not in the table."""
    for field in ignored:
        if not field.is_known:
            raise _unrecognized(field.path)


def _examine_nested(search: "_Search", raw: bytes | msgspec.Raw, struct: type, place: str) -> None:
    """Examine an object, and the objects in it that have structs of their own."""
    members = search.examine(raw, struct, place)
    for name, inner in NESTED.get(struct, {}).items():
        value = members.get(name)
        if value is not None and _begins(value, b"{"):
            _examine_nested(search, value, inner, f"{place}{name}.")
        for index, item in _enumerate(value):
            if _begins(item, b"{"):
                _examine_nested(search, item, inner, f"{place}{name}[{index}].")


def _examine_message(search: "_Search", message: msgspec.Raw, place: str) -> None:
    members = search.examine(message, ChatMessageIn, place)
    _examine_parts(search, members.get("content"), place)
    for index, call in _enumerate(members.get("tool_calls")):
        _examine_with_function(search, call, ToolCallIn, FunctionCallIn, f"{place}tool_calls[{index}].")


def _examine_parts(search: "_Search", content: msgspec.Raw | None, place: str) -> None:
    """Examine the parts of a content that has some."""
    for index, part in _enumerate(content):
        search.examine(part, ContentPart, f"{place}content[{index}].")


def _examine_with_function(search: "_Search", raw: msgspec.Raw, struct: type, function: type, place: str) -> None:
    """Examine an object and what it has as `function`, a struct of its own."""
    inner = search.examine(raw, struct, place).get("function")
    if inner is not None and _begins(inner, b"{"):
        search.examine(inner, function, f"{place}function.")


def _enumerate(raw: msgspec.Raw | None) -> Iterable[tuple[int, msgspec.Raw]]:
    """The items of an array, numbered; none of anything else."""
    return enumerate(_items.decode(raw)) if raw is not None and _begins(raw, b"[") else ()


class _Search:
    """What was found so far in one body."""

    def __init__(self) -> None:
        self.found: dict[str, IgnoredField] = {}
        """Ignored members by path, in the order in which they came."""
        self._num_unknown = 0
        self._num_compared = 0

    def examine(self, raw: bytes | msgspec.Raw, struct: type, place: str) -> dict[str, msgspec.Raw]:
        """The members of an object, after those that its struct does not declare were examined. place: what stands
        before their names in an error."""
        members = _members.decode(raw)
        declared = _declared[struct]
        for name, value in members.items():
            if name not in declared:
                self._take(struct, name, value, place)
        return members

    def examine_all(self, raw: bytes | msgspec.Raw, struct: type, place: str) -> dict[str, msgspec.Raw]:
        """The members of an object, examined with the objects among them, but for messages."""
        members = self.examine(raw, struct, place)
        for name, value in members.items():
            nested = _NESTED.get(place + name) if name in _declared[struct] else None
            if nested is not None and _begins(value, b"{"):
                self.examine_all(value, nested, f"{place}{name}.")
        return members

    def _take(self, struct: type, name: str, value: msgspec.Raw, place: str) -> None:
        row = find_row(struct, name)
        if row is None:
            self._take_unknown(struct, name, place)
        elif row.refusal is not None:
            _refuse_unless_accepted(row.refusal, value, place + name)
        elif not _is_null(value):
            path = PLACES[struct] + name
            self.found.setdefault(path, IgnoredField(path, is_known=True))

    def _take_unknown(self, struct: type, name: str, place: str) -> None:
        path = PLACES[struct] + name
        if path in self.found:
            return
        if self._num_compared < MAX_COMPARED:
            self._num_compared += 1
            meant = _near_misses[struct].find(name)
            if meant is not None:
                raise _unrecognized(place + name, f"; did you mean '{meant}'?")
        if self._num_unknown < MAX_NAMED:
            self._num_unknown += 1
            self.found[path] = IgnoredField(path, is_known=False, can_be_named=_is_plain(name))


def _refuse_unless_accepted(refusal: Refusal, raw: msgspec.Raw, path: str) -> None:
    if len(raw) <= _MAX_ACCEPTED_BYTES:
        value = msgspec.json.decode(raw)
        if value is None or value in refusal.accepted:
            return
    raise InvalidRequest(f"{refusal.sentence}; leave out '{path}'.", param=path)


def _unrecognized(path: str, hint: str = "") -> InvalidRequest:
    shown = path if len(path) <= 200 else f"{path[:200]}..."
    return InvalidRequest(f"Unrecognized request argument supplied: {shown}{hint}", param=shown)


def _is_null(raw: msgspec.Raw) -> bool:
    return len(raw) == 4 and bytes(raw) == b"null"


def _begins(raw: msgspec.Raw, opener: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == opener


def _is_plain(name: str) -> bool:
    """Whether a caller's name may stand in a header."""
    return len(name) <= MAX_NAME_CHARS and name.isascii() and name.isidentifier()
