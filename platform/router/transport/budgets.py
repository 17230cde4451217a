"""Budgets of one gateway: what its tenants hold of it for a while, and how much one of them may hold.

Not the places at replicas (`router.dispatch.shares`), not a tenant's limits (`tenancy.limits`). By dynamic thresholds
(Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998): a tenant may hold up to ALPHA times what is free
now. So one tenant alone gets most of it, n that all want more get equal parts, and some is always free for the next
one. Invariant: the parts add up to what is held, and that is never above the total.
"""

from typing import NamedTuple

from penstock.wire.errors import Overloaded, RateLimited

ALPHA = 4
"""One tenant alone may hold ALPHA / (1 + ALPHA) of all: four fifths."""
RETRY_AFTER_S = 1.0


class Budget:
    """One budget. total: all that there is. what: what it counts, as sentences name it, in the plural."""

    def __init__(self, total: int, what: str) -> None:
        self._total = total
        self._what = what
        self._held: dict[str, int] = {}
        self._num_held = 0

    @property
    def num_held(self) -> int:
        return self._num_held

    def take(self, tenant: str, amount: int) -> None:
        """Raises RateLimited where the tenant has its share, and Overloaded where all of them have everything."""
        held, free = self._held.get(tenant, 0), self._total - self._num_held
        if amount > free:
            raise Overloaded(
                f"This gateway has {self._total} {self._what} in hand already.", retry_after_s=RETRY_AFTER_S
            )
        if held >= ALPHA * free:
            raise RateLimited(
                f"Of the {self._total} {self._what} that this gateway has in hand at once, {held} are yours already.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._held[tenant] = held + amount
        self._num_held += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Return a part of what the tenant has taken."""
        left = self._held[tenant] - amount
        assert left >= 0
        if left:
            self._held[tenant] = left
        else:
            del self._held[tenant]
        self._num_held -= amount


class Budgets(NamedTuple):
    """The budgets of one gateway."""

    requests: Budget
    """Posts to the API that are under way."""
    body_bytes: Budget
    """Bytes of bodies that have come, and that are held as they are or decoded."""


def make_budgets(max_requests: int, max_body_bytes: int, max_held_bytes: int) -> Budgets:
    """max_held_bytes: raised to twice `max_body_bytes`, so that the largest body always fits."""
    return Budgets(
        Budget(max_requests, "requests"), Budget(max(max_held_bytes, 2 * max_body_bytes), "bytes of request bodies")
    )
