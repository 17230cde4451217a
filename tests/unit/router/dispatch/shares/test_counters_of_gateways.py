"""Three gateways, each with counters of its own, over the same places; they exchange what they gave, late."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.tenancy.service_exchange import Merger, Publisher, Report
from penstock.tenancy.share import Service
from tests.unit.router.dispatch.shares.test_counters import Pool, Tenant, draw

NUM_GATEWAYS = 3


class Gateway(Pool):
    """A gateway with its part of the places; what it gave reaches the others by reports."""

    def __init__(self, tenants: dict[str, float], num_places: int, step: float, longest: float) -> None:
        mine = {name: Tenant(weight, longest) for name, weight in tenants.items()}
        super().__init__(VirtualCounters(), mine, num_places, step)
        self.publisher, self.merger = Publisher(), Merger()

    def report(self, now: float) -> Report:
        return self.publisher.make(self.counters.given(), now)[0]

    def take(self, reports: dict[str, Report], now: float) -> None:
        self.counters.take_elsewhere(*self.merger.merge(reports, now))


class Platform:
    """weights: of the tenants that wait at each gateway. period: steps from one exchange to the next; 0: none."""

    def __init__(self, weights: list[dict[str, float]], period: int, longest: float = 20.0, step: float = 5.0) -> None:
        self.gateways = [Gateway(tenants, 4, step, longest) for tenants in weights]
        self.period, self.longest, self.step = period, longest, step
        self.reports: dict[str, Report] = {}

    def run(self, num_steps: int, random: Random) -> list[dict[str, float]]:
        """What each tenant has been given in all, divided by its weight, after each step."""
        history = []
        for now in range(num_steps):
            for gateway in self.gateways:
                for name, tenant in gateway.tenants.items():
                    while len(tenant.queue) <= gateway.num_places:
                        gateway.enqueue(name, draw(random, self.longest))
                gateway.place()
                gateway.compute()
            if self.period and now % self.period == 0:
                self.exchange(now / self.period)
            history.append(self.given())
        return history

    def exchange(self, now: float) -> None:
        for number, gateway in enumerate(self.gateways):
            self.reports[str(number)] = gateway.report(now)
            gateway.take({name: each for name, each in self.reports.items() if name != str(number)}, now)

    def given(self) -> dict[str, float]:
        names = {name for gateway in self.gateways for name in gateway.tenants}
        return {
            name: sum(gateway.tenants[name].given for gateway in self.gateways if name in gateway.tenants)
            for name in names
        }

    def bound(self, name: str, weight: float) -> float:
        """U and L of the tenant: all places, and what the others can give in two periods."""
        num_places = sum(gateway.num_places for gateway in self.gateways)
        elsewhere = num_places * self.step * 2 * self.period
        return (num_places * self.longest + elsewhere) / weight


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=3),
    st.integers(1, 6),
    st.integers(0, 2**32),
)
def test_tenants_that_wait_at_the_same_gateways_get_the_same_up_to_the_wider_bound(
    weights: list[float], period: int, seed: int
) -> None:
    tenants = {f"t{number}": weight for number, weight in enumerate(weights)}
    platform = Platform([tenants] * NUM_GATEWAYS, period)
    differences = [given["t0"] - given["t1"] for given in platform.run(150, Random(seed))]

    widest = max(differences) - min(differences)
    assert widest <= 2 * (platform.bound("t0", tenants["t0"]) + platform.bound("t1", tenants["t1"])) + 1e-6


def shares(given: dict[str, float], weights: dict[str, float]) -> dict[str, float]:
    total = sum(given[name] * weight for name, weight in weights.items())
    return {name: given[name] * weight / total for name, weight in weights.items()}


def test_weights_divide_what_three_gateways_compute() -> None:
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    found = shares(Platform([weights] * NUM_GATEWAYS, 4).run(4000, Random(1))[-1], weights)

    assert found == {name: pytest.approx(weight / 7, rel=0.05) for name, weight in weights.items()}


@pytest.mark.parametrize(("period", "light_share"), [(0, 1 / 12), (4, 1 / 4)])
def test_what_a_tenant_gets_elsewhere_counts_where_another_one_waits(period: int, light_share: float) -> None:
    """One tenant floods all gateways, the other one has a third of its weight and waits at one of them only; period 0:
    no exchange."""
    weights = {"flooder": 3.0, "light": 1.0}
    everywhere = [weights, {"flooder": 3.0}, {"flooder": 3.0}]
    found = shares(Platform(everywhere, period).run(4000, Random(1))[-1], weights)

    assert found["light"] == pytest.approx(light_share, rel=0.05)


def test_a_tenant_that_waits_elsewhere_only_lifts_a_newcomer() -> None:
    """What others had elsewhere, while a tenant asked for nothing, is not made up for."""
    here, there = VirtualCounters(), VirtualCounters()
    publisher, merger = Publisher(), Merger()
    there.enter("busy")
    for now in range(3):
        there.charge("busy", 1000.0, 1.0)
        here.take_elsewhere(*merger.merge({"there": publisher.make(there.given(), now)[0]}, now))
    here.enter("idle till now")

    assert here.counter("busy") == 2000.0
    assert here.counter("idle till now") == 2000.0


def test_a_tenant_that_waits_here_too_is_not_lifted_when_it_ceases_to_wait_elsewhere() -> None:
    counters = VirtualCounters()
    counters.enter("a")
    counters.take_elsewhere({}, {"a", "b"})
    counters.charge("b", 50.0, 1.0)
    counters.take_elsewhere({}, set())
    counters.enter("late")

    assert counters.counter("late") == 0.0
    assert counters.given()["a"] == Service(0.0, True)
