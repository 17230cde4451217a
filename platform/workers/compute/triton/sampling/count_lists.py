"""Lists on a device of the different tokens of each sequence and how often it produced them, by which penalties strike.
No kernel: what is to be written goes with a step's inputs.

The host counts a sequence's known tokens (`penstock.workers.compute.adjustments`) and remembers how many of them a list
has, so a step sends an entry for each token that came since: one, when sequences decode. A token that only the device
knows is in no list; kernels count it for the step beside them. So nothing is ever taken back: drafts that were wrong,
steps that failed and blocks that were lost leave lists as they are. A list that becomes too short is replaced by one of
twice the length, to which everything is sent.

Invariant: behind what `locate` returns, a list is what the host has counted. Whoever can't know whether that was
written calls `clear`. A list's memory is given back to torch, which gives it to others for work behind that which is
launched already.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.workers.compute.triton.sampling.sampling_inputs import Listed, Located, pack_entries

SHORTEST = 256
"""Entries of a list at least."""
ENTRY_BYTES = 8


@dataclass(slots=True)
class _List:
    memory: Tensor
    """int64 [capacity]."""
    num_tokens: int = 0
    """Tokens of the sequence that were counted when it was last written to."""


class CountLists:
    """The lists of one device's sequences. One thread at a time, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lists: dict[object, _List] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(own.memory.nbytes for own in self._lists.values())

    def locate(self, listed: Listed) -> Located:
        """Where the list of a sequence is, and what is to be written there for it to have all that is counted."""
        own = self._lists.get(listed.owner)
        if own is None or len(own.memory) < listed.size:
            capacity = max(SHORTEST, 1 << listed.size.bit_length())
            own = self._lists[listed.owner] = _List(torch.empty(capacity, dtype=torch.int64, device=self.device))
        changed = listed.since(own.num_tokens)
        own.num_tokens = listed.num_tokens
        address = own.memory.data_ptr()
        return Located(address, address + ENTRY_BYTES * changed.places, pack_entries(changed))

    def forget(self, owner: object) -> None:
        """Drop the list of a sequence that has ended, if it has one."""
        self._lists.pop(owner, None)

    def clear(self) -> None:
        """Drop all lists: everything is sent again."""
        self._lists.clear()
