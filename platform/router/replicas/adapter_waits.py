"""Sequences at one replica that wait for their adapters, by tenant, as far as this gateway knows: sent when the adapter
was in none of the replica's slots, and without a token since. Pure.

A replica keeps them outside of its engine, and bounds each tenant's; a gateway sends no more than SHARE of its credit
there, so that the others wait in its own queue, where they can still go elsewhere.
"""

from collections import Counter

SHARE = 0.25
"""Part of a gateway's credit at a replica, up to which a tenant's sequences may wait there for adapters."""


class AdapterWaits:
    """The sequences that wait, by their numbers."""

    def __init__(self) -> None:
        self._tenants: dict[int, str] = {}
        self._counts: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def begin(self, sid: int, tenant: str) -> None:
        self._tenants[sid] = tenant
        self._counts[tenant] += 1

    def end(self, sid: int) -> None:
        """A token came, or the sequence has ended. Sequences that don't wait are ignored."""
        tenant = self._tenants.pop(sid, None)
        if tenant is not None:
            self._counts[tenant] -= 1
            if not self._counts[tenant]:
                del self._counts[tenant]

    def has_room(self, tenant: str, credit: int) -> bool:
        """Whether one more of a tenant may wait. credit: sequences that this gateway may have at the replica."""
        return self._counts[tenant] < max(1, int(SHARE * credit))

    def clear(self) -> None:
        self._tenants.clear()
        self._counts.clear()
