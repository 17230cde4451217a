"""Tokens to text while they come. A character whose bytes are spread over tokens is emitted when it is whole.

Invariant: everything emitted, `finish` included, equals `Tokenizer.decode` of all the tokens together,
markers of tool calls and of thinking aside.
"""

import codecs
from collections.abc import Sequence

from penstock.text.json_parts import JsonParts
from penstock.text.tokenizer import Tokenizer


class Detokenizer:
    """The detokenizer of one sequence. About a microsecond a token: a look-up in the table of bytes and an incremental
    UTF-8 decoder."""

    __slots__ = ("_held", "_json_parts", "_table")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        shows_markers: bool = False,
        shows_reasoning_markers: bool = False,
    ) -> None:
        """shows_markers: the markers of tool calls have text, also where they are special tokens;
        shows_reasoning_markers: those of thinking."""
        shown = tokenizer.shown_bytes(call_markers=shows_markers, reasoning_markers=shows_reasoning_markers)
        self._table = shown if skip_special else tokenizer.token_bytes
        self._json_parts = tokenizer.json_parts(self._table)
        self._held = b""

    def json_parts(self) -> JsonParts | None:
        """The table in which the next tokens may be looked up instead of pushed, as long as each has a part. Returns
        None while a character is incomplete."""
        return None if self._held else self._json_parts

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete. Bytes that can't be UTF-8 whatever follows become U+FFFD."""
        table = self._table
        if len(token_ids) == 1 and not self._held:
            data = table[token_ids[0]]
            if data.isascii():
                return data.decode("ascii")
        data = self._held + b"".join([table[index] for index in token_ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def finish(self) -> str:
        """What is left of a character that was never completed, as U+FFFD."""
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")
