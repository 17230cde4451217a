"""What pools cost, by the accounts in their replicas' load reports."""

from collections.abc import Mapping

from penstock.router.config import PoolSpec
from penstock.router.replicas import pool_costs
from penstock.router.replicas.pool_costs import TOGETHER_S, PoolCosts
from penstock.wire.frames import TimeAccounts
from penstock.wire.money import NANO


def spec(name: str, price: float | None) -> PoolSpec:
    return PoolSpec(
        name=name,
        served_names=("m",),
        tier="cloud",
        model="m",
        app_name=name,
        max_model_len=1000,
        price_per_hour=price,
    )


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def costs_of(clock: Clock, prices: Mapping[str, float | None]) -> PoolCosts:
    return PoolCosts({name: spec(name, price) for name, price in prices.items()}, clock)


def test_each_account_of_each_replica_costs_its_time() -> None:
    costs = costs_of(Clock(), {"a": 3600.0, "free": None})
    costs.take("a", "e1", TimeAccounts(3.0, 1.0, 2.0))
    costs.take("a", "e1", TimeAccounts(3.0, 4.0, 5.0, 0.0, 0.5))
    costs.take("a", "e2", TimeAccounts(2.0, 0.0, 1.0, 1.5))
    costs.take("free", "e3", TimeAccounts(1.0))

    assert costs.totals_nano() == {
        ("a", "start"): 5 * NANO,
        ("a", "requests"): 4 * NANO,
        ("a", "idle"): 6 * NANO,
        ("a", "drain"): 1.5 * NANO,
        ("a", "failed"): 0.5 * NANO,
    }


def test_of_a_replica_that_is_older_than_the_gateway_only_what_comes_counts() -> None:
    clock = Clock()
    costs = costs_of(clock, {"a": 3600.0})
    clock.now += 10.0
    costs.take("a", "old", TimeAccounts(10.0, 500.0, 500.0))
    costs.take("a", "young", TimeAccounts(10.0, 0.0, TOGETHER_S - 1.0))
    costs.take("a", "old", TimeAccounts(10.0, 502.0, 501.0))

    totals = costs.totals_nano()

    assert totals["a", "start"] == 10 * NANO
    assert totals["a", "requests"] == 2 * NANO
    assert totals["a", "idle"] == TOGETHER_S * NANO


def test_replicas_that_are_forgotten_stay_in_the_sums() -> None:
    costs = costs_of(Clock(), {"a": 3600.0})
    for number in range(pool_costs.MAX_REPLICAS + 3):
        costs.take("a", f"e{number}", TimeAccounts(idle_s=1.0))

    assert costs.totals_nano()["a", "idle"] == (pool_costs.MAX_REPLICAS + 3) * NANO
