"""The decoding rows of a modelled replica by the step behind which they have to be looked at. Pure.

Invariant: every row that decodes has an entry; entries of rows that ceased to decode, or have gone on, are passed over.
"""

import heapq
import itertools

from penstock.sim.sequence import ModelledSequence

_NEVER = 1 << 62


class DueRows:
    """Heap of the decoding rows by the step behind which they end, or have filled a block that others may want. Rows
    of the same step are in the order in which they came. max_len: longest sequence."""

    def __init__(self, max_len: int, block_size: int) -> None:
        self._max_len = max_len
        self._size = block_size
        self._heap: list[tuple[int, int, ModelledSequence]] = []
        self._order = itertools.count()

    def push(self, seq: ModelledSequence) -> None:
        """Note a row that decodes."""
        heapq.heappush(self._heap, (seq.next_step(self._max_len, self._size), next(self._order), seq))

    def next_step(self) -> int:
        """Number of the next step behind which a row is due; without rows a number that no step has."""
        heap = self._heap
        while heap:
            step, _, seq = heap[0]
            if seq.is_decoding and step == seq.next_step(self._max_len, self._size):
                return step
            heapq.heappop(heap)
        return _NEVER

    def pop_until(self, step: int) -> list[ModelledSequence]:
        """The rows that are due behind the steps up to `step`, taken out."""
        found = []
        while self.next_step() <= step:
            found.append(heapq.heappop(self._heap)[-1])
        return found
