"""A prompt cut at its added tokens: pieces that are encoded each by itself, of which some may have been read before.

Not how a piece is encoded (`tokenizer`), and not what is remembered (`seen`). Why the cut is safe: an added token ends
what stands before it, and the words behind it are found without a look at what it ends; a tokenizer encodes the texts
between added tokens one by one, and so its ids of the whole are those of the pieces in a row. Nothing is cut anywhere
else: not at lines, not at messages that a template joins by plain text.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.text.seen import SeenScope
from penstock.wire.errors import ContextTooLong
from penstock.wire.frames import pack_token_ids, unpack_token_ids

MIN_SEEN_CHARS = 256
"""Shortest piece that is remembered: a shorter one is encoded as quickly as it is found."""


class Cut(NamedTuple):
    """A prompt that is cut to so many tokens, at least 1."""

    num_tokens: int
    keeps_end: bool = True
    """The last tokens are kept; else the first."""

    def tokens(self, token_ids: list[int]) -> list[int]:
        return token_ids[-self.num_tokens :] if self.keeps_end else token_ids[: self.num_tokens]


class PieceEncoder(NamedTuple):
    """How a tokenizer encodes a piece of text without added tokens."""

    encode: Callable[[str, bool], Iterable[list[int]]]
    """Token ids part by part, of a text and whether it begins the prompt."""
    name: bytes
    """What tells this tokenizer's ids from others', at most 15 bytes."""


class _New(NamedTuple):
    """A piece that is to be encoded."""

    text: str
    is_first: bool
    key: bytes | None
    """Where it is remembered; None: nowhere."""


@dataclass(slots=True)
class Draft:
    """A prompt in pieces. max_tokens: context of the model; None: no bound. cut: what to keep of the token ids; None:
    all. seen: what was read before; None: nothing, and this will not be known either."""

    encoder: PieceEncoder
    max_tokens: int | None = None
    cut: Cut | None = None
    seen: SeenScope | None = None
    num_new_chars: int = 0
    """Characters of the pieces that are to be encoded: what `token_ids` costs."""
    _parts: list[int | bytes | _New] = field(default_factory=list)
    """An added token's id, packed ids of a piece that is known, or a new piece."""

    def add_token(self, token_id: int) -> None:
        """Go on with an added token."""
        self._parts.append(token_id)

    def add_text(self, text: str, is_first: bool) -> None:
        """Go on with a text between added tokens. is_first: it begins the prompt."""
        if not text:
            return
        key = None
        if self.seen is not None and len(text) >= MIN_SEEN_CHARS:
            key = self.seen.key(self.encoder.name + (b"1" if is_first else b"0"), text)
            found = self.seen.find(key)
            if found is not None:
                self._parts.append(found)
                return
        self.num_new_chars += len(text)
        self._parts.append(_New(text, is_first, key))

    def token_ids(self) -> list[int]:
        """Token ids of the prompt. Raises InvalidRequest for what is not Unicode text, and ContextTooLong as soon as
        there are more than `max_tokens`: how many more is not found out."""
        token_ids: list[int] = []
        for part in self._parts:
            if isinstance(part, int):
                token_ids.append(part)
            elif isinstance(part, bytes):
                token_ids += unpack_token_ids(part)
                self._check(len(token_ids))
            else:
                self._append(token_ids, part)
        return token_ids if self.cut is None else self.cut.tokens(token_ids)

    def _append(self, token_ids: list[int], piece: _New) -> None:
        begin = len(token_ids)
        for part in self.encoder.encode(piece.text, piece.is_first):
            token_ids += part
            self._check(len(token_ids))
        if piece.key is not None and self.seen is not None:
            self.seen.keep(piece.key, pack_token_ids(token_ids[begin:]))

    def _check(self, num_tokens: int) -> None:
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise too_long(self.max_tokens)


def too_long(max_tokens: int) -> ContextTooLong:
    """The error for a prompt with more tokens than the model's context, however many they are."""
    return ContextTooLong(
        f"This model's maximum context length is {max_tokens} tokens. However, the prompt alone has more. Shorten it."
    )
