"""The text of an answer as a parser reads it: it comes in pieces, and what is read becomes content or a call.

A parser is a generator over a `Feed`, which yields whenever it needs more text than has come. Invariants: what is read
becomes content, an event of a call, or white space and markers around a call, never two of these, and nothing else is
lost; how the text was cut changes nothing; a character is read a bounded number of times.
"""

import re
from collections.abc import Generator
from typing import TypeVar

from penstock.text.tools.events import CallArguments, CallBegin, CallEnd, Content, Event
from penstock.text.tools.json_scanner import JsonScanner

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reading that may have to wait for more text, and then returns a T."""
_BLANK_CHARS = " \t\n\r"
_BLANK = re.compile(r"[ \t\n\r]+")


class Feed:
    """The answer's text and what has been made of it.

    holds_calls: a call is passed on when it is complete, and one that breaks off is content. Else a call is passed on
    as it comes, and of one that breaks off the rest is content.
    """

    def __init__(self, *, holds_calls: bool) -> None:
        self.is_ended = False
        self._holds_calls = holds_calls
        self._text = ""
        self._at = 0
        self._events: list[Event] = []
        self._held: list[str] = []
        """White space behind the last content, which belongs to a call if one follows."""
        self._kept: list[str] | None = None
        """What has been read since `keep` and is in no event yet; None: it is not kept."""
        self._waiting: list[Event] = []
        """Events of a call that is held until it is complete."""
        self._num_calls = 0
        self._has_begun = False

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def take_events(self) -> list[Event]:
        """What was found since they were last taken."""
        events, self._events = self._events, []
        return events

    # --- reading

    def peek(self) -> Steps[str]:
        """The next character, which stays unread; "" at the end of the answer."""
        while self._at == len(self._text):
            if self.is_ended:
                return ""
            yield
        return self._text[self._at]

    def blank(self) -> Steps[None]:
        """Read white space, if there is any."""
        while (yield from self.peek()):
            match = _BLANK.match(self._text, self._at)
            if match is None:
                return
            self._read(match.end())

    def accept(self, literal: str) -> Steps[bool]:
        """Read `literal` if it comes next. Returns whether it did."""
        while True:
            came = self._text[self._at : self._at + len(literal)]
            if came == literal:
                self._read(self._at + len(literal))
                return True
            if self.is_ended or not literal.startswith(came):
                return False
            yield

    def word(self, pattern: re.Pattern[str], max_chars: int) -> Steps[str]:
        """Read characters that match `pattern` each; "" if there are none, or more than `max_chars`."""
        found: list[str] = []
        while (char := (yield from self.peek())) and pattern.match(char):
            if len(found) == max_chars:
                return ""
            found.append(self._read(self._at + 1))
        return "".join(found)

    def json_part(self, scanner: JsonScanner) -> Steps[str]:
        """Read as much of a JSON value as has come, at least a character; "" where the value is done or broken, or the
        answer ends."""
        while not (scanner.is_done or scanner.is_broken) and (yield from self.peek()):
            end = scanner.scan(self._text, self._at)
            if end > self._at:
                return self._read(end)
        return ""

    # --- content and calls

    def content_until(self, marker: str) -> Steps[bool]:
        """Pass content on until `marker` comes, which is read and kept. Returns False at the end of the answer."""
        while (yield from self.peek()):
            text, at = self._text, self._at
            begin = text.find(marker, at)
            if begin < 0:
                self._at = len(text) if self.is_ended else len(text) - _num_undecided(text, at, marker)
                self._pass_on(text[at : self._at])
                if self._at < len(text):
                    yield
                continue
            self._at = begin
            self._pass_on(text[at:begin])
            self.keep()
            self._read(begin + len(marker))
            return True
        return False

    def keep(self) -> None:
        """Keep what is read from here on, and the white space before it, until a call has it, `give_back` or
        `forget`."""
        self._kept, self._held = self._held, []

    def give_back(self) -> None:
        """What is kept was no call after all: it is content."""
        kept = "".join(self._kept or ())
        if self._has_begun and not self._holds_calls:
            self._num_calls += 1  # whoever saw it begin knows it by its number
        self._kept, self._waiting, self._has_begun = None, [], False
        self._pass_on(kept)

    def forget(self) -> None:
        """What is kept is white space and markers around a call."""
        self._kept = None

    def begin_call(self, name: str) -> None:
        self._has_begun = True
        self._emit(CallBegin(self._num_calls, name))

    def arguments(self, text: str) -> None:
        """Pass arguments on, the last ones of which were just read."""
        if text:
            self._emit(CallArguments(self._num_calls, text))

    def end_call(self) -> None:
        """The call is complete. What is read from here on is kept anew."""
        self._emit(CallEnd(self._num_calls))
        self._events += self._waiting
        self._kept, self._waiting, self._has_begun = [], [], False
        self._num_calls += 1

    def finish(self) -> None:
        """The answer has ended, and all of it is read: white space at the end of its content is content."""
        if self._held:
            self._events.append(Content("".join(self._held)))
            self._held = []

    def _read(self, end: int) -> str:
        """Read up to position `end`."""
        text, self._at = self._text[self._at : end], end
        if self._kept is not None:
            self._kept.append(text)
        return text

    def _pass_on(self, text: str) -> None:
        """Pass content on, but for the white space that it ends with."""
        body = text.rstrip(_BLANK_CHARS)
        if body:
            self._events.append(Content("".join([*self._held, body])))
            self._held = []
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def _emit(self, event: Event) -> None:
        if self._holds_calls:
            self._waiting.append(event)
        else:
            self._events.append(event)
            self._kept = []


def _num_undecided(text: str, at: int, marker: str) -> int:
    """Characters at the end of `text`, behind `at`, that may be the beginning of the marker."""
    longest = min(len(marker) - 1, len(text) - at)
    return next((count for count in range(longest, 0, -1) if text.endswith(marker[:count])), 0)
