"""Constraints as llguidance's grammars: what is taken, what is refused and in which words."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.text.grammar import LIMITS, MAX_BYTES, MAX_DEPTH, MAX_RULES, describe, find_error, grammar_of
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Constraint


def schema(**keywords: object) -> Constraint:
    return Constraint("json_schema", json.dumps(keywords))


def nested(depth: int) -> dict[str, object]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "null"}


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}}}


@pytest.mark.parametrize(
    "constraint",
    [
        schema(type="object"),
        schema(**PERSON, required=["name", "age"], additionalProperties=False),
        schema(enum=["a", 1, None, True]),
        schema(anyOf=[{"type": "string", "maxLength": 3}, {"type": "number", "exclusiveMaximum": 1.5}]),
        schema(type="string", pattern="^[a-z]+\\d$"),
        schema(type="string", format="date-time"),
        schema(**{"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"}),
        schema(type="object", minProperties=2, properties={"a": {}, "b": {}}, required=["a", "b"]),
        schema(title="Unknown words are remarks", **{"x-mine": 1}, type="null"),
        Constraint("json_schema", "true"),
        Constraint("regex", r"\d{3}-[A-Z]+/é?"),
        Constraint("grammar", 'start: greeting " " NAME\ngreeting: "hi" | "hello"\nNAME: /[a-z]+/'),
        Constraint("grammar", 'start: "<call>" %json {"type": "object"} "</call>" tail\ntail: %json true | "x"'),
        Constraint("choice", '["yes", "no", "say \\"maybe\\"", "\\u00e9\\ud83d\\ude00\\n"]'),
    ],
)
def test_what_can_be_enforced_is_taken(constraint: Constraint) -> None:
    assert find_error(constraint) is None


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (schema(type="array", uniqueItems=True), "uniqueItems"),
        (schema(type="object", propertyNames={"pattern": "^a"}), "propertyNames"),
        (schema(type="array", contains={"type": "null"}), "contains"),
        (schema(**{"not": {"type": "null"}}), "not"),
        (schema(**{"if": {"type": "null"}, "then": {"type": "null"}}), "if"),
        (schema(type="object", dependentRequired={"a": ["b"]}), "dependentRequired"),
        (schema(type="object", unevaluatedProperties=False), "unevaluatedProperties"),
        (schema(oneOf=[{"type": "integer"}, {"type": "number"}]), "oneOf"),
        (schema(type="string", format="no-such-format"), "no-such-format"),
        (schema(type="string", pattern="(?=a)"), "(?=a)"),
        (schema(type="object", minProperties=2), "minProperties"),
        (schema(**{"x-guidance": {"lenient": True}}, type="array", uniqueItems=True), "x-guidance"),
        (schema(**{"$ref": "https://example.com/schema.json"}), "example.com"),
        (schema(type="string", minLength=5, maxLength=2), "minLength"),
        (Constraint("json_schema", "[]"), "JSON object"),
        (Constraint("json_schema", "{"), "not valid JSON"),
        (Constraint("json_schema", json.dumps(nested(MAX_DEPTH))), "nested"),
        (Constraint("json_schema", "[" * 30_000), "nested"),
        (Constraint("regex", "(a"), "regex"),
        (Constraint("regex", "(" * (MAX_DEPTH + 1)), "nested"),
        (Constraint("grammar", 'begin: A\nA: "a"'), "start"),
        (Constraint("grammar", 'start: "a"' + "\n" * MAX_RULES), "lines"),
        (Constraint("grammar", 'start: %json {"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Constraint("grammar", 'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}'), "x-guidance"),
        (Constraint("grammar", 'start: %json {"type": "integer", "multipleOf": 999983}'), "multipleOf"),
        (Constraint("grammar", "start: %json {"), "%json"),
        (schema(type="integer", multipleOf=10**400 + 1), "multipleOf"),
        (Constraint("grammar", f'start: %json {{"multipleOf": {10**400 + 1}}}'), "multipleOf"),
        (Constraint("grammar", 'start: %json {"multipleOf": NaN}'), "."),
        (schema(type="integer", multipleOf=10**30), "."),
        (Constraint("choice", "[]"), "array of strings"),
        (Constraint("choice", '["a", ""]'), "array of strings"),
        (Constraint("choice", '["a", 1]'), "array of strings"),
        (Constraint("choice", json.dumps(["é" * MAX_BYTES], ensure_ascii=False)), "bytes"),
        (Constraint("regex", "\ud800"), "surrogate"),
        (Constraint("grammar", 'start: %json {"const": "\\ud800"}'), "surrogate"),
        (Constraint("xml_schema", "<a/>"), "xml_schema"),
    ],
)
def test_what_can_not_be_enforced_is_refused_in_words_that_name_it(constraint: Constraint, told: str) -> None:
    error = find_error(constraint)

    assert error is not None
    assert told in error
    assert error.endswith(".")
    assert len(error) < 400


def test_a_schema_that_is_too_large_is_told_which_limit_it_exceeds() -> None:
    many = [{"type": "string", "pattern": f"^a{{{number}}}"} for number in range(9)]
    for large, told in (
        (schema(type="object", properties={f"p{number}": {} for number in range(1001)}), "the limit is 1000"),
        (schema(type="object", patternProperties={f"^{number}": {} for number in range(25)}), "the limit is 24"),
        (schema(allOf=many), "the limit where 'allOf' may join them is 8"),
        (schema(anyOf=many * 15), "the limit is 128"),
        (schema(type="integer", multipleOf=1009), "more than 3 significant digits"),
    ):
        assert told in (find_error(large) or "")
    assert find_error(schema(type="number", multipleOf=0.25)) is None
    assert find_error(schema(type="integer", multipleOf=12_000)) is None


@pytest.mark.parametrize(
    ("kind", "good", "endless"),
    [
        ("email", f"{'a' * 64}@example.com", "a" * 65),
        ("email", f"a@{'b.' * 93}bc", f"a@{'b.' * 95}"),
        ("hostname", "a." * 100 + "b", "a." * 127),
        ("time", "12:30:00.123456789-01:00", "12:30:00.1234567890"),
        ("time", "12:30:00Z", "12:30:00." + "1" * 20),
        ("time", "12:30:59+12:26", "22:10:60"),
        ("date-time", "2022-02-03t12:30:59z", "2022-02-03T12:30:60"),
        ("date-time", "2022-02-03T12:30:00.1Z", "2022-02-03T12:30:00.1234567890"),
        ("duration", "P1Y2M3DT4H5M6S", "P" + "1" * 70),
    ],
)
def test_a_text_of_a_format_does_not_go_on_without_end(kind: str, good: str, endless: str) -> None:
    wanted = {"type": "string", "format": kind}
    for grammar in (
        grammar_of(schema(**wanted)),
        grammar_of(Constraint("grammar", f"start: %json {json.dumps(wanted)}")),
    ):
        assert _accepts(grammar, json.dumps(good))
        assert not _begins(grammar, json.dumps(endless)[:-1])
    own = grammar_of(schema(**wanted, maxLength=1000))
    assert _begins(own, json.dumps(endless)[:-1]), "the schema's own bound holds alone"


def test_what_looks_like_a_format_and_is_a_value_stays() -> None:
    value = {"type": "string", "format": "email"}
    for keyword, said in (("const", value), ("enum", [value])):
        assert _accepts(grammar_of(schema(**{keyword: said})), json.dumps(value, separators=(",", ":")))


def test_white_space_between_the_parts_of_json_is_bounded() -> None:
    grammar = grammar_of(schema(type="array", items={"type": "null"}))

    def accepts(text: str) -> bool:
        return _accepts(grammar, text)

    assert accepts("[null, null]")
    assert accepts("[\n  null,\n  null\n]")
    assert not accepts("[null," + " " * 50 + "null]")
    assert not accepts("[null,\n\n\n\nnull]")


def test_a_schema_in_a_grammar_is_kept_to_like_one_by_itself() -> None:
    grammar = grammar_of(Constraint("grammar", 'start: "<" %json {"type": "array", "items": {"type": "null"}} ">"'))

    assert _accepts(grammar, "<[null, null]>")
    assert not _accepts(grammar, "<[null," + " " * 50 + "null]>")
    assert not _accepts(grammar, "<[1]>")


def test_a_choice_is_written_as_it_was_given() -> None:
    grammar = grammar_of(Constraint("choice", json.dumps(['a"b', "é😀\n", "ab"])))

    assert all(_accepts(grammar, text) for text in ('a"b', "é😀\n", "ab"))
    assert not any(_accepts(grammar, text) for text in ("a", "abc", "b"))


def test_the_order_of_properties_is_the_schemas() -> None:
    text = '{"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}, "required": ["a", "z"]}'
    grammar = grammar_of(Constraint("json_schema", text))

    assert _accepts(grammar, '{"z":1,"a":2}')
    assert not _accepts(grammar, '{"a":2,"z":1}')


def test_a_message_becomes_a_short_sentence() -> None:
    assert describe("at 1(8): failed to compile JSON schema: Why\n  1 | start: ...") == "Why."
    assert describe("2(5): lexer error") == "2(5): lexer error."
    assert describe("") == "It can't be read."
    assert len(describe("x" * 10_000)) < 400
    assert find_error(Constraint("choice", "{}")) == "A choice is an array of strings, none of them empty."
    with pytest.raises(InvalidRequest):
        grammar_of(Constraint("choice", "{}"))


def _accepts(grammar: str, text: str) -> bool:
    """Whether the grammar matches the whole text, by llguidance's own tokenizer of single bytes."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def _begins(grammar: str, text: str) -> bool:
    """Whether something that the grammar matches begins with the text."""
    data = list(text.encode())
    return LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS).try_consume_tokens(data) == len(data)
