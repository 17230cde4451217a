"""JSON schemas to hold constrained answers against, made here: twenty kinds, from a flat object to a tree, ten of each,
with enums, references, patterns, formats, numbers in ranges, alternatives and nesting.

The same number gives the same schema. Nothing in them keeps an answer short that a user's own schema would not have: a
name is a string of any length.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

NUM_SCHEMAS = 200

Schema = dict[str, Any]


class SchemaTask(NamedTuple):
    """A schema, and what a request for such an answer says."""

    name: str
    schema: Schema
    subject: str

    @property
    def prompts(self) -> tuple[str, str]:
        """Two prompts: one that shows the schema, one that does not."""
        return (
            f"Write {self.subject} as JSON that follows this schema:\n{json.dumps(self.schema)}",
            f"Give me {self.subject}, as JSON.",
        )


def make_schemas(count: int = NUM_SCHEMAS) -> list[SchemaTask]:
    """The first so many schemas; the kinds come by turns."""
    kinds = list(_KINDS.items())
    found = []
    for number in range(count):
        name, (subject, make) = kinds[number % len(kinds)]
        found.append(SchemaTask(f"{name} {number // len(kinds)}", make(random.Random(f"{name} {number}")), subject))
    return found


STRING: Schema = {"type": "string"}
_WORDS = ("red", "green", "blue", "low", "high", "open", "closed", "north", "south", "new", "used", "daily", "weekly")
_FIELDS = ("width", "height", "depth", "weight", "price", "count", "rank", "score", "year", "level")


def _object(properties: dict[str, Schema], *, optional: tuple[str, ...] = (), **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
        **more,
    }


def _range(draw: random.Random) -> Schema:
    least = draw.choice((-100, -1, 0, 1, 18, 1900))
    return {"type": "integer", "minimum": least, "maximum": least + draw.choice((1, 9, 60, 120, 1000))}


def _share(draw: random.Random) -> Schema:
    return {"type": "number", "minimum": 0, draw.choice(("maximum", "exclusiveMaximum")): draw.choice((1, 5, 100))}


def _enum(draw: random.Random) -> Schema:
    return {"enum": draw.sample(_WORDS, draw.randint(2, 6))}


def _person(draw: random.Random) -> Schema:
    more = draw.sample(("city", "country", "job", "hobby", "employer", "language"), draw.randint(1, 4))
    age = {"type": "integer", "minimum": 0, "maximum": 120}
    return _object({"name": STRING, "age": age} | dict.fromkeys(more, STRING))


def _label(draw: random.Random) -> Schema:
    return _object({name: _enum(draw) for name in draw.sample(("status", "color", "side", "kind"), 3)})


def _numbers(draw: random.Random) -> Schema:
    return _object({name: draw.choice((_range, _share))(draw) for name in draw.sample(_FIELDS, draw.randint(2, 6))})


def _patterns(draw: random.Random) -> Schema:
    letters, digits = draw.randint(1, 3), draw.randint(2, 6)
    return _object(
        {
            "id": {"type": "string", "pattern": f"^[A-Z]{{{letters}}}-[0-9]{{{digits}}}$"},
            "version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
            "slug": {"type": "string", "pattern": f"^[a-z]+(-[a-z]+){{0,{draw.randint(1, 4)}}}$"},
        }
    )


def _words(draw: random.Random) -> Schema:
    least = draw.randint(1, 3)
    items = {"type": "string", "minLength": 1, "maxLength": draw.randint(8, 40)}
    return _object({"tags": {"type": "array", "items": items, "minItems": least, "maxItems": least + 4}})


def _list_of_objects(draw: random.Random) -> Schema:
    item = _object({"product": STRING, "quantity": _range(draw), "price": _share(draw)})
    return _object({"order": {"type": "array", "items": item, "minItems": 1, "maxItems": draw.randint(2, 4)}})


def _nested(draw: random.Random) -> Schema:
    schema: Schema = _object({"value": _range(draw)})
    for name in draw.sample(("room", "floor", "building", "street", "city"), draw.randint(3, 5)):
        schema = _object({"name": {"type": "string", "maxLength": 30}, name: schema})
    return schema


def _references(draw: random.Random) -> Schema:
    point = _object({"x": _share(draw), "y": _share(draw)})
    line = _object({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}})
    return _object(
        {
            "main": {"$ref": "#/$defs/line"},
            "others": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 2},
        },
    ) | {"$defs": {"point": point, "line": line}}


def _tree(draw: random.Random) -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": draw.randint(1, 2)}
    label = {"type": "string", "maxLength": draw.randint(8, 60)}
    node = _object({"label": label, "children": children, "side": _enum(draw)}, optional=("children",))
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _shapes(draw: random.Random) -> Schema:
    circle = _object({"shape": {"const": "circle"}, "radius": _share(draw)})
    box = _object({"shape": {"const": "box"}, "width": _share(draw), "height": _share(draw)})
    return {"anyOf": [circle, box, _object({"shape": {"const": "none"}, "color": _enum(draw)})]}


def _nullable(draw: random.Random) -> Schema:
    return _object(
        {
            "title": {"type": ["string", "null"]},
            "year": {"anyOf": [_range(draw), {"type": "null"}]},
            "state": {"anyOf": [_enum(draw), {"type": "null"}]},
            "isbn": {"type": ["string", "null"], "pattern": "^97[89][0-9]{10}$"},
        }
    )


def _tuple(draw: random.Random) -> Schema:
    parts = [_range(draw), _enum(draw), {"type": "boolean"}, _share(draw)]
    draw.shuffle(parts)
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _map(draw: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {"total": _range(draw)},
        "required": ["total"],
        "additionalProperties": _share(draw),
    }


def _one_of(draw: random.Random) -> Schema:
    return _object(
        {"value": {"oneOf": [_range(draw), {"type": "string", "maxLength": draw.randint(5, 20)}, {"type": "boolean"}]}}
    )


def _lengths(draw: random.Random) -> Schema:
    least = draw.randint(1, 10)
    return _object(
        {
            "title": {"type": "string", "minLength": least, "maxLength": least + 30},
            "summary": {"type": "string", "minLength": 20, "maxLength": draw.randint(100, 200)},
        }
    )


def _optional(draw: random.Random) -> Schema:
    names = draw.sample(("wifi", "parking", "pool", "garden", "lift", "pets"), draw.randint(3, 6))
    return _object({name: {"type": "boolean"} for name in names} | {"state": _enum(draw)}, optional=tuple(names[1:]))


def _formats(draw: random.Random) -> Schema:
    kinds = draw.sample(("date", "date-time", "time", "uuid", "ipv4", "email"), 3)
    named = {kind.replace("-", "_"): {"type": "string", "format": kind} for kind in kinds}
    return _object(named | {"level": _enum(draw)})


def _matrix(draw: random.Random) -> Schema:
    rows, columns = draw.randint(2, 3), draw.randint(2, 4)
    row = {"type": "array", "items": _range(draw), "minItems": columns, "maxItems": columns}
    return _object({"matrix": {"type": "array", "items": row, "minItems": rows, "maxItems": rows}})


def _call(draw: random.Random) -> Schema:
    arguments = _object({"place": STRING, "days": _range(draw), "unit": _enum(draw)}, optional=("unit",))
    return _object({"name": {"const": "get_weather"}, "arguments": arguments})


def _survey(draw: random.Random) -> Schema:
    answer = _object({"question": STRING, "answer": _enum(draw), "certainty": _share(draw)})
    person = _object({"role": _enum(draw), "years": _range(draw)})
    return _object(
        {
            "by": person,
            "answers": {"type": "array", "items": {"$ref": "#/$defs/answer"}, "minItems": 1, "maxItems": 3},
            "remark": {"type": ["string", "null"], "maxLength": 60},
        },
        optional=("remark",),
        **{"$defs": {"answer": answer}},
    )


_KINDS: dict[str, tuple[str, Callable[[random.Random], Schema]]] = {
    "person": ("a description of a person", _person),
    "label": ("the labels of a parcel", _label),
    "numbers": ("the measures of a box", _numbers),
    "patterns": ("the record of a software package", _patterns),
    "words": ("tags for an article about rivers", _words),
    "objects in a list": ("an order at a bakery", _list_of_objects),
    "nested": ("an address", _nested),
    "references": ("a drawing of lines", _references),
    "tree": ("a tree of topics", _tree),
    "alternatives": ("a shape", _shapes),
    "nullable": ("a book", _nullable),
    "tuple": ("a measurement", _tuple),
    "map": ("shares by country", _map),
    "one of": ("a setting", _one_of),
    "lengths": ("a summary of a film", _lengths),
    "optional": ("the features of a house", _optional),
    "formats": ("the entry of a log", _formats),
    "matrix": ("a matrix of numbers", _matrix),
    "call": ("a call for the weather in Rome", _call),
    "survey": ("the answers of a survey", _survey),
}
"""What is asked for, and how its schema is made, by kind."""
