"""The waiting sequences that others may pass in one round of admission, because their blocks are not free.

Invariant: at most MAX_BYPASSES sequences pass any one that waits, so that it waits for a bounded number of others.
"""

from typing import Protocol

MAX_BLOCKED = 4
"""Most waiting sequences that a step passes over because their blocks are not free: each is looked up in the cache."""
MAX_BYPASSES = 16
"""Most sequences that are admitted past one whose blocks are not free."""


class Passable(Protocol):
    """A waiting sequence that others may pass."""

    num_bypasses: int
    """Sequences admitted past it since it began to wait."""
    is_passable: bool


class Bypasses:
    """The sequences of one round that were looked at and did not fit."""

    def __init__(self) -> None:
        self._blocked: list[Passable] = []

    def pass_over(self, seq: Passable) -> bool:
        """Note a sequence that does not fit. Returns whether others may be looked at behind it."""
        self._blocked.append(seq)
        seq.is_passable = seq.num_bypasses < MAX_BYPASSES
        return seq.is_passable and len(self._blocked) < MAX_BLOCKED

    def admit(self) -> bool:
        """Note that another was admitted past those that did not fit. Returns whether one more may be."""
        for seq in self._blocked:
            seq.num_bypasses += 1
        return all(seq.num_bypasses < MAX_BYPASSES for seq in self._blocked)
