"""Python's json module is the oracle, at every cut."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.tools.json_scanner import MAX_DEPTH, MAX_LITERAL_CHARS, JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def scanned(text: str, cuts: list[int]) -> tuple[int, bool, bool]:
    """Characters that were taken, and the outcome, of a text cut at those places."""
    scanner, taken = JsonScanner(), 0
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for begin, end in pairwise(places):
        taken += scanner.scan(text[begin:end])
        if scanner.is_done or scanner.is_broken:
            break
    return taken, scanner.is_done, scanner.is_broken


@given(VALUES, st.booleans(), st.sampled_from(["", "x", "}", " ,", '"']), st.lists(st.integers(0, 60)))
def test_a_value_ends_where_json_says_so_however_it_is_cut(
    value: object, is_ascii: bool, rest: str, cuts: list[int]
) -> None:
    text = json.dumps([value], ensure_ascii=is_ascii, indent=1 if is_ascii else None)

    assert scanned(text + rest, cuts) == (len(text), True, False)


@given(st.text(alphabet='{}[]",:\\u0aE-+.1 tfn\x01', max_size=14), st.lists(st.integers(0, 14)))
def test_what_is_no_json_is_never_done_and_what_is_json_never_broken(text: str, cuts: list[int]) -> None:
    taken, is_done, is_broken = scanned(text, cuts)

    assert (taken, is_done, is_broken) == scanned(text, [])
    try:
        _, end = json.JSONDecoder().raw_decode(text.lstrip(" "))
    except ValueError:
        assert not is_done
        return
    if text.lstrip(" ")[:1] in ("{", "[", '"'):
        assert (is_done, taken) == (True, end + len(text) - len(text.lstrip(" ")))


@pytest.mark.parametrize(
    "text",
    [
        '{"a" 1}',
        '{"a": 1,}',
        "[1,]",
        "[1 2]",
        "[01]",
        "[1.]",
        "[+1]",
        "[tru]",
        "[NaN]",
        '["\\x"]',
        '["\\u12g4"]',
        '["\n"]',
        "{a: 1}",
        "['a']",
        "[}",
        "]",
        "[" * (MAX_DEPTH + 1),
        "[" + "1" * (MAX_LITERAL_CHARS + 1),
    ],
)
def test_what_can_not_become_json_is_broken_at_once_and_at_the_same_place(text: str) -> None:
    found = scanned(text, [])

    assert found[1:] == (False, True)
    assert found == scanned(text, list(range(len(text))))


def test_as_much_as_is_allowed_is_not_broken() -> None:
    assert scanned("[" * MAX_DEPTH + "]" * MAX_DEPTH, [])[1:] == (True, False)
    assert scanned("[" + "1" * MAX_LITERAL_CHARS + "]", [])[1:] == (True, False)


@pytest.mark.parametrize("unit", ['"a', "[[]", '{"a":{', "1", "\\u0000", " "])
def test_time_is_linear_in_the_text(unit: str) -> None:
    """A million characters, most of which break it off or never end it."""
    text = '["' + unit * (10**6 // len(unit))
    began = time.process_time()

    scanner = JsonScanner()
    for at in range(0, len(text), 7):
        scanner.scan(text[at : at + 7])

    assert time.process_time() - began < 5
