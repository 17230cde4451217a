"""Prompt look-up: what followed the last time when a sequence's last few tokens stood in it before (Saxena 2023,
prompt-lookup-decoding), and how likely it is to follow again. Pure.

No model and hardly any cost: the tokens are kept as bytes, and `bytes.rfind` is the search. Good where answers repeat
what was read: quotes, code, summaries.

The more tokens stood there before, the likelier is the next one, and one that follows makes the match longer by itself.
So one table says both: the chance that a match of so many tokens goes on (`Chances`), learned from the drafts that were
verified.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.wire.frames import pack_token_ids

LENGTHS = (8, 4, 3, 2)
"""Tokens of the suffix that are looked up, one after the other until one is found; of its places the latest wins."""
SHORTEST = LENGTHS[-1]
WINDOW = 16384
"""Last tokens that are searched, at most: bounds the search, whatever the context, to some 20 microseconds for a text,
and to a millisecond where all tokens are alike."""
MAX_MISALIGNED = 8
"""Finds that begin inside a token and are passed over, before a search is given up."""
MOST_MATCHED = 16
"""Tokens of a match that are counted."""
PRIOR = 16.0
"""Weight, in verified tokens, of the chance that is assumed before any was: 1 - 1 / length."""
RECENT = 512
"""Verified tokens that a chance is learned from, the latest counting most."""
FORGET_RATE = 0.002
"""Share of the way back to what is assumed that a match moves a chance which is not tried: it could not change."""

_TOKEN_BYTES = 4


class Found(NamedTuple):
    """What followed where a sequence's end stood before."""

    num_matched: int
    """Tokens of the end that stood there, MOST_MATCHED at the most."""
    token_ids: list[int]


@dataclass(slots=True)
class Packed:
    """A sequence's tokens as `pack_token_ids` packs them."""

    data: bytearray = field(default_factory=bytearray)

    def update(self, token_ids: list[int]) -> None:
        """Tokens are only ever appended."""
        self.data += pack_token_ids(token_ids[len(self.data) // _TOKEN_BYTES :])


class Chances:
    """The chance that a match goes on, by its length."""

    def __init__(self) -> None:
        lengths = range(MOST_MATCHED + 1)
        self._kept = [_assumed(length) * PRIOR for length in lengths]
        self._weight = [PRIOR for _ in lengths]

    def list(self, num_matched: int, count: int) -> list[float]:
        """Chances that all tokens behind a match are right, up to the first, the second, and so on."""
        chances, chance = [], 1.0
        for length in range(num_matched, num_matched + count):
            at = min(length, MOST_MATCHED)
            chance *= self._kept[at] / self._weight[at]
            chances.append(chance)
        return chances

    def learn(self, num_matched: int, num_drafted: int, num_accepted: int) -> None:
        """Learn from a verified draft: its first `num_accepted` tokens were kept; the next one, if there was one, was
        not."""
        for place in range(min(num_drafted, num_accepted + 1)):
            at = min(num_matched + place, MOST_MATCHED)
            share = min(1.0, RECENT / (self._weight[at] + 1))
            self._kept[at] = share * (self._kept[at] + (place < num_accepted))
            self._weight[at] = share * (self._weight[at] + 1)

    def forget(self, num_matched: int) -> None:
        """Move the chance of a match that was not tried towards what is assumed."""
        assumed = _assumed(num_matched) * self._weight[num_matched]
        self._kept[num_matched] += FORGET_RATE * (assumed - self._kept[num_matched])


def _assumed(length: int) -> float:
    return 1 - 1 / max(1, length)


def look_up(packed: Packed, token_ids: list[int], count: int, lengths: tuple[int, ...] = LENGTHS) -> Found | None:
    """`count` tokens that followed where the sequence's end stood before: the latest place of the longest of
    `lengths`, which fall. Returns None if there is none."""
    packed.update(token_ids)
    if count < 1 or _find(packed.data, lengths[-1]) is None:
        return None  # nor is anything longer there, as a rule
    for length in lengths:
        at = _find(packed.data, length)
        if at is not None:
            place = at + length
            num_matched = length
            end = len(token_ids)
            while num_matched < MOST_MATCHED and at > 0 and token_ids[at - 1] == token_ids[end - num_matched - 1]:
                at, num_matched = at - 1, num_matched + 1
            return Found(num_matched, _continue_from(token_ids, place, count))
    return None


def _find(data: bytearray, length: int) -> int | None:
    """Where, in tokens, the last `length` tokens begin in what is before the last one."""
    suffix = data[-length * _TOKEN_BYTES :]
    if len(suffix) < length * _TOKEN_BYTES:
        return None
    end = len(data) - _TOKEN_BYTES
    first = max(0, len(data) - WINDOW * _TOKEN_BYTES)
    for _ in range(MAX_MISALIGNED):
        found = data.rfind(suffix, first, end)
        if found < 0:
            return None
        if not found % _TOKEN_BYTES:
            return found // _TOKEN_BYTES
        end = found + len(suffix) - 1
    return None


def _continue_from(token_ids: list[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on; beyond the end they repeat themselves."""
    period = len(token_ids) - place
    return [token_ids[place + step % period] for step in range(count)]
