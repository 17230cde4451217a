from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.overrides import override, resolve_path

KEYS = st.lists(st.text("abc_", min_size=1, max_size=3) | st.just("0"), min_size=1, max_size=4)


def changed(tree: dict[str, object], *texts: str) -> dict[str, object]:
    for text in texts:
        override(tree, text)
    return tree


def test_a_value_is_read_as_yaml() -> None:
    tree = changed(
        {}, "a=4", "b=2.5", "c=true", "d=null", "e=[1, 2]", "f={constant: 64}", "g=some text", "h='4'", "i=x=y"
    )

    assert tree == {
        "a": 4,
        "b": 2.5,
        "c": True,
        "d": None,
        "e": [1, 2],
        "f": {"constant": 64},
        "g": "some text",
        "h": "4",
        "i": "x=y",
    }


def test_a_key_reaches_into_mappings_and_lists() -> None:
    tree: dict[str, object] = {
        "kinds": [{"name": "chat"}, {"name": "code", "prompts": {"path": "a", "tokens": {"uniform": [1, 2]}}}]
    }

    changed(tree, "kinds.1.prompts.path=b", "kinds.0.weight=3", "kinds.1.prompts.tokens.uniform.1=9")

    assert tree == {
        "kinds": [
            {"name": "chat", "weight": 3},
            {"name": "code", "prompts": {"path": "b", "tokens": {"uniform": [1, 9]}}},
        ]
    }


def test_what_is_missing_on_the_way_is_made() -> None:
    assert changed({"trace": None}, "trace.path=x", "kinds.0.weight=3", "kinds.1.name=b") == {
        "trace": {"path": "x"},
        "kinds": [{"weight": 3}, {"name": "b"}],
    }


@given(KEYS, st.integers())
def test_what_was_set_is_found_at_its_key(key: list[str], value: int) -> None:
    place: object = changed({}, f"{'.'.join(key)}={value}")

    for part in key:
        place = place[part] if isinstance(place, dict) else place[int(part)]  # type: ignore[index]
    assert place == value


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rate", "'rate' is no setting; write it like arrivals.rate=4."),
        ("=4", "'=4' is no setting"),
        ("a..b=4", "'a..b=4' is no setting"),
        ("a={b", "a: '{b' is not YAML"),
        ("name.x=4", "name.x can't be set: 'x' would be a part of 'load', which has none."),
        ("kinds.x.y=4", "kinds.x.y can't be set: 'x' names none of the 1 items there"),
        ("kinds.2=4", "kinds.2 can't be set: '2' names none of the 1 items there"),
        ("kinds.-1=4", "kinds.-1 can't be set: '-1' names none"),
    ],
)
def test_what_can_not_be_set_is_a_sentence_with_the_key(text: str, sentence: str) -> None:
    with pytest.raises(ScenarioInvalid) as caught:
        override({"name": "load", "kinds": [{}]}, text)

    assert sentence in str(caught.value)


def test_a_path_of_an_override_is_relative_to_the_working_directory_and_of_a_file_to_the_file() -> None:
    tree = changed({"path": "a.jsonl"}, "kinds=[{path: b.jsonl}]", "absolute=/c.jsonl")
    kinds = tree["kinds"]

    assert resolve_path(tree["path"], Path("/base")) == Path("/base/a.jsonl")
    assert isinstance(kinds, list)
    assert resolve_path(kinds[0]["path"], Path("/base")) == Path("b.jsonl").absolute()
    assert resolve_path(tree["absolute"], Path("/base")) == Path("/c.jsonl")
    assert resolve_path("~/d.jsonl", Path("/base")) == Path.home() / "d.jsonl"
