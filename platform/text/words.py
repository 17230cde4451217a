"""A fast byte-level BPE: texts are split into words here, the ids of each word come from a table, and the library
encodes only words that are new.

BPE never merges across the words of its pre-tokenizer, so the result is the library's, token for token, at a quarter of
its CPU (it tracks offsets and normalization that nobody here reads). Only for texts made of characters whose class in
Unicode is settled since its first versions (Latin, common punctuation): there Python's `re` can state the same pattern
exactly. Lines with others go to the library.

The table holds single words, not texts: a table of texts would let one tenant time whether another has sent the same
prompt.
"""

import re
from collections.abc import Callable, Iterator
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Final

_LETTER: Final = r"A-Za-z\xaa\xb5\xba\xc0-\xd6\xd8-\xf6\xf8-\u017e\u0180-\u024f"
_NUMBER: Final = r"0-9\xb2\xb3\xb9\xbc-\xbe"
_SPACE: Final = r"\t-\r \x85\xa0"
SETTLED: Final = re.compile(r"[\x00-\u017e\u0180-\u024f\u2010-\u2027\u2030-\u205e\u20ac]*")
"""Characters that the three classes above describe completely. U+017F is left out: it equals s when case is ignored."""

_TAIL: Final = rf"[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
_GPT2_WORD: Final = rf" ?[{_LETTER}]+| ?[{_NUMBER}]+| ?[^{_SPACE}{_LETTER}{_NUMBER}]+"
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    rf"|[^\r\n{_LETTER}{_NUMBER}]?[{_LETTER}]+"
    rf"|[{_NUMBER}]{{DIGITS}}"
    rf"| ?[^{_SPACE}{_LETTER}{_NUMBER}]+[\r\n]*"
    rf"|[{_SPACE}]*[\r\n]+"
    rf"|{_TAIL}"
)
GPT2: Final = re.compile(rf"'s|'t|'re|'ve|'m|'ll|'d|{_GPT2_WORD}|{_TAIL}")
LLAMA3: Final = re.compile(_LLAMA3.replace("{DIGITS}", "{1,3}"))
QWEN2: Final = re.compile(_LLAMA3.replace("{DIGITS}", ""))
# digits are cut out first, so that what precedes a number ends there: a space before it stands alone
SMOLLM: Final = re.compile(
    rf"[{_NUMBER}]|'s|'t|'re|'ve|'m|'ll|'d| ?[{_LETTER}]+| ?[^{_SPACE}{_LETTER}{_NUMBER}]+"
    rf"|[{_SPACE}]+(?![^{_SPACE}{_NUMBER}])|[{_SPACE}]+"
)

_LINES: Final = re.compile(r"(?<=\S\n)(?=\S)")
"""Places where all four patterns end a word whatever stands around: behind a single line break between visible
characters."""

MAX_WORDS: Final = 65536
MAX_WORD_CHARS: Final = 64
PART_CHARS: Final = 16384
"""Characters that are encoded at once, about: other threads wait for so many at most."""
_PART_WORDS: Final = 4096
_WORD: Final = itemgetter(0)


class _Table(dict[str, list[int]]):
    """Ids of each word, computed at its first use. Bounded: emptied when full. Any thread may read and write it."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> list[int]:
        token_ids = self._encode(word)
        if len(word) <= MAX_WORD_CHARS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = token_ids
        return token_ids


class WordEncoder:
    """Encodes texts without special tokens, word by word. encode: the library's function, for new words; pattern: the
    one of the four above that does the same as the library's pre-tokenizer."""

    def __init__(self, pattern: re.Pattern[str], encode: Callable[[str], list[int]]) -> None:
        self._pattern = pattern
        self._findall = pattern.findall
        self._encode = encode
        self._look_up = _Table(encode).__getitem__

    def encode(self, text: str) -> list[int]:
        if _is_settled(text):
            return self._quick(text)
        token_ids: list[int] = []
        for is_settled, lines in groupby(_LINES.split(text), _is_settled):
            piece = "".join(lines)
            token_ids += self._quick(piece) if is_settled else self._encode(piece)
        return token_ids

    def encode_parts(self, text: str) -> Iterator[list[int]]:
        """The ids of `encode`, part by part, for a long text: whoever takes them may stop before the end."""
        for part in _cut_at_lines(text):
            if len(part) > 2 * PART_CHARS and _is_settled(part):
                words = map(_WORD, self._pattern.finditer(part))
                while batch := list(islice(words, _PART_WORDS)):
                    yield list(chain.from_iterable(map(self._look_up, batch)))
            else:
                yield self.encode(part)

    def _quick(self, text: str) -> list[int]:
        return list(chain.from_iterable(map(self._look_up, self._findall(text))))


def _cut_at_lines(text: str) -> Iterator[str]:
    """Parts of at least PART_CHARS characters that end where every word does; where no line is fit for it, much more.
    A line break between visible characters is what `_LINES` describes."""
    begin, at = 0, PART_CHARS
    while (at := text.find("\n", at) + 1) and at < len(text):
        if not (text[at - 2].isspace() or text[at].isspace()):
            yield text[begin:at]
            begin, at = at, at + PART_CHARS
    yield text[begin:]


def _is_settled(text: str) -> bool:
    return text.isascii() or SETTLED.fullmatch(text) is not None
