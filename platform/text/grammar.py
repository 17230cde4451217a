"""A constraint as a grammar for llguidance (https://github.com/guidance-ai/llguidance), its limits, and whether it can
be enforced at all.

The gateway asks before it takes a request, the replica compiles the same grammar with its model's vocabulary. JSON is
enforced by llguidance's reading of JSON Schema 2020-12 (its docs/json_schema.md); what it knows and does not enforce is
refused, never left out. Invariant: whatever a constraint holds, the outcome is a grammar or InvalidRequest, after a
bounded amount of work.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, regex_to_lark

from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Constraint

LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # to build the lexer: about 50,000 a millisecond
    max_grammar_size=100_000,  # symbols
    step_lexer_fuel=100_000,  # for one token's mask: about 14,000 a millisecond
    step_max_items=25_000,  # of the parser, for one token's mask: about 20,000 a millisecond
    max_lexer_states=10_000,  # some kB each
    precompute_large_lexemes=False,  # which has no limit
    verbose_errors=False,
)
"""Work and memory that one constraint may cost; an error names the limit that was reached."""
MAX_BYTES = 64 * 2**10
"""Longest text of a constraint."""
MAX_DEPTH = 64
"""Deepest nesting of brackets, or of JSON: readers of grammars call themselves."""
MAX_RULES = 1024
"""Lines of a grammar: its rules may name each other in a chain, which is as deep."""
MAX_PATTERNS = 128
"""Patterns in a schema."""
MAX_PATTERNS_TO_JOIN = 8
"""Patterns in a schema that joins parts: whether several can hold at once costs up to some ten milliseconds a pair."""
MAX_DIVISOR_DIGITS = 3
"""Significant digits of `multipleOf`, whose automaton has as many states as the number says."""
_MOST_ENTRIES = {"properties": 1000, "required": 1000, "patternProperties": 24, "anyOf": 256, "oneOf": 64, "allOf": 64}
"""Most entries of a keyword in one place: the cost of some is that of all pairs."""
_WHITESPACE = r"\n[ \t]{0,40}|[ \t]{1,8}"
"""What may stand between the parts of JSON: a line break with indentation, or some spaces. Unbounded, a small model at
times writes nothing else until it is cut off."""
_BOUNDS = {
    "email": "^[^@]{1,64}@.{1,189}$",  # RFC 5321, 4.5.3.1
    "hostname": "^.{1,253}$",  # RFC 1123, 2.1; RFC 1035, 3.1
    # RFC 3339 allows any number of digits, and a 60th second where the day is longer; these are nanoseconds
    "time": r"^[0-9:]{6}[0-5][0-9](\.[0-9]{1,9})?[^0-9.].*$",
    "date-time": r"^.{17}[0-5][0-9](\.[0-9]{1,9})?[^0-9.].*$",
    "duration": "^.{1,64}$",
}
"""What keeps a text of a format from going on without end, as small models at times have it."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""
_FOOTER = '%llguidance {"no_forcing": true}\n'
"""Text that the grammar forces is chosen by the model too, token by token: every way to spell it in tokens is allowed,
so nothing depends on how a tokenizer would spell a piece of text by itself."""
_OPENING, _CLOSING = "([{", ")]}"
_MAX_SHOWN_CHARS = 300
_PLACE = re.compile(r"^(at )?1\(\d+\): (failed to compile JSON schema: )?")
"""Where llguidance finds a fault in a grammar of one line, which is not the caller's."""
_EXCERPT = re.compile(r"\n *\d+ \| ")
_EMBEDDED = re.compile(r"%json\s*")
"""What stands before a schema in a grammar."""
_decoder = json.JSONDecoder()


def find_error(constraint: Constraint) -> str | None:
    """Why the constraint can't be enforced, as a sentence; None if it can. Takes a bounded time, most of it without the
    interpreter's lock."""
    try:
        source = grammar_of(constraint)
    except InvalidRequest as error:
        return error.message
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source, limits=LIMITS)
    return describe(messages[0]) if is_error else None


def grammar_of(constraint: Constraint) -> str:
    """The constraint in llguidance's dialect of Lark. Raises InvalidRequest for one that is malformed, too long or
    nested too deeply, or of a kind that is not known."""
    if len(constraint.text) > MAX_BYTES or _num_bytes(constraint.text) > MAX_BYTES:
        raise InvalidRequest(f"It is longer than {MAX_BYTES} bytes.")
    if constraint.kind not in _BODIES:
        raise InvalidRequest(f"Constraints of the kind '{constraint.kind[:40]}' are not known.")
    source = _BODIES[constraint.kind](constraint.text) + _FOOTER
    _num_bytes(source)  # a schema may hold an escape of what its own text must not
    return source


def _num_bytes(text: str) -> int:
    """Bytes of the text in UTF-8. Raises InvalidRequest where it has none."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("It holds half of a surrogate pair, which is not valid Unicode.") from None


def describe(message: str) -> str:
    """llguidance's message as a sentence, without the part that shows the grammar."""
    told = _EXCERPT.split(_PLACE.sub("", message.strip()), maxsplit=1)[0].replace("<non-verbose/>", "")
    told = told.replace("NoExtensionBias", "no text keeps to it")
    line = " ".join(told.split()) or "It can't be read"
    line = line if len(line) <= _MAX_SHOWN_CHARS else f"{line[:_MAX_SHOWN_CHARS]}..."
    return line if line.endswith((".", "...")) else f"{line}."


def _schema(text: str) -> str:
    return f"start: %json {_checked(_read_json(text))}\n"


def _checked(schema: object) -> str:
    """A schema with our options, as JSON on one line. Raises InvalidRequest."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest("A schema is a JSON object.")
    if "x-guidance" in schema:
        raise InvalidRequest("The keyword 'x-guidance' is not taken from requests.")
    parts = list(_walk(schema))
    _check_parts(parts)
    bounded = _bound_formats(schema) if _may_bound(parts) else schema
    options = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
    return _write_json({"x-guidance": options} | bounded)


def _regex(text: str) -> str:
    _check_brackets(text)
    return f"start: /{regex_to_lark(text)}/\n"


def _grammar(text: str) -> str:
    _check_brackets(text)
    if text.count("\n") >= MAX_RULES:
        raise InvalidRequest(f"It has more than {MAX_RULES} lines.")
    parts: list[str] = []
    at = 0
    for found in _EMBEDDED.finditer(text):
        if found.start() < at:
            continue  # inside of the schema before
        try:
            schema, end = _decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"What stands behind '%json' is not valid JSON: {error}.") from None
        parts += [text[at : found.end()], _checked(schema)]
        at = end
    return "".join([*parts, text[at:], "\n"])


def _choice(text: str) -> str:
    choices = _read_json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise InvalidRequest("A choice is an array of strings, none of them empty.")
    return f"start: {' | '.join(map(_write_json, choices))}\n"


_BODIES: Mapping[str, Callable[[str], str]] = {
    "json_schema": _schema,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
}
KINDS = frozenset(_BODIES)


def _check_parts(parts: list[dict[str, object]]) -> None:
    """Refuse what llguidance takes without limits of its own, and what it enforces only in part."""
    num_patterns = sum(isinstance(part.get("pattern"), str) for part in parts)
    most = MAX_PATTERNS_TO_JOIN if any("allOf" in part for part in parts) else MAX_PATTERNS
    if num_patterns > most:
        where = "" if most == MAX_PATTERNS else " where 'allOf' may join them"
        raise InvalidRequest(f"It has {num_patterns} patterns; the limit{where} is {most}.")
    for part in parts:
        for keyword, limit in _MOST_ENTRIES.items():
            entries = part.get(keyword)
            if isinstance(entries, dict | list) and len(entries) > limit:
                raise InvalidRequest(f"'{keyword}' has {len(entries)} entries; the limit is {limit}.")
        _check_numbers(part)


def _may_bound(parts: list[dict[str, Any]]) -> bool:
    """Whether patterns may be added: joining them takes time, and the parts of 'allOf' are joined."""
    num_patterns = sum(isinstance(part.get(keyword), str) for part in parts for keyword in ("pattern", "format"))
    return num_patterns <= MAX_PATTERNS and not any("allOf" in part for part in parts)


def _bound_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a bound for texts of formats that have none. Where the schema itself says how long they are, or
    what they look like, that alone holds."""
    found = {keyword: value if keyword in _VALUES else _bound_part(value) for keyword, value in schema.items()}
    bound = _BOUNDS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if bound is not None and not schema.keys() & {"pattern", "minLength", "maxLength"}:
        found["pattern"] = bound
    return found


def _bound_part(value: Any) -> Any:
    if isinstance(value, dict):
        return _bound_formats(value)
    return [_bound_part(item) for item in value] if isinstance(value, list) else value


def _check_numbers(part: dict[str, object]) -> None:
    divisor = part.get("multipleOf")
    if isinstance(divisor, int | float) and _num_significant_digits(divisor) > MAX_DIVISOR_DIGITS:
        raise InvalidRequest(f"'multipleOf' has more than {MAX_DIVISOR_DIGITS} significant digits, which is the limit.")
    least, required = part.get("minProperties"), part.get("required")
    num_certain = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(1, num_certain):
        # keys that a schema does not name may come twice in an answer, and then count once
        raise InvalidRequest("'minProperties' above 1 is only enforced where as many properties are 'required'.")


def _num_significant_digits(number: float) -> int:
    """Digits of a number as it is written; of a float that is written with an exponent, more than any limit."""
    written = str(number) if isinstance(number, int) else f"{number:.15g}"  # an integer may be too large for a float
    return len(written.lstrip("-").replace(".", "").strip("0"))


def _read_json(text: str) -> object:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(f"It is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequest(f"It is nested more than {MAX_DEPTH} deep.") from None
    return value


def _write_json(value: object) -> str:
    """JSON on one line, with the keys in their order; characters as they are, which is how llguidance reads them."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _walk(schema: object) -> Iterator[dict[str, object]]:
    """Every object in a JSON value. Raises InvalidRequest where it is nested too deeply."""
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        parts: list[object] = []
        for value in level:
            if isinstance(value, dict):
                yield value
                parts += value.values()
            elif isinstance(value, list):
                parts += value
        level = parts
        if not level:
            return
    raise InvalidRequest(f"It is nested more than {MAX_DEPTH} deep.")


def _check_brackets(text: str) -> None:
    """Raises InvalidRequest where brackets are nested too deeply; those behind a backslash count for nothing."""
    depth = at = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char in _OPENING:
            depth += 1
            if depth > MAX_DEPTH:
                raise InvalidRequest(f"Its brackets are nested more than {MAX_DEPTH} deep.")
        elif char in _CLOSING:
            depth = max(0, depth - 1)
        at += 1
