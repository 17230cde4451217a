"""Settings by dotted key, `kinds.0.prompts.tokens={constant: 64}`: changes a tree of mappings and lists as YAML makes
it, without knowing what it means."""

from pathlib import Path

import yaml

from penstock_loadtest.errors import ScenarioInvalid


class FromCommandLine(str):
    """A text that an override gave: as a path it is relative to the working directory, not to the scenario's file."""

    __slots__ = ()


def override(tree: dict[str, object], text: str) -> None:
    """Apply a setting `key=value`; the value is YAML. A part of the key that is a number counts from 0 in a list, and
    may add one item behind the last.

    What is missing on the way is made. Raises ScenarioInvalid.
    """
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ScenarioInvalid(f"{text!r} is no setting; write it like arrivals.rate=4.")
    try:
        parsed = _mark(yaml.safe_load(value))
    except yaml.YAMLError:
        raise ScenarioInvalid(
            f"{key}: {value!r} is not YAML; quote what holds any of : {{ }} [ ] , # at the wrong place."
        ) from None
    place: object = tree
    for depth, part in enumerate(parts[:-1]):
        place = _enter(place, part, parts[depth + 1], key)
    _set(place, parts[-1], parsed, key)


def resolve_path(value: object, base: Path) -> Path:
    """The path that a setting names: relative to `base` when it comes from the file; ~ is the home folder."""
    path = Path(str(value)).expanduser()
    return path.absolute() if isinstance(value, FromCommandLine) else base / path


def _enter(place: object, part: str, following: str, key: str) -> object:
    """The value at `part`; where there is none, a new list or mapping, whichever the part after it needs."""
    new: object = [] if following.isdecimal() else {}
    if isinstance(place, dict):
        if place.get(part) is None:
            place[part] = new
        return place[part]
    items, index = _item(place, part, key)
    if index == len(items):
        items.append(new)
    return items[index]


def _set(place: object, part: str, value: object, key: str) -> None:
    if isinstance(place, dict):
        place[part] = value
        return
    items, index = _item(place, part, key)
    items[index : index + 1] = [value]


def _item(place: object, part: str, key: str) -> tuple[list[object], int]:
    if not isinstance(place, list):
        raise ScenarioInvalid(f"{key} can't be set: {part!r} would be a part of {str(place)!r:.80}, which has none.")
    if not part.isdecimal() or int(part) > len(place):
        raise ScenarioInvalid(
            f"{key} can't be set: {part!r} names none of the {len(place)} items there, which count from 0."
        )
    return place, int(part)


def _mark(value: object) -> object:
    if isinstance(value, dict):
        return {key: _mark(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item) for item in value]
    return FromCommandLine(value) if isinstance(value, str) else value
