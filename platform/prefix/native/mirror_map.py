"""One map of block keys to slots in C++, as an object. A slot stands for a replica's entries; who has which one is the
caller's to know.

Invariant: memory is given back with the object. Keys travel as bytes, 16 each.
"""

import ctypes
import weakref
from array import array

from penstock.prefix.native.library import Library
from penstock.wire.frames import KEY_BYTES


class MirrorMap:
    """Raises MemoryError wherever there is none; a block for which there is none is not mirrored."""

    def __init__(self, library: Library) -> None:
        functions = library.functions
        self._address = functions["begin"]()
        if not self._address:
            raise MemoryError("no memory for the prefix index")
        weakref.finalize(self, functions["end"], self._address)
        self._open, self._close, self._origin = functions["open"], functions["close"], functions["origin"]
        self._num_held, self._list, self._collect = functions["num_held"], functions["list"], functions["collect"]
        self._apply, self._replace, self._look_up = functions["apply"], functions["replace"], functions["look_up"]
        self._expect, self._lapse, self._num_slots = functions["expect"], functions["lapse"], functions["num_slots"]
        self._room = 0
        self._widen()

    def open(self) -> int:
        """A slot without entries."""
        return self._check(self._open(self._address))

    def close(self, slot: int) -> None:
        """Drop a slot, and all its entries."""
        self._close(self._address, slot)

    def origin(self, slot: int) -> int:
        """What the slot's predictions are known by; a slot that replaces another keeps it."""
        return int(self._origin(self._address, slot))

    def num_held(self, slot: int) -> int:
        """Keys that the slot holds, without predictions."""
        return int(self._num_held(self._address, slot))

    def held(self, slot: int) -> bytes:
        """Keys that the slot holds, one behind the other in no order. Slow."""
        room = ctypes.create_string_buffer(KEY_BYTES * self.num_held(slot) + 1)
        count = self._list(self._address, slot, room)
        return room.raw[: KEY_BYTES * count]

    def apply(self, slot: int, removed: bytes, stored: bytes, max_held: int) -> None:
        """Take `removed` out of the slot, and then `stored` in, until it holds `max_held` keys."""
        num_removed, num_stored = len(removed) // KEY_BYTES, len(stored) // KEY_BYTES
        self._apply(self._address, slot, removed, num_removed, stored, num_stored, max_held)

    def replace(self, slot: int, stored: bytes, max_held: int) -> int:
        """Drop a slot for another one that holds `stored`, `max_held` keys of it at most, and has the same
        predictions; returns that."""
        return self._check(self._replace(self._address, slot, stored, len(stored) // KEY_BYTES, max_held))

    def expect(self, slot: int, number: int, keys: bytes, most: int) -> bytes:
        """Predict those of `keys` that the slot does not hold, `most` at most; returns them."""
        room = ctypes.create_string_buffer(len(keys) + 1)
        count = self._expect(self._address, slot, number, keys, len(keys) // KEY_BYTES, most, room)
        return room.raw[: KEY_BYTES * count]

    def lapse(self, slot: int | None, origin: int, number: int, keys: bytes) -> None:
        """End a prediction. slot: the one of that origin; None: there is none any more."""
        self._lapse(self._address, -1 if slot is None else slot, origin, number, keys, len(keys) // KEY_BYTES)

    def look_up(self, keys: bytes) -> "tuple[array[int], array[int]]":
        """Slots that have leading keys, and how many of them each."""
        if self._num_slots(self._address) > self._room:
            self._widen()
        count = self._look_up(self._address, keys, len(keys) // KEY_BYTES, *self._rooms)
        return self._slots[:count], self._depths[:count]

    def collect(self) -> int:
        """Take out all that is dead, at once; returns the number of keys left. Slow."""
        return int(self._collect(self._address))

    def _widen(self) -> None:
        self._room = 2 * max(32, self._num_slots(self._address))
        self._slots, self._depths = (array("I", bytes(4 * self._room)) for _ in range(2))
        self._rooms = self._slots.buffer_info()[0], self._depths.buffer_info()[0]

    def _check(self, slot: int) -> int:
        if slot < 0:
            raise MemoryError("no memory for another replica in the prefix index")
        return slot
