"""What each token adds to a JSON string, made once a token: most of an answer's text is looked up and never decoded.

Only for tokens of whole characters: one that begins or ends within a character depends on its neighbours, and has none.
Invariant: between tokens that have one, the parts joined are the JSON of the text that a `Detokenizer` makes of them.
"""

from collections.abc import Sequence

import msgspec


class JsonParts:
    """The parts of one table of bytes, by token id."""

    __slots__ = ("_table", "made")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self.made: list[bytes | None] = [None] * len(table)
        """Parts that were asked for before; None: not yet, or the token has none."""

    def join(self, token_ids: Sequence[int]) -> bytes | None:
        """What these tokens add together. Returns None if one of them has no part of its own."""
        parts: list[bytes] = []
        for token_id in token_ids:
            part = self.made[token_id]
            if part is None:
                part = self.made[token_id] = _make(self._table[token_id])
                if part is None:
                    return None
            parts.append(part)
        return b"".join(parts)


def _make(data: bytes) -> bytes | None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    part: bytes = msgspec.json.encode(text)[1:-1]
    return data if part == data else part
