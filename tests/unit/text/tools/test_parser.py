"""Answers as the families' documentation prints them, cut anywhere; and answers that only look like calls."""

import json
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.tools.events import CallArguments, CallBegin, CallEnd, Content, Event
from penstock.text.tools.parser import MARKERS, CallFormat, ToolParser
from tests.unit.text.tools.outputs import DOCUMENTED, Documented

NAMES = frozenset({"f", *(name for case in DOCUMENTED.values() for name, _ in case.calls)})
FORMATS: tuple[CallFormat, ...] = ("hermes", "llama3", "mistral")


def parse(call_format: CallFormat, pieces: Iterable[str], holds_calls: bool) -> list[Event]:
    parser = ToolParser(call_format, NAMES, holds_calls=holds_calls)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.finish())


def joined(events: Sequence[Event]) -> list[Event]:
    """The events with neighbours of one kind put together, for where an answer is cut decides how many there are."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.number == last.number:
            found[-1] = CallArguments(last.number, last.text + event.text)
        else:
            found.append(event)
    return found


def content(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def calls(events: Sequence[Event]) -> list[tuple[str, object]]:
    """Complete calls, with their arguments read."""
    ended = {event.number for event in events if isinstance(event, CallEnd)}
    names = {event.number: event.name for event in events if isinstance(event, CallBegin)}
    texts = {event.number: event.text for event in events if isinstance(event, CallArguments)}
    assert sorted(names) == list(range(len(names)))
    return [(names[number], json.loads(texts[number])) for number in sorted(ended)]


def cut(text: str, places: Iterable[int]) -> list[str]:
    return [text[begin:end] for begin, end in pairwise(sorted({0, len(text), *(min(at, len(text)) for at in places)}))]


# --- documented answers


@pytest.mark.parametrize("holds_calls", [True, False])
@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_answer_is_read_as_its_documentation_says(name: str, holds_calls: bool) -> None:
    case = DOCUMENTED[name]

    for pieces in ([case.answer], list(case.answer)):
        events = parse(case.call_format, pieces, holds_calls)

        assert (content(events), calls(events)) == (case.content, case.calls)


@given(st.sampled_from(sorted(DOCUMENTED)), st.booleans(), st.lists(st.integers(0, 300), max_size=12))
def test_where_a_documented_answer_is_cut_changes_nothing(name: str, holds_calls: bool, places: list[int]) -> None:
    case = DOCUMENTED[name]

    cut_up = parse(case.call_format, cut(case.answer, places), holds_calls)

    assert cut_up == parse(case.call_format, [case.answer], holds_calls)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_answer_that_ends_too_early_loses_nothing(name: str) -> None:
    """Whatever was no complete call is content, to the character."""
    case = DOCUMENTED[name]
    for end in range(len(case.answer)):
        answer = case.answer[:end]
        events = parse(case.call_format, [answer], holds_calls=True)

        complete = calls(events)
        assert complete == case.calls[: len(complete)]
        if not complete:
            assert content(events) == answer


def test_a_call_is_passed_on_as_it_comes_with_its_name_once() -> None:
    parser = ToolParser("hermes", NAMES, holds_calls=False)

    events = [parser.push(piece) for piece in ("<tool_call>", '{"name": "f", "argu', 'ments": {"a"', ": 1", "}", "}")]

    assert events == [
        [],
        [],
        [CallBegin(0, "f"), CallArguments(0, '{"a"')],
        [CallArguments(0, ": 1")],
        [CallArguments(0, "}")],
        [CallEnd(0)],
    ]


def test_a_call_that_is_held_comes_when_it_is_complete() -> None:
    parser = ToolParser("hermes", NAMES, holds_calls=True)

    assert parser.push('<tool_call>{"name": "f", "arguments": {"a": 1}') == []
    assert parser.push("}") == [CallBegin(0, "f"), CallArguments(0, '{"a": 1}'), CallEnd(0)]


# --- content


@pytest.mark.parametrize("call_format", FORMATS)
@pytest.mark.parametrize("marker", sorted(MARKERS))
def test_no_half_marker_is_content_before_it_is_known_to_be_none(call_format: CallFormat, marker: str) -> None:
    for count in range(1, len(marker)):
        parser = ToolParser(call_format, NAMES, holds_calls=False)
        shown = content(parser.push(f"a {marker[:count]}"))

        assert shown in ("a", f"a {marker[:count]}")
        assert f"a {marker[:count]}~" == shown + content(parser.push("~"))
        if marker == {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}[call_format]:
            assert shown == "a"


@pytest.mark.parametrize("call_format", FORMATS)
@given(text=st.text(alphabet="ab <[{}\n\t", max_size=30), places=st.lists(st.integers(0, 30)))
def test_text_without_calls_comes_out_as_it_was(call_format: CallFormat, text: str, places: list[int]) -> None:
    events = parse(call_format, cut(text, places), holds_calls=False)

    assert content(events) == text
    assert calls(events) == []


def test_white_space_around_calls_is_left_out_and_other_white_space_is_not() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    events = parse("hermes", [f" One\n two \n\n{call} \n{call}\n\nthree \n"], holds_calls=False)

    assert content(events) == " One\n twothree \n"
    assert calls(events) == [("f", {}), ("f", {})]


# --- answers that only look like calls

MALFORMED: dict[str, tuple[CallFormat, str]] = {
    "no object": ("hermes", "<tool_call>f(1)</tool_call>"),
    "no name": ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    "a name that is none": ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    "an empty name": ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    "arguments that are no object": ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    "arguments in a string that are no object": ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    "two names": ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
    "single quotes": ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    "half a surrogate pair": ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    "a name without end": ("hermes", '<tool_call>{"name": "' + "f" * 300 + '"}</tool_call>'),
    "another format's object": ("llama3", '{"city": "Paris", "parameters": {}}'),
    "a function that nobody offered": ("llama3", '{"name": "Alice", "parameters": {}}'),
    "an object in the middle": ("llama3", 'The JSON is {"name": "f", "parameters": {}}'),
    "an empty array": ("mistral", "[TOOL_CALLS][]"),
    "no arguments": ("mistral", "[TOOL_CALLS]f[ARGS]"),
    "arguments of another kind": ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
    "nothing": ("mistral", "[TOOL_CALLS]"),
    "no id": ("mistral", '[TOOL_CALLS]f[CALL_ID][ARGS]{"a": 1}'),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_call_is_content_to_the_character(name: str) -> None:
    call_format, answer = MALFORMED[name]

    for holds_calls in (True, False):
        for pieces in ([answer], list(answer)):
            assert parse(call_format, pieces, holds_calls) == [Content(answer)]


def test_a_call_that_breaks_off_late_is_content_where_it_was_held_and_its_rest_where_it_was_not() -> None:
    answer = 'a <tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> b'

    assert parse("hermes", [answer], holds_calls=True) == [Content(answer)]
    assert parse("hermes", [answer], holds_calls=False) == [
        Content("a"),
        CallBegin(0, "f"),
        CallArguments(0, '{"a": '),
        Content("oops}}</tool_call> b"),
    ]


def test_behind_a_call_that_broke_off_the_next_one_is_found() -> None:
    answer = '<tool_call>{"name": <tool_call>\n{"name": "f", "arguments": {"a": 1}}</tool_call>'

    events = parse("hermes", [answer], holds_calls=True)

    assert (content(events), calls(events)) == ('<tool_call>{"name":', [("f", {"a": 1})])


LENIENT: dict[str, tuple[CallFormat, str]] = {
    "arguments in a string": ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'),
    "no closing marker": ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}'),
    "other keys": ("hermes", '<tool_call>{"id": [1, {"x": null}], "name": "f", "arguments": {"a": 1}}</tool_call>'),
    "no array": ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}'),
    "no marker before the arguments": ("mistral", '[TOOL_CALLS]f{"a": 1}'),
    "arguments instead of parameters": ("llama3", ' \n{"name": "f", "arguments": {"a": 1}}'),
    "a tag behind text": ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
}


@pytest.mark.parametrize("name", LENIENT)
def test_what_models_write_beside_the_format_is_read_too(name: str) -> None:
    call_format, answer = LENIENT[name]

    for pieces in ([answer], list(answer)):
        events = parse(call_format, pieces, holds_calls=False)
        assert (content(events), calls(events)) == ("", [("f", {"a": 1})])


def test_a_function_without_parameters_may_be_called_without_arguments() -> None:
    assert calls(parse("hermes", ['<tool_call>{"name": "f"}</tool_call>'], holds_calls=False)) == [("f", {})]


def test_text_behind_arguments_is_content_and_none_of_theirs() -> None:
    events = parse("mistral", ['[TOOL_CALLS]f[ARGS]{"a": 1} Done.'], holds_calls=False)

    assert (content(events), calls(events)) == ("Done.", [("f", {"a": 1})])


# --- any answer

FRAGMENTS = [
    *sorted(MARKERS),
    '{"name": "f"',
    ', "arguments": ',
    ', "parameters": ',
    '{"a": [1, "x"]}',
    "}",
    "]",
    "[",
    ";",
]
FRAGMENTS += [" ", "\n", "text", "f", '"', "\\", "{", ",", ":", "1", "é"]


@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.lists(st.integers(0, 120)))
def test_any_answer_is_read_the_same_however_it_is_cut(
    call_format: CallFormat, fragments: list[str], places: list[int]
) -> None:
    answer = "".join(fragments)
    for holds_calls in (True, False):
        whole = parse(call_format, [answer], holds_calls)

        assert parse(call_format, cut(answer, places), holds_calls) == whole
        assert parse(call_format, list(answer), holds_calls) == whole
        for _, arguments in calls(whole):
            assert isinstance(arguments, dict)


@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(FRAGMENTS), max_size=14))
def test_what_is_in_no_call_is_content_in_its_order(call_format: CallFormat, fragments: list[str]) -> None:
    answer = "".join(fragments)

    events = parse(call_format, [answer], holds_calls=True)

    at = 0
    for char in content(events):
        at = answer.index(char, at) + 1
    if not calls(events):
        assert content(events) == answer


HOSTILE: dict[str, tuple[CallFormat, str, str]] = {
    "markers": ("hermes", "", "<tool_call>"),
    "broken calls": ("hermes", "", '<tool_call>{"name": "f", "arguments": {x'),
    "calls": ("hermes", "", '<tool_call>{"name":"f","arguments":{}}</tool_call>'),
    "endless arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [', "1,"),
    "endless text in arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x"),
    "arguments before a name that never comes": ("hermes", '<tool_call>{"arguments": {"a": "', "x"),
    "endless arguments in a string": ("hermes", '<tool_call>{"name": "f", "arguments": "', "\\n"),
    "endless keys": ("hermes", '<tool_call>{"name": "f"', ', "k": 1'),
    "deep arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "["),
    "white space": ("hermes", "a", " "),
    "white space in a call": ("hermes", "<tool_call>", "\n"),
    "half markers": ("hermes", "", "<tool_cal"),
    "semicolons": ("llama3", "", '{"name": "f"};'),
    "objects": ("llama3", "", "{"),
    "tags": ("llama3", "", "<|python_tag|>{"),
    "arrays": ("mistral", "[TOOL_CALLS][", '{"name": "f", "arguments": {}},'),
    "names": ("mistral", "[TOOL_CALLS]", "f"),
    "brackets": ("mistral", "", "[TOOL_CALLS]["),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_answer_made_to_cost_much_takes_time_in_proportion_to_its_length(name: str) -> None:
    call_format, begin, unit = HOSTILE[name]
    answer = begin + unit * (400_000 // len(unit))
    for holds_calls in (True, False):
        for size in (5, len(answer)):
            parser = ToolParser(call_format, NAMES, holds_calls=holds_calls)
            began = time.process_time()

            for at in range(0, len(answer), size):
                parser.push(answer[at : at + size])
            parser.finish()

            assert time.process_time() - began < 10


@pytest.mark.parametrize("case", DOCUMENTED.values(), ids=list(DOCUMENTED))
def test_a_documented_call_is_not_taken_for_another_familys(case: Documented) -> None:
    for call_format in FORMATS:
        if call_format != case.call_format:
            assert calls(parse(call_format, [case.answer], holds_calls=True)) == []
