"""What a request wants its answer to be: a JSON object or schema, a pattern, a grammar or one of some texts, from the
three places where clients say it.

`response_format` is OpenAI's, `structured_outputs` vLLM's, and the `guided_` fields are its older names. The reading is
pure; the check whether a constraint can be enforced takes milliseconds, so it is made in a thread, in the tenant's
turn, and in a process of its own where that must have a hard bound. Invariant: a constraint that leaves here can be
enforced, all of it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from penstock.router.completions.fair_threads import FairThreads
from penstock.text.grammar import MAX_BYTES, find_error
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.grammar import call_grammar
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Constraint
from penstock.wire.openai import ChatRequest, CompletionRequest, ResponseFormat, StructuredOutputs
from penstock.wire.tools import RequestedTools

CHECK_COST = 64
"""Cost of a check to a tenant's share of the threads, in characters of a prompt for each character of a constraint."""
MAX_CHECKED = 1024
"""Constraints that are remembered to be good, for all tenants together."""

_ANY_OBJECT = '{"type":"object"}'


class Wanted(NamedTuple):
    """A constraint, and the parameter of the request that asks for it."""

    constraint: Constraint
    param: str


def find_constraint(request: ChatRequest | CompletionRequest) -> Wanted | None:
    """What the request wants its answer to be; None for anything. Raises InvalidRequest for more than one constraint,
    and for one that is malformed or too long."""
    found = [
        wanted
        for wanted in (
            _of_response_format(request.response_format),
            *_of_structured_outputs(request.structured_outputs),
            _of_json(request.guided_json, "guided_json"),
            _of_text("regex", request.guided_regex, "guided_regex"),
            _of_choice(request.guided_choice, "guided_choice"),
            _of_text("grammar", request.guided_grammar, "guided_grammar"),
        )
        if wanted is not None
    ]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidRequest(f"'{first}' and '{second}' exclude each other; set one.", param=second)
    if found and len(found[0].constraint.text) > MAX_BYTES:
        raise InvalidRequest(f"'{found[0].param}' is longer than {MAX_BYTES} bytes.", param=found[0].param)
    return found[0] if found else None


def with_calls(wanted: Wanted | None, tools: RequestedTools, tokenizer: Tokenizer) -> Wanted | None:
    """What an answer that may have calls must be, in the words of one model: calls alone where the request demands one,
    and else calls or what it wants. wanted: what the request wants of an answer without calls. Raises InvalidRequest
    for a wish that can't be joined with calls."""
    form, marker_ids = tokenizer.tool_form, tokenizer.marker_ids
    if tools.choice.must_call:
        return Wanted(Constraint("grammar", call_grammar(tools, form, marker_ids)), "tools")
    if wanted is None:
        return None
    if wanted.constraint.kind != "json_schema":
        raise InvalidRequest(
            f"'{wanted.param}' and 'tools' exclude each other, unless 'tool_choice' is 'none' or demands a call.",
            param=wanted.param,
        )
    if form.call_format == "llama3":  # as text, such a call begins as any JSON does
        raise InvalidRequest(
            f"'{wanted.param}' can't stand beside 'tools' with this model, whose calls are JSON too.",
            param=wanted.param,
        )
    return Wanted(Constraint("grammar", call_grammar(tools, form, marker_ids, wanted.constraint.text)), wanted.param)


class ConstraintChecker:
    """Checks constraints in threads. Remembers the good ones, each for the tenant that sent it: nobody learns by the
    time of an answer what others have sent."""

    def __init__(
        self,
        threads: FairThreads | None = None,
        max_checked: int = MAX_CHECKED,
        find: Callable[[Constraint], str | None] = find_error,
    ) -> None:
        """threads: not those for tokenization, which must not wait for a constraint; None: one of its own. find: says
        why a constraint can't be enforced, in any thread."""
        self._threads = threads or FairThreads(num_threads=1)
        self._find = find
        self._max_checked = max_checked
        self._checked: OrderedDict[bytes, None] = OrderedDict()
        """Digests, the one used last at the end."""

    async def check(self, wanted: Wanted, tenant: str) -> None:
        """Raises InvalidRequest for a constraint that can't be enforced, and what `FairThreads.run` raises."""
        constraint = wanted.constraint
        digest = _digest(constraint, tenant)
        if digest not in self._checked:
            error = await self._threads.run(tenant, CHECK_COST * len(constraint.text), partial(self._find, constraint))
            if error is not None:
                raise InvalidRequest(f"'{wanted.param}' can't be enforced. {error}", param=wanted.param)
            self._checked[digest] = None
            if len(self._checked) > self._max_checked:
                self._checked.popitem(last=False)
        self._checked.move_to_end(digest)


def _of_response_format(wanted: ResponseFormat | None) -> Wanted | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Wanted(Constraint("json_schema", _ANY_OBJECT), "response_format")
    param = "response_format.json_schema"
    schema = None if wanted.json_schema is None else _of_json(wanted.json_schema.schema, f"{param}.schema")
    if schema is None:
        raise InvalidRequest(f"Missing required parameter: '{param}.schema'.", param=f"{param}.schema")
    return schema


def _of_structured_outputs(wanted: StructuredOutputs | None) -> tuple[Wanted | None, ...]:
    if wanted is None:
        return ()
    param = "structured_outputs"
    return (
        _of_json(wanted.json, f"{param}.json"),
        Wanted(Constraint("json_schema", _ANY_OBJECT), f"{param}.json_object") if wanted.json_object else None,
        _of_text("regex", wanted.regex, f"{param}.regex"),
        _of_choice(wanted.choice, f"{param}.choice"),
        _of_text("grammar", wanted.grammar, f"{param}.grammar"),
    )


def _of_json(raw: msgspec.Raw | None, param: str) -> Wanted | None:
    """A schema as it stands in the body, or in a string there."""
    if raw is None:
        return None
    if len(raw) > 2 * MAX_BYTES:  # a string has backslashes
        raise InvalidRequest(f"'{param}' is longer than {MAX_BYTES} bytes.", param=param)
    try:
        text = bytes(raw).decode()
        if text.startswith('"'):
            text = msgspec.json.decode(raw, type=str)
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"'{param}' is not valid JSON.", param=param) from error
    return None if text == "null" else _of_text("json_schema", text, param)


def _of_text(kind: str, text: str | None, param: str) -> Wanted | None:
    if text is None:
        return None
    if not text.isascii():
        _check_unicode(text, param)
    return Wanted(Constraint(kind, text), param)


def _of_choice(choices: list[str] | None, param: str) -> Wanted | None:
    if choices is None:
        return None
    for choice in choices:
        _check_unicode(choice, param)
    return _of_text("choice", msgspec.json.encode(choices).decode(), param)


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"'{param}' holds half of a surrogate pair, which is not valid Unicode.", param=param
        ) from error


def _digest(constraint: Constraint, tenant: str) -> bytes:
    parts = (tenant, constraint.kind, constraint.text)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16, person=b"penstock-grammar").digest()
