"""Calls out of an answer, while it comes: a parser for each family's format, and what they have in common.

Incremental and pure: text in, events out. Invariants: the events do not depend on how the text was cut; no part of a
marker is shown as content before it is known to be none; what turns out not to be a call is content, so nothing but
markers and the white space around calls is lost; time is linear in the text, and what is held is bounded by one call.

Sources of the formats: Llama 3.1, Meta's prompt_format.md ("JSON based tool calling"); Hermes and Qwen, the chat
templates of Hermes 2 Pro, Hermes 3, Qwen2.5 and Qwen3 and Qwen's function_call.md; Mistral, mistral-common's
instruct tokenizers (v3 and v7: an array; v11: a name with [CALL_ID] and [ARGS]; v13: a name with [ARGS]).
"""

import re
from collections.abc import Callable, Mapping
from typing import Literal

from penstock.text.tools.call_object import read_arguments, read_call
from penstock.text.tools.events import Event
from penstock.text.tools.feed import Feed, Steps

CallFormat = Literal["hermes", "llama3", "mistral"]
HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = frozenset({HERMES_OPEN, HERMES_CLOSE, PYTHON_TAG, TOOL_CALLS, CALL_ID, ARGS})
"""Markers of all formats. In many vocabularies they are special tokens, which the text of an answer leaves out."""
_MAX_NAME_CHARS = 256
_NAME_CHAR = re.compile(r"[A-Za-z0-9_.-]")


class ToolParser:
    """The parser of one answer. names: functions that may be called. holds_calls: see `Feed`."""

    def __init__(self, call_format: CallFormat, names: frozenset[str], *, holds_calls: bool) -> None:
        self._feed = Feed(holds_calls=holds_calls)
        self._steps = _FORMATS[call_format](self._feed, names)

    def push(self, text: str) -> list[Event]:
        """What the next piece of the answer brings; any length, also none."""
        self._feed.push(text)
        next(self._steps, None)
        return self._feed.take_events()

    def finish(self) -> list[Event]:
        """What is left at the end of the answer; only once."""
        self._feed.is_ended = True
        next(self._steps, None)
        self._feed.finish()
        return self._feed.take_events()


def _hermes(feed: Feed, names: frozenset[str]) -> Steps[None]:  # noqa: ARG001 (markers tell a call from other text)
    """Objects between <tool_call> and </tool_call>; Hermes 3 puts several between two markers."""
    while (yield from feed.content_until(HERMES_OPEN)):
        yield from feed.blank()
        if not (yield from read_call(feed)):
            feed.give_back()
            continue
        while True:
            yield from feed.blank()
            if (yield from feed.accept(HERMES_CLOSE)):
                yield from feed.blank()
                feed.forget()
                break
            if (yield from feed.peek()) != "{":
                feed.forget()  # the closing marker is missing, as it is at the end of an answer
                break
            if not (yield from read_call(feed)):
                feed.give_back()
                break


def _llama3(feed: Feed, names: frozenset[str]) -> Steps[None]:
    """Objects with `name` and `parameters`, with semicolons between them: at the beginning of an answer, or behind
    <|python_tag|>, which also stands before code. So only an object that calls one of `names` is a call."""
    feed.keep()
    yield from feed.blank()
    if (yield from feed.peek()) == "{":
        yield from _llama3_calls(feed, names.__contains__)
    else:
        feed.give_back()
    while (yield from feed.content_until(PYTHON_TAG)):
        yield from feed.blank()
        yield from _llama3_calls(feed, names.__contains__)


def _llama3_calls(feed: Feed, is_callable: Callable[[str], bool]) -> Steps[None]:
    while (yield from read_call(feed, is_callable)):
        yield from feed.blank()
        if (yield from feed.accept(";")):
            yield from feed.blank()
            yield from feed.accept(PYTHON_TAG)
            yield from feed.blank()
        elif (yield from feed.peek()) != "{":
            feed.forget()
            return
    feed.give_back()


def _mistral(feed: Feed, names: frozenset[str]) -> Steps[None]:  # noqa: ARG001 (markers tell a call from other text)
    """[TOOL_CALLS] with an array of objects, or before each call with the name and [ARGS]."""
    while (yield from feed.content_until(TOOL_CALLS)):
        yield from feed.blank()
        begin = yield from feed.peek()
        if begin == "[":
            is_whole = yield from _mistral_array(feed)
        elif begin == "{":
            is_whole = yield from read_call(feed)
        else:
            is_whole = yield from _mistral_named(feed)
        if is_whole:
            yield from feed.blank()
            feed.forget()
        else:
            feed.give_back()


def _mistral_array(feed: Feed) -> Steps[bool]:
    yield from feed.accept("[")
    yield from feed.blank()
    while (yield from read_call(feed)):
        yield from feed.blank()
        if not (yield from feed.accept(",")):
            return (yield from feed.accept("]"))
        yield from feed.blank()
    return False


def _mistral_named(feed: Feed) -> Steps[bool]:
    name = yield from feed.word(_NAME_CHAR, _MAX_NAME_CHARS)
    if not name:
        return False
    if (yield from feed.accept(CALL_ID)) and not (yield from feed.word(_NAME_CHAR, _MAX_NAME_CHARS)):
        return False
    yield from feed.accept(ARGS)
    yield from feed.blank()
    if (yield from feed.peek()) != "{":
        return False
    feed.begin_call(name)
    if not (yield from read_arguments(feed, feed.arguments)):
        return False
    feed.end_call()
    return True


_FORMATS: Mapping[CallFormat, Callable[[Feed, frozenset[str]], Steps[None]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}
