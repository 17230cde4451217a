"""Requests that are held for the first replica of a pool that has none and gets one when a request comes.

Not the wait itself (`waiting`), and not the start (the autoscaler's, which sees that requests wait). A held request
waits longer than one that waits for a busy replica, so a tenant may have only so many of them; it takes no place of the
queue, so all tenants together may have only so many too. Invariant: what is held is counted until its wait is over,
however that ends.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Self

from penstock.router.config import GatewayConfig, PoolSpec
from penstock.router.replicas.fleet import Fleet
from penstock.router.routing.request import HoldListener
from penstock.router.routing.retry import spread_s
from penstock.wire.errors import Overloaded, RateLimited

RETRY_S, MIN_RETRY_S, MAX_RETRY_S = 10.0, 1.0, 60.0
"""Seconds after which a refused request may come back: where the end of the start is not known, and the bounds of what
is."""
QUEUE_PART = 0.5
"""Most requests that are held at once, as a part of `gateway.max_queue`."""


def never_known(_pool: str) -> None:
    """The time until a pool's first replica, where nobody says: None."""


class Hold:
    """One request's wait for a first replica, if it has to wait: a context that counts it and tells its listener."""

    def __init__(
        self,
        counts: Counter[str],
        tenant: str,
        config: GatewayConfig,
        ready_in_s: Callable[[], float | None],
        listener: HoldListener | None,
        random: Random,
        *,
        may_refuse: bool,
    ) -> None:
        """ready_in_s: seconds until the replica should be there; None: nobody knows. random: spreads the times after
        which refused requests may come back. may_refuse: whether the bounds are for this request too."""
        self.timeout_s = config.hold_timeout_s
        """Longest wait."""
        self._counts = counts
        self._tenant = tenant
        self._max_held = config.max_held
        self._max_of_all = max(1, int(QUEUE_PART * config.max_queue))
        self._random = random
        self._ready_in_s = ready_in_s
        self._listener = listener
        self._may_refuse = may_refuse

    def __enter__(self) -> Self:
        """Raises, with retry_after_s, RateLimited where the tenant has as many as it may have, and Overloaded where all
        tenants together have."""
        if self._may_refuse:
            self._check_bounds()
        self._counts[self._tenant] += 1
        if self._listener is not None:
            self._listener.begin_hold(self._ready_in_s)
        return self

    def _check_bounds(self) -> None:
        begun = "No replica of this model runs yet; one is being started, and"
        if self._counts[self._tenant] >= self._max_held:
            raise RateLimited(
                f"{begun} {self._max_held} requests of this tenant wait for it already, which is as many as may.",
                retry_after_s=self._retry_after_s(),
            )
        if self._counts.total() >= self._max_of_all:
            raise Overloaded(
                f"{begun} {self._max_of_all} requests wait for first replicas already, which is as many as may.",
                retry_after_s=self._retry_after_s(),
            )

    def _retry_after_s(self) -> float:
        """A start that should be over already takes nobody knows how long."""
        ready_in_s = self._ready_in_s()
        after_s = min(max(ready_in_s, MIN_RETRY_S), MAX_RETRY_S) if ready_in_s else RETRY_S
        return spread_s(after_s, self._random)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._counts[self._tenant] -= 1
        if not self._counts[self._tenant]:
            del self._counts[self._tenant]
        if self._listener is not None:
            self._listener.end_hold()


class Holds:
    """Says which requests are to be held. random: spreads the times after which refused ones may come back. ready_in_s:
    seconds until a pool's first replica should be there, by the pool's name; None: nobody knows."""

    def __init__(
        self,
        pools: Mapping[str, PoolSpec],
        fleet: Fleet,
        config: GatewayConfig,
        random: Random,
        ready_in_s: Callable[[str], float | None] = never_known,
    ) -> None:
        self._startable = frozenset(name for name, pool in pools.items() if pool.starts_on_demand)
        self._fleet = fleet
        self._config = config
        self._random = random
        self._ready_in_s = ready_in_s
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Requests that are held."""
        return self._counts.total()

    def find(self, pools: Sequence[str], tenant: str, listener: HoldListener | None, *, has_begun: bool) -> Hold | None:
        """The hold of a request that may go to these pools. Returns None if it waits like any other: one of them has a
        replica that stays, or none of them gets one because of it. has_begun: a part of the answer has been
        delivered."""
        if not self._startable:
            return None
        startable = [pool for pool in pools if pool in self._startable]
        if not startable or self._has_replica(pools):
            return None

        def ready_in_s() -> float | None:
            return min((known for pool in startable if (known := self._ready_in_s(pool)) is not None), default=None)

        return Hold(self._counts, tenant, self._config, ready_in_s, listener, self._random, may_refuse=not has_begun)

    def _has_replica(self, pools: Sequence[str]) -> bool:
        clients = self._fleet.ready_clients(pools)
        return any(client.load is None or not client.load.is_draining for client in clients)

    def note_passed(self, pools: Sequence[str]) -> None:
        """Note that a request was answered elsewhere because these pools have no replica: they get one all the same."""
        for pool in pools:
            if pool in self._startable:
                self._fleet.traffic[pool].num_passed += 1
