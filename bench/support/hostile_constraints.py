"""Constraints that are meant to hurt: huge, deep, recursive, exponential. Each is refused within a bounded time, or can
be followed with a bounded effort for each token."""

import json
import random
from typing import Any

from penstock.wire.frames import Constraint


def _schema(**keywords: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(keywords))


def _deep(depth: int, inner: Any, key: str = "items") -> Any:
    for _ in range(depth):
        inner = {"type": "array", key: inner}
    return inner


def _objects(depth: int, width: int) -> Any:
    if not depth:
        return {"type": "string"}
    return {"type": "object", "properties": {f"p{index}": _objects(depth - 1, width) for index in range(width)}}


def _chain(length: int, link: Any) -> dict[str, Any]:
    """Definitions, each of which names the next one."""
    return {f"d{index}": link(f"#/$defs/d{index + 1}") for index in range(length)} | {f"d{length}": {"type": "null"}}


def _doubling(depth: int, word: str) -> Any:
    """A schema that is as large as two to the depth when its references are written out."""
    definitions: dict[str, Any] = {"d0": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for index in range(depth):
        reference = {"$ref": f"#/$defs/d{index}"}
        definitions[f"d{index + 1}"] = {word: [reference, reference]}
    return {"$defs": definitions, "$ref": f"#/$defs/d{depth}"}


def _words(count: int, length: int) -> list[str]:
    draw = random.Random(1)
    return ["".join(draw.choices("abcdefgh", k=length)) for _ in range(count)]


HOSTILE: dict[str, Constraint] = {
    # huge
    "text beyond the bound": Constraint("regex", "a" * 70_000),
    "text at the bound": Constraint("regex", "ab" * 32_000),
    "schema beyond the bound": _schema(description="x" * 70_000),
    "properties, thousands": _schema(
        type="object", properties={f"p{index}": {} for index in range(5000)}, additionalProperties=False
    ),
    "required properties, thousands": _schema(
        type="object",
        properties={f"p{index}": {"type": "null"} for index in range(1500)},
        required=[f"p{index}" for index in range(1500)],
    ),
    "enum, thousands of words": _schema(enum=_words(3000, 16)),
    "enum, one word of 60000": _schema(enum=["ab" * 30_000]),
    "const, a deep value": _schema(const=_deep(60, 1)),
    "choice, a thousand words": Constraint("choice", json.dumps(_words(1000, 50))),
    "alternatives of regexes": _schema(
        anyOf=[{"type": "string", "pattern": f"^{word}.*{word[::-1]}$"} for word in _words(400, 8)]
    ),
    "pattern properties, hundreds": _schema(
        type="object", patternProperties={f"^{word}": {"type": "null"} for word in _words(300, 8)}
    ),
    "properties at the bound": _schema(
        type="object", properties={f"p{index}": {} for index in range(1000)}, additionalProperties=False
    ),
    "pattern properties at the bound": _schema(
        type="object", patternProperties={f"^{word}": {"type": "null"} for word in _words(24, 8)}
    ),
    "patterns to join at the bound": _schema(
        allOf=[{"type": "string", "pattern": f"(a|b)*a(a|b){{{index}}}"} for index in range(6, 14)]
    ),
    "patterns at the bound": _schema(
        type="object",
        properties={f"p{index}": {"type": "string", "pattern": f"(a|b)*a(a|b){{{index}}}"} for index in range(128)},
    ),
    "a multiple at the bound": _schema(type="number", multipleOf=0.997),
    # deep
    "arrays, 60 deep": _schema(**_deep(60, {"type": "null"})),
    "arrays, 1000 deep": Constraint("json_schema", '{"items":' * 1000 + "{}" + "}" * 1000),
    "brackets of JSON, 30000": Constraint("json_schema", "[" * 30_000),
    "objects, 5 of 5 deep": _schema(**_objects(5, 5)),
    "brackets of a regex, 30000": Constraint("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "brackets of a regex, 60": Constraint("regex", "(" * 60 + "a" + ")*" * 60),
    "brackets of a grammar, 60": Constraint("grammar", "start: " + "(" * 60 + '"a"' + ")*" * 60),
    "optional brackets of a grammar, 60": Constraint("grammar", "start: " + "[" * 60 + '"a"' + "]" * 60),
    "rules in a chain, 1000": Constraint(
        "grammar", "start: r0\n" + "".join(f"r{index}: r{index + 1}\n" for index in range(1000)) + 'r1000: "a"'
    ),
    "tokens in a chain, 1000": Constraint(
        "grammar", "start: T0\n" + "".join(f'T{index}: "a" T{index + 1}\n' for index in range(1000)) + 'T1000: "a"'
    ),
    "references in a chain, 900": _schema(**{"$defs": _chain(900, lambda name: {"$ref": name}), "$ref": "#/$defs/d0"}),
    "allOf in a chain, 600": _schema(
        **{"$defs": _chain(600, lambda name: {"allOf": [{"$ref": name}, {"type": "null"}]}), "$ref": "#/$defs/d0"}
    ),
    "arrays of references, 900": _schema(
        **{"$defs": _chain(900, lambda name: {"type": "array", "items": {"$ref": name}}), "$ref": "#/$defs/d0"}
    ),
    # recursive
    "a reference to itself": _schema(**{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "references in a circle": _schema(
        **{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "allOf of itself": _schema(**{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
    "a tree": _schema(
        **{
            "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "minItems": 2}},
            "$ref": "#/$defs/t",
        }
    ),
    "a rule that is itself": Constraint("grammar", "start: start"),
    "left and right recursion": Constraint("grammar", 'start: start start | "a"'),
    "empty recursion": Constraint("grammar", 'start: start start | "a" | ""'),
    "a token that is itself": Constraint("grammar", 'start: A\nA: "a" A'),
    # exponential
    "references doubled 30 times, allOf": _schema(**_doubling(30, "allOf")),
    "references doubled 30 times, anyOf": _schema(**_doubling(30, "anyOf")),
    "references doubled 30 times, oneOf": _schema(**_doubling(30, "oneOf")),
    "nested repetitions of a regex": Constraint("regex", "((a{1,100}){1,100}){1,100}"),
    "nested stars": Constraint("regex", "((a*)*b*)*c"),
    "a state for each of many suffixes": Constraint("regex", "(a|b)*a(a|b){24}"),
    "counted classes": Constraint("regex", r"(\w{1,500}\W{1,500}){1,50}"),
    "intersections of patterns": _schema(
        allOf=[{"type": "string", "pattern": f"(a|b)*a(a|b){{{index}}}"} for index in range(8, 20)]
    ),
    "a repetition of a million": Constraint("regex", "a{1000000}"),
    "a repetition of a billion": Constraint("grammar", 'start: "a"{1000000000}'),
    "items, a million": _schema(type="array", items={"type": "null"}, minItems=1_000_000, maxItems=1_000_000),
    "items of items, thousands": _schema(
        type="array", minItems=1000, maxItems=1000, items={"type": "array", "minItems": 1000, "maxItems": 1000}
    ),
    "a string of exactly a million": _schema(type="string", minLength=1_000_000, maxLength=1_000_000),
    "integers in a range of 300 digits": _schema(type="integer", minimum=10**17 + 1, maximum=9 * 10**17),
    "multiples of a prime": _schema(type="integer", multipleOf=999_983),
    "multiples of several primes": _schema(allOf=[{"type": "integer", "multipleOf": p} for p in (7919, 7907, 7901)]),
    "an ambiguous grammar": Constraint("grammar", 'start: a+\na: b | c | d\nb: "x"+\nc: "x"*\nd: b c b'),
    "optional properties, 60": _schema(
        type="object", properties={f"p{index}": {"type": "integer"} for index in range(60)}, additionalProperties=False
    ),
    "everything may be anything": _schema(anyOf=[{} for _ in range(500)]),
    # malformed
    "no JSON": Constraint("json_schema", '{"type": "object"'),
    "a number too large": Constraint("json_schema", '{"type": "integer", "maximum": 1e400}'),
    "a class that is open": Constraint("regex", "[a-"),
    "a grammar of noise": Constraint("grammar", "".join(map(chr, range(1, 127))) * 100),
    "bytes that are no text": Constraint("regex", r"(?-u:\xff)+"),
    "a schema from elsewhere": _schema(**{"$ref": "http://127.0.0.1:1/schema.json"}),
    "special tokens": Constraint("grammar", "start: <|im_start|> <[1-2000]>*"),
}
