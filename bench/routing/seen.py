"""What a router remembers that reads no cache events: which replica it sent a prefix to, the latest first. Stands for
the text trees of SGLang and of Ray, in blocks instead of characters.

Invariant: a replica has at most `max_blocks` blocks; those longest unused are forgotten, the deepest of a prompt first.
"""

from collections import OrderedDict
from collections.abc import Sequence


class SeenPrefixes:
    """Blocks by replica. max_blocks: most of one replica; None: without a bound."""

    def __init__(self, max_blocks: int | None) -> None:
        self._max_blocks = max_blocks
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def match(self, replica_id: str, keys: Sequence[bytes]) -> int:
        """Number of leading keys that the replica has been sent."""
        held = self._held.get(replica_id)
        if held is None:
            return 0
        return next((place for place, key in enumerate(keys) if key not in held), len(keys))

    def num_blocks(self, replica_id: str) -> int:
        """Blocks that the replica has been sent and that are not forgotten."""
        return len(self._held.get(replica_id, ()))

    def note(self, replica_id: str, keys: Sequence[bytes]) -> None:
        """A prompt of these keys goes to the replica."""
        held = self._held.setdefault(replica_id, OrderedDict())
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while self._max_blocks is not None and len(held) > self._max_blocks:
            held.popitem(last=False)
