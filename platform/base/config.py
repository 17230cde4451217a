"""YAML files to frozen msgspec structs, and mistakes to sentences.

Whatever is wrong with a file is one ConfigError of one sentence: file, path of the field, offending value, and for an
unknown key the nearest one that exists. The structs themselves refuse impossible values (`__post_init__` raising
ConfigError); here the file's name is added.
"""

import difflib
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import inspect

from penstock.base.errors import ConfigError

T = TypeVar("T")
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<where>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<key>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<key>[^`]*)`")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a string, which no one means; and it lets the second of two equal keys win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands there twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load(path: Path, kind: type[T]) -> T:
    """The file as a `kind`. Raises ConfigError, with one sentence."""
    try:
        return parse(path.read_text(encoding="utf-8"), kind, name=str(path))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}).") from error


def parse(text: str, kind: type[T], *, name: str) -> T:
    """The YAML `text` as a `kind`; `name` is what errors call it. An empty text is an empty mapping. Raises
    ConfigError."""
    try:
        data = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: is not valid YAML{_yaml_detail(error)}.") from error
    return convert({} if data is None else data, kind, name=name)


def convert(data: Any, kind: type[T], *, name: str) -> T:
    """What was read from YAML or JSON as a `kind`. Raises ConfigError."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {_explain(str(error), data, kind)}.") from error
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message.rstrip('.')}.") from error


def _yaml_detail(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ""
    return f", line {error.problem_mark.line + 1}: {error.problem}"


def _explain(message: str, data: Any, kind: type) -> str:
    """msgspec's message about `data`, as a sentence with the place and the value."""
    match = _AT.match(message)
    assert match is not None
    what, path = match["what"], (match["where"] or "$").removeprefix("$")
    at, here = path.lstrip("."), _type_at(path, kind)
    if unknown := _UNKNOWN.search(what):
        return _explain_unknown(
            unknown["key"],
            at,
            [field.encode_name for field in here.fields] if isinstance(here, inspect.StructType) else [],
        )
    if missing := _MISSING.search(what):
        return f"{_join(at, missing['key'])} is required and missing"
    wanted = (
        f"one of {', '.join(map(str, here.values))}"
        if isinstance(here, inspect.LiteralType)
        else what.split(", got")[0].removeprefix("Expected ")
    )
    return f"{at or 'the file'} must be {wanted}, not {_value_at(path, data)!r}"


def _explain_unknown(key: str, at: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
    return f"{_join(at, key)} is not a known setting ({hint})"


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _value_at(path: str, data: Any) -> Any:
    """What stands in `data` at msgspec's path, as far as the path names it."""
    for step in _STEP.finditer(path):
        if step["name"] is not None and isinstance(data, dict) and step["name"] in data:
            data = data[step["name"]]
        elif step["index"] is not None and isinstance(data, list):
            data = data[int(step["index"])]
        else:
            break
    return data


def _type_at(path: str, kind: type) -> inspect.Type:
    """The type at msgspec's path; of an optional struct, the struct."""
    here: inspect.Type = _struct_in(inspect.type_info(kind))
    for step in _STEP.finditer(path):
        if step["name"] is not None and isinstance(here, inspect.StructType):
            here = next(field.type for field in here.fields if field.encode_name == step["name"])
        elif isinstance(here, inspect.VarTupleType | inspect.ListType):
            here = here.item_type
        here = _struct_in(here)
    return here


def _struct_in(here: inspect.Type) -> inspect.Type:
    if isinstance(here, inspect.UnionType):
        return next((member for member in here.types if isinstance(member, inspect.StructType)), here)
    return here
