"""Memory for weights, on huge pages where Linux gives them. A decode step reads all weights once, and with pages of 4
KiB a core waits for address translations (seen once, SmolLM2's head at batch 1 on one core of a Zen 4: 28 against 18
GB/s)."""

import mmap

import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20
ALIGNMENT = 64
KEPT = 3
"""Earlier chunks of which something is left: no more, for a rest keeps its chunk alive."""
_HUGE_PAGE_BYTES = 2 << 20


class Arena:
    """Cuts tensors out of large chunks. A chunk lives as long as any tensor of it; what is not cut off is never
    touched, and takes no memory but for the rest of a page: so what is left of earlier chunks goes first."""

    def __init__(self) -> None:
        self._rests: list[Tensor] = []

    def cut(self, size: int) -> Tensor:
        """uint8 [size], zeros, its address a multiple of ALIGNMENT."""
        taken = -(-size // ALIGNMENT) * ALIGNMENT
        place = next((place for place, rest in enumerate(self._rests) if taken <= len(rest)), len(self._rests))
        if place == len(self._rests):
            self._rests = [*self._rests[-KEPT:], _chunk(max(taken, CHUNK_BYTES))]
            place = len(self._rests) - 1
        rest = self._rests[place]
        self._rests[place] = rest[taken:]
        return rest[:size]


def _chunk(size: int) -> Tensor:
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + size]
