"""What the pools' replicas cost, by where their time goes: the metric `penstock_cost_total`.

Not what requests cost (`routing.spending`): this is all of the replicas' time, whoever caused it, from the accounts in
their load reports. Every gateway hears of every replica, so each counts all of them, and the largest of the gateways'
rates is the pool's. Invariants: a second of a replica counts once, however often its stream is opened anew; sums are of
whole numbers.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

from msgspec.structs import astuple

from penstock.router.config import PoolSpec
from penstock.wire.frames import TimeAccounts
from penstock.wire.money import price_of_time_nano

KINDS = ("start", "requests", "idle", "drain", "failed")
"""Labels of the accounts, in their order; steps are what requests cost."""
TOGETHER_S = 60.0
"""A replica that is older than this gateway by less has been started together with it, and all of it counts; of an
older one what comes from now on, which another gateway may have counted before."""
MAX_REPLICAS = 4096
"""Replicas that are remembered, those that reported last."""


class PoolCosts:
    """Sums of all replicas that this gateway has heard of. clock: monotonic seconds."""

    def __init__(self, pools: Mapping[str, PoolSpec], clock: Callable[[], float]) -> None:
        self._prices = {name: pool.price_per_hour for name, pool in pools.items() if pool.price_per_hour is not None}
        self._clock = clock
        self._began_s = clock()
        self._latest: OrderedDict[str, tuple[str, TimeAccounts]] = OrderedDict()
        """Pool and accounts of each replica, by epoch."""
        self._before: dict[str, tuple[int, ...]] = {}
        """What of a replica's time does not count, by epoch: costs by account."""
        self._gone: dict[str, list[int]] = {}
        """Costs of replicas that are not remembered any more, by pool and account."""

    def take(self, pool: str, epoch: str, accounts: TimeAccounts) -> None:
        """Take a replica's accounts, which replace those before."""
        if pool not in self._prices:
            return
        if epoch not in self._latest:
            age_s, own_age_s = sum(astuple(accounts)), self._clock() - self._began_s
            is_older = age_s > own_age_s + TOGETHER_S
            self._before[epoch] = self._cost_nano(pool, accounts if is_older else TimeAccounts())
        self._latest[epoch] = pool, accounts
        self._latest.move_to_end(epoch)
        if len(self._latest) > MAX_REPLICAS:
            self._forget_oldest()

    def totals_nano(self) -> dict[tuple[str, str], int]:
        """Cost by pool and kind, 1e-9 of the unit of prices."""
        totals = {pool: list(self._gone.get(pool, [0] * len(KINDS))) for pool in self._prices}
        for epoch in self._latest:
            self._add(epoch, totals)
        return {(pool, kind): nano for pool, sums in totals.items() for kind, nano in zip(KINDS, sums, strict=True)}

    def _forget_oldest(self) -> None:
        epoch = next(iter(self._latest))
        self._gone.setdefault(self._latest[epoch][0], [0] * len(KINDS))
        self._add(epoch, self._gone)
        del self._latest[epoch], self._before[epoch]

    def _add(self, epoch: str, totals: dict[str, list[int]]) -> None:
        pool, accounts = self._latest[epoch]
        for index, (now, before) in enumerate(zip(self._cost_nano(pool, accounts), self._before[epoch], strict=True)):
            totals[pool][index] += now - before

    def _cost_nano(self, pool: str, accounts: TimeAccounts) -> tuple[int, ...]:
        return tuple([price_of_time_nano(seconds, self._prices[pool]) for seconds in astuple(accounts)])
