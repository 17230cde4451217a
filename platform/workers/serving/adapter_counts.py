"""What has become of a replica's adapters since its start, by tenant and adapter: found in a slot, waited for, loaded,
gone from a slot.

Pure. Load reports carry what changed since the report before, so an unused adapter costs nothing. Invariants: numbers
never fall while they are remembered; MAX_COUNTED adapters are at most, those that changed last.
"""

from collections import OrderedDict
from enum import IntEnum

from penstock.wire.frames import AdapterCount

MAX_COUNTED = 1024
"""Pairs of a tenant and an adapter that are remembered."""


class Event(IntEnum):
    """What becomes of an adapter; the value is the place in `AdapterCounts.totals`."""

    HIT = 0
    """A sequence found it in a slot."""
    WAIT = 1
    """A sequence had to wait for it."""
    LOAD = 2
    EVICTION = 3
    """An adapter left its slot, for another or because it was deleted."""


class AdapterCounts:
    """Counters of one replica."""

    def __init__(self) -> None:
        self.totals = [0] * len(Event)
        """How often each event has happened, by its value."""
        self._counts: OrderedDict[tuple[str, str], list[int]] = OrderedDict()
        """Number of the latest change, and how often each event has happened, by digest and tenant; the latest change
        last."""
        self.num_changes = 0

    def note(self, digest: str, tenant: str, event: Event) -> None:
        """Count an event. tenant: whose sequences the adapter was for; empty: nobody's yet."""
        self.num_changes += 1
        self.totals[event] += 1
        numbers = self._counts.setdefault((digest, tenant), [0] * (1 + len(Event)))
        numbers[0] = self.num_changes
        numbers[1 + event] += 1
        self._counts.move_to_end((digest, tenant))
        if len(self._counts) > MAX_COUNTED:
            self._counts.popitem(last=False)

    def changed_since(self, num_changes: int) -> tuple[AdapterCount, ...]:
        """Counts that have changed since there were that many changes."""
        found = []
        for (digest, tenant), (changed, *numbers) in reversed(self._counts.items()):
            if changed <= num_changes:
                break
            found.append(AdapterCount(digest, tenant, *numbers))
        return tuple(found)
