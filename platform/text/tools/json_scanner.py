"""One JSON value that comes in pieces: where it ends, or the first character with which it can't be JSON any more.

Nothing is built of it, so its size costs no memory; a character costs constant time. Invariant: the outcome does not
depend on how the text was cut. Source: RFC 8259. Bounds of our own: MAX_DEPTH and MAX_LITERAL_CHARS.
"""

import re
from collections.abc import Callable

MAX_DEPTH = 128
"""Arrays and objects inside of each other; one more is taken for malformed."""
MAX_LITERAL_CHARS = 512
"""Characters of a number; one more is taken for malformed."""
_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LITERAL_PART = re.compile(r"[-+.0-9A-Za-z]*")
_LITERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_LITERAL_STARTS = frozenset("-0123456789tfn")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_HEX_DIGITS = 4
_CLOSERS = {"{": "}", "[": "]"}


class JsonScanner:
    """The scanner of one value."""

    __slots__ = ("_closers", "_is_key", "_literal", "_num_hex", "_read", "is_broken", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        """Whether the value is complete. A number at the top is complete with the character behind it."""
        self.is_broken = False
        self._closers: list[str] = []
        """Brackets that the open arrays and objects will end with, the innermost last."""
        self._is_key = False
        self._literal = ""
        self._num_hex = 0
        self._read: Callable[[JsonScanner, str, int], int] = JsonScanner._value

    def scan(self, text: str, at: int = 0) -> int:
        """Read on at `at`. Returns the position behind what belongs to the value: the end of `text`, unless the value
        is done or broken there."""
        while at < len(text) and not (self.is_done or self.is_broken):
            at = self._read(self, text, at)
        return at

    def _value(self, text: str, at: int) -> int:
        at = _skip_blank(text, at)
        if at == len(text):
            return at
        char = text[at]
        if char == '"':
            self._is_key, self._read = False, JsonScanner._string
        elif char in _CLOSERS:
            self._open(char)
        elif char in _LITERAL_STARTS:
            self._literal, self._read = "", JsonScanner._literal_part
            return at
        else:
            return self._break(at)
        return at + 1

    def _open(self, char: str) -> None:
        if len(self._closers) == MAX_DEPTH:
            self.is_broken = True
            return
        self._closers.append(_CLOSERS[char])
        self._read = JsonScanner._first_key if char == "{" else JsonScanner._first_item

    def _first_key(self, text: str, at: int) -> int:
        at = _skip_blank(text, at)
        return self._close(at) if at < len(text) and text[at] == "}" else self._key(text, at)

    def _first_item(self, text: str, at: int) -> int:
        at = _skip_blank(text, at)
        if at < len(text) and text[at] == "]":
            return self._close(at)
        return self._value(text, at)

    def _key(self, text: str, at: int) -> int:
        at = _skip_blank(text, at)
        if at == len(text):
            return at
        if text[at] != '"':
            return self._break(at)
        self._is_key, self._read = True, JsonScanner._string
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        at = _skip_blank(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._break(at)
        self._read = JsonScanner._value
        return at + 1

    def _separator(self, text: str, at: int) -> int:
        """What stands behind a value inside of an array or object."""
        at = _skip_blank(text, at)
        if at == len(text):
            return at
        if text[at] == self._closers[-1]:
            return self._close(at)
        if text[at] != ",":
            return self._break(at)
        self._read = JsonScanner._key if self._closers[-1] == "}" else JsonScanner._value
        return at + 1

    def _close(self, at: int) -> int:
        self._closers.pop()
        self._end_value()
        return at + 1

    def _string(self, text: str, at: int) -> int:
        at = _end(_PLAIN, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._read = JsonScanner._escape
        elif text[at] == '"':
            if self._is_key:
                self._read = JsonScanner._colon
            else:
                self._end_value()
        else:
            return self._break(at)
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._num_hex, self._read = 0, JsonScanner._hex
        elif text[at] in _ESCAPES:
            self._read = JsonScanner._string
        else:
            return self._break(at)
        return at + 1

    def _hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._break(at)
        self._num_hex += 1
        if self._num_hex == _HEX_DIGITS:
            self._read = JsonScanner._string
        return at + 1

    def _literal_part(self, text: str, at: int) -> int:
        end = _end(_LITERAL_PART, text, at)
        taken = min(end, at + MAX_LITERAL_CHARS - len(self._literal))
        self._literal += text[at:taken]
        if taken < end:
            return self._break(taken)
        if end < len(text):
            if _LITERAL.fullmatch(self._literal) is None:
                return self._break(end)
            self._end_value()
        return end

    def _end_value(self) -> None:
        if self._closers:
            self._read = JsonScanner._separator
        else:
            self.is_done = True

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at


def _skip_blank(text: str, at: int) -> int:
    return _end(_BLANK, text, at)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Position behind what the pattern, which may be empty, matches at `at`."""
    match = pattern.match(text, at)
    assert match is not None
    return match.end()
