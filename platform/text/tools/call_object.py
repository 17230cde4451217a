"""A call as an object: `{"name": "f", "arguments": {...}}`, in any order of its keys.

Some models write `parameters` instead of `arguments`, or the arguments as a string with JSON in it; other keys (`id`,
`type`) are skipped. Invariant: a call begins only once its name and the first character of its arguments are known.
"""

import json
from collections.abc import Callable

from penstock.text.tools.feed import Feed, Steps
from penstock.text.tools.json_scanner import JsonScanner

MAX_KEY_CHARS = 256
"""Characters of a key or name as JSON; one more is taken for malformed."""
MAX_STRING_CHARS = 2**20
"""Characters of arguments that are a string with JSON in it."""
_ARGUMENTS = frozenset({"arguments", "parameters"})
_SKIPPED = frozenset({"id", "type"})


def read_call(feed: Feed, is_callable: Callable[[str], bool] | None = None) -> Steps[bool]:
    """Read one call, which begins here with its brace. Returns False for what is none; then as much is read as was
    needed to know, and it is for the caller to give it back.

    is_callable: whether a function has that name; then nothing but calls of those counts, and no unknown keys either,
    as befits an object that may be anything. None: whatever its name.
    """
    if not (yield from feed.accept("{")):
        return False
    call = _Call(feed, is_callable)
    is_first = True
    while True:
        yield from feed.blank()
        if (yield from feed.accept("}")):
            return call.end()
        if not is_first:
            if not (yield from feed.accept(",")):
                return False
            yield from feed.blank()
        is_first = False
        key = yield from _string(feed, MAX_KEY_CHARS)
        if key is None:
            return False
        yield from feed.blank()
        if not (yield from feed.accept(":")):
            return False
        yield from feed.blank()
        if not (yield from call.read_value(key)):
            return False


def read_arguments(feed: Feed, pass_on: Callable[[str], None]) -> Steps[bool]:
    """Read arguments that are an object, part by part. Returns False for what is none."""
    if (yield from feed.peek()) != "{":
        return False
    scanner = JsonScanner()
    while part := (yield from feed.json_part(scanner)):
        pass_on(part)
    return scanner.is_done


class _Call:
    """What is known of one call."""

    def __init__(self, feed: Feed, is_callable: Callable[[str], bool] | None) -> None:
        self._feed = feed
        self._is_callable = is_callable
        self._name: str | None = None
        self._has_arguments = False
        self._has_begun = False
        self._early: list[str] = []
        """Arguments that came before the name."""

    def read_value(self, key: str) -> Steps[bool]:
        """Read the value of one key. Returns False where it can't be a call's."""
        if key == "name":
            return (yield from self._read_name())
        if key in _ARGUMENTS:
            return (yield from self._read_arguments())
        if self._is_callable is not None and key not in _SKIPPED:
            return False
        scanner = JsonScanner()
        while (yield from self._feed.json_part(scanner)):
            pass
        return scanner.is_done

    def end(self) -> bool:
        """The object is over. Returns whether it was a call: a function without parameters may have no arguments."""
        if self._name is None:
            return False
        if not self._has_arguments:
            self._pass_on("{}")
        self._feed.end_call()
        return True

    def _read_name(self) -> Steps[bool]:
        name = yield from _string(self._feed, MAX_KEY_CHARS)
        if not name or self._name is not None or (self._is_callable is not None and not self._is_callable(name)):
            return False
        self._name = name
        if self._early:
            self._pass_on("".join(self._early))
            self._early.clear()
        return True

    def _read_arguments(self) -> Steps[bool]:
        if self._has_arguments:
            return False
        self._has_arguments = True
        if (yield from self._feed.peek()) != '"':
            return (yield from read_arguments(self._feed, self._pass_on))
        text = yield from _string(self._feed, MAX_STRING_CHARS)
        if text is None or not _is_object(text):
            return False
        self._pass_on(text)
        return True

    def _pass_on(self, text: str) -> None:
        if self._name is None:
            self._early.append(text)
            return
        if not self._has_begun:
            self._has_begun = True
            self._feed.begin_call(self._name)
        self._feed.arguments(text)


def _string(feed: Feed, max_chars: int) -> Steps[str | None]:
    """Read a JSON string. Returns its value, or None for what is none, or longer, or no Unicode text."""
    if (yield from feed.peek()) != '"':
        return None
    scanner = JsonScanner()
    parts: list[str] = []
    num_chars = 0
    while part := (yield from feed.json_part(scanner)):
        parts.append(part)
        num_chars += len(part)
        if num_chars > max_chars:
            return None
    if not scanner.is_done:
        return None
    value: str = json.loads("".join(parts))
    return value if _is_unicode(value) else None


def _is_object(text: str) -> bool:
    scanner = JsonScanner()
    end = scanner.scan(text)
    return scanner.is_done and text.lstrip(" \t\n\r").startswith("{") and not text[end:].strip(" \t\n\r")


def _is_unicode(text: str) -> bool:
    """Whether the text holds no half of a surrogate pair, which JSON can spell and no answer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
