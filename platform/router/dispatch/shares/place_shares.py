"""A few places of the replicas that tenants with less than their share always find. Pure.

Whoever waits gets the next place by its counter (`counters`), but a place has to become free first. So a tenant that
has its share of the places leaves the last few to the others, as long as there are others: some that asked for a place
in the last ACTIVE_S. Alone, a tenant may have all. Where the last few are taken nevertheless, a tenant below its share
gets places beyond those that there are: at the replica rows of others give way to it (`workers.engine.row_shares`).
Invariant: a tenant below its share is never refused a place here.
"""

from collections import OrderedDict

ACTIVE_S = 10.0
"""How long a tenant that asked for a place is expected to ask again."""
MIN_PLACES = 8
"""Fewer places than these are not divided."""


class PlaceShares:
    """Tenants that want places. reserve: part of the places to be kept free, in 0..1; 0: none. Times are monotonic
    seconds."""

    def __init__(self, reserve: float) -> None:
        self._reserve = reserve
        self._asked: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Weight of each tenant and when it asked last, the latest at the end."""
        self._weights = 0.0

    def ask(self, tenant: str, rate: float, now: float) -> None:
        """A tenant wants a place. rate: its weight."""
        self._forget(tenant)
        self._asked[tenant] = rate, now
        self._weights += rate
        while next(iter(self._asked.values()))[1] < now - ACTIVE_S:
            self._forget(next(iter(self._asked)))

    @property
    def are_kept(self) -> bool:
        """Whether places are kept free at all: several tenants have asked of late."""
        return len(self._asked) > 1 and self._reserve > 0

    def must_leave(self, tenant: str, num_held: int, num_free: int, num_places: int) -> bool:
        """Whether a free place is kept from a tenant that has asked. num_held: places that it has."""
        if num_places < MIN_PLACES or not self.are_kept:
            return False
        if num_free > max(1, round(self._reserve * num_places)):
            return False
        return num_held >= self._asked[tenant][0] / self._weights * num_places

    def is_below(self, tenant: str, num_held: int, num_places: int) -> bool:
        """Whether a tenant that has asked has less than its share of the places, also with one more."""
        if num_places < MIN_PLACES or not self.are_kept:
            return False
        return num_held + 1 <= self._asked[tenant][0] / self._weights * num_places

    def has_share(self, tenant: str, num_held: int, num_places: int) -> bool:
        """Whether a tenant that has asked has its share of the places, while others want some."""
        return num_places >= MIN_PLACES and self.are_kept and not self.is_below(tenant, num_held, num_places)

    def _forget(self, tenant: str) -> None:
        before = self._asked.pop(tenant, None)
        if before is not None:
            self._weights = self._weights - before[0] if self._asked else 0.0
