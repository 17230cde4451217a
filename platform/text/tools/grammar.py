"""A grammar of the answers that are calls: the text of a Lark grammar for llguidance.

Pure text; nothing here knows the engine that enforces it. Invariant: what the grammar accepts, the parser of the same
format reads as calls of the functions that the request allows, with arguments that their schemas accept. The schema of
each function's arguments is a JSON Schema of its own in the grammar, so that references inside of it hold. Source:
llguidance's dialect of Lark (docs/syntax.md): `%json`, and `<[id]>` for a special token.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from penstock.text.tools.forms import ToolForm
from penstock.text.tools.parser import ARGS, HERMES_CLOSE, HERMES_OPEN, TOOL_CALLS, CallFormat
from penstock.wire.tools import NO_PARAMETERS, Function, RequestedTools


def call_grammar(
    tools: RequestedTools, form: ToolForm, special_ids: Mapping[str, int], answer_schema: str | None = None
) -> str:
    """The grammar of an answer that consists of calls alone: of any of the functions, or of the one that the choice
    names; several only where the request allows parallel calls and the format has them.

    special_ids: token ids of those markers (`parser.MARKERS`) that are special tokens of the vocabulary; others are
    written as text. answer_schema: JSON Schema of an answer that is no call; None: every answer is calls. Not with the
    format of Llama 3, whose calls begin as any JSON does.
    """
    functions = [function for function in tools.functions if tools.choice.name in (None, function.name)]
    is_single = not tools.is_parallel or tools.choice.name is not None or form.has_single_calls
    rules = _RULES[form.call_format](functions, form, is_single, lambda marker: _marker(marker, special_ids))
    if answer_schema is None:
        start = ["start: calls"]
    else:
        start = ["start: calls | answer", "answer: %json " + answer_schema.replace("\n", " ")]  # each on one line
    return "\n".join([*start, *rules, ""])


_Rules = Callable[[Sequence[Function], ToolForm, bool, Callable[[str], str]], list[str]]


def _hermes(
    functions: Sequence[Function],
    form: ToolForm,  # noqa: ARG001 (has no variants)
    is_single: bool,
    marker: Callable[[str], str],
) -> list[str]:
    call = f'{marker(HERMES_OPEN)} "\\n" object "\\n" {marker(HERMES_CLOSE)}'
    return [
        "calls: call" if is_single else 'calls: call ("\\n" call)*',
        f"call: {call}",
        *_objects(functions, "arguments"),
    ]


def _llama3(
    functions: Sequence[Function],
    form: ToolForm,  # noqa: ARG001 (has no variants)
    is_single: bool,
    marker: Callable[[str], str],  # noqa: ARG001 (the tag is optional)
) -> list[str]:
    return ["calls: object" if is_single else 'calls: object ("; " object)*', *_objects(functions, "parameters")]


def _mistral(functions: Sequence[Function], form: ToolForm, is_single: bool, marker: Callable[[str], str]) -> list[str]:
    if not form.has_args_marker:
        items = "object" if is_single else 'object (", " object)*'
        return [f'calls: {marker(TOOL_CALLS)} "[" {items} "]"', *_objects(functions, "arguments")]
    rules = ["calls: call" if is_single else "calls: call+", f"call: {_alternatives('call', functions)}"]
    for number, function in enumerate(functions):
        begin = f"{marker(TOOL_CALLS)} {_text(function.name)} {marker(ARGS)}"
        rules.append(f"call_{number}: {begin} arguments_{number}")
        rules.append(f"arguments_{number}: {_schema(function)}")
    return rules


_RULES: Mapping[CallFormat, _Rules] = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}


def _objects(functions: Sequence[Function], key: str) -> list[str]:
    """Rules of `object`: a call with its name first, as the families write it."""
    rules = [f"object: {_alternatives('object', functions)}"]
    for number, function in enumerate(functions):
        begin = _text(f'{{"name": {json.dumps(function.name)}, "{key}": ')
        rules.append(f'object_{number}: {begin} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: {_schema(function)}")
    return rules


def _alternatives(rule: str, functions: Sequence[Function]) -> str:
    return " | ".join(f"{rule}_{number}" for number in range(len(functions)))


def _schema(function: Function) -> str:
    """The function's parameters as a schema of objects only, for arguments are never anything else. It is that of an
    empty object where the function declares none."""
    closed = {"additionalProperties": False} if function.parameters == NO_PARAMETERS else {}
    return f"%json {json.dumps({**function.parameters, 'type': 'object', **closed})}"


def _marker(marker: str, special_ids: Mapping[str, int]) -> str:
    return f"<[{special_ids[marker]}]>" if marker in special_ids else _text(marker)


def _text(text: str) -> str:
    """The text as a string of the grammar."""
    return json.dumps(text)
