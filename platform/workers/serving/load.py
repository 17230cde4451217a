"""Numbers of the load report to one router: what all of them repeat, and the credit, which is how many sequences the
router may have. Pure."""

from collections import Counter
from typing import NamedTuple

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import EngineLoad

SPARED_SHARE = 0.25
"""Part of a replica's places, up to which a tenant's sequences that wait for their adapters take none."""


class StreamInfo(NamedTuple):
    """Constants of a replica that every load report repeats."""

    epoch: str
    """Identity of this replica's life; another one starts with an empty cache."""
    num_places: int
    """Sequences in the engine at once, waiting ones included."""
    block_size: int
    max_batched_tokens: int

    @classmethod
    def of(cls, epoch: str, config: EngineConfig) -> "StreamInfo":
        return cls(epoch, config.num_places, config.block_size, config.max_batched_tokens)


def grant_credit(num_inflight: int, total_inflight: int, num_routers: int, num_places: int, *, is_closed: bool) -> int:
    """Live sequences a router may have at once: its own and its share of the free places, at least one while any is
    free.

    num_inflight: the router's own. total_inflight: those of all routers that take a place. is_closed: nothing more is
    admitted (draining, or no KV for those that wait already).
    """
    free = num_places - total_inflight
    if is_closed or free <= 0:
        return num_inflight
    return num_inflight + max(1, free // num_routers)


class AdapterWaits:
    """Counts the sequences that wait for their adapters. They take no place from those that can run: not the first of
    each tenant, SPARED_SHARE of the places, and not more of all tenants than there are places. What a tenant has beyond
    that takes places, so that the gateways' shares of places bound it."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._most_spared = max(1, int(SPARED_SHARE * num_places))
        self._counts: Counter[str] = Counter()
        self._num_spared = 0

    @property
    def num_spared(self) -> int:
        """Sequences that take no place."""
        return min(self._num_spared, self._num_places)

    def add(self, tenant: str) -> None:
        self._counts[tenant] += 1
        self._num_spared += self._counts[tenant] <= self._most_spared

    def remove(self, tenant: str) -> None:
        self._num_spared -= self._counts[tenant] <= self._most_spared
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]


def lacks_kv(load: EngineLoad, block_size: int) -> bool:
    """Whether sequences wait that others may not pass, and whose tokens are more than the free KV blocks hold."""
    return load.unplaced_tokens > load.free_blocks * block_size
