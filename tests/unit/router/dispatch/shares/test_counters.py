"""The bound that `counters` states, held against a played pool of replicas."""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.router.dispatch.shares.counters import MAX_TENANTS, VirtualCounters, cost_of


class Sequence(NamedTuple):
    """A played sequence: what it is expected to cost, and what it costs, computed step by step."""

    expected: float
    cost: float


@dataclass
class Tenant:
    weight: float
    longest: float
    """Most that a sequence of the tenant costs, expected or real."""
    queue: deque[Sequence] = field(default_factory=deque)
    given: float = 0.0
    """Cost of what was computed, divided by the weight."""


@dataclass
class Running:
    tenant: str
    sequence: Sequence
    outstanding: float
    done: float = 0.0


class Pool:
    """Places at replicas, filled by counters; every sequence under way advances by at most `step` at a time."""

    def __init__(self, counters: VirtualCounters, tenants: dict[str, Tenant], num_places: int, step: float) -> None:
        self.counters, self.tenants, self.num_places, self.step = counters, tenants, num_places, step
        self.running: list[Running] = []

    def enqueue(self, name: str, sequence: Sequence) -> None:
        tenant = self.tenants[name]
        if not tenant.queue:
            self.counters.enter(name)
        tenant.queue.append(sequence)

    def place(self) -> None:
        while len(self.running) < self.num_places:
            waiting = [name for name, tenant in self.tenants.items() if tenant.queue]
            if not waiting:
                return
            name = min(waiting, key=self.counters.counter)
            sequence = self.tenants[name].queue.popleft()
            self.running.append(Running(name, sequence, sequence.expected))
            self.counters.expect(name, sequence.expected, self.tenants[name].weight)
            if not self.tenants[name].queue:
                self.counters.leave(name)

    def compute(self) -> None:
        for running in list(self.running):
            gained = min(self.step, running.sequence.cost - running.done)
            running.done += gained
            self.tenants[running.tenant].given += gained / self.tenants[running.tenant].weight
            is_over = running.done >= running.sequence.cost
            outstanding = 0.0 if is_over else max(0.0, running.outstanding - gained)
            weight = self.tenants[running.tenant].weight
            self.counters.charge(running.tenant, gained, weight)
            self.counters.expect(running.tenant, outstanding - running.outstanding, weight)
            running.outstanding = outstanding
            if is_over:
                self.running.remove(running)

    def bound(self, name: str) -> float:
        """U of the tenant."""
        return self.num_places * self.tenants[name].longest / self.tenants[name].weight


costs = st.integers(1, 50).map(float)
plays = st.tuples(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0, 4.0]), costs), min_size=2, max_size=4),
    st.integers(1, 8),
    st.integers(1, 10).map(float),
    st.integers(0, 2**32),
)


@settings(max_examples=60)
@given(plays)
def test_two_tenants_that_wait_throughout_get_the_same_up_to_the_bound(
    play: tuple[list[tuple[float, float]], int, float, int],
) -> None:
    shares, num_places, step, seed = play
    random, counters = Random(seed), VirtualCounters()
    tenants = {f"t{number}": Tenant(weight, longest) for number, (weight, longest) in enumerate(shares)}
    pool = Pool(counters, tenants, num_places, step)
    first, second, *others = tenants
    differences: list[float] = []
    for _ in range(250):
        for name in (first, second):
            while len(tenants[name].queue) <= num_places:
                pool.enqueue(name, draw(random, tenants[name].longest))
        for name in others:
            if random.random() < 0.2:
                pool.enqueue(name, draw(random, tenants[name].longest))
        pool.place()
        pool.compute()
        differences.append(tenants[first].given - tenants[second].given)

    widest = max(differences) - min(differences)
    assert widest <= 2 * (pool.bound(first) + pool.bound(second)) + 1e-6


def draw(random: Random, longest: float) -> Sequence:
    return Sequence(random.uniform(0.0, longest), random.uniform(0.1, longest))


@pytest.mark.parametrize("num_places", [1, 4, 32])
def test_weights_divide_what_is_computed(num_places: int) -> None:
    random, counters = Random(1), VirtualCounters()
    tenants = {f"w{weight:g}": Tenant(weight, 50.0) for weight in (1.0, 2.0, 4.0)}
    pool = Pool(counters, tenants, num_places, 5.0)
    for _ in range(200_000 // num_places):
        for name, tenant in tenants.items():
            while len(tenant.queue) <= num_places:
                pool.enqueue(name, draw(random, tenant.longest))
        pool.place()
        pool.compute()

    fair = sum(tenant.given * tenant.weight for tenant in tenants.values()) / sum(
        tenant.weight for tenant in tenants.values()
    )
    assert all(tenant.given == pytest.approx(fair, rel=0.02) for tenant in tenants.values())


def test_a_tenant_that_begins_to_wait_is_lifted_to_the_smallest_counter_of_those_that_wait() -> None:
    counters = VirtualCounters()
    for tenant in ("a", "b"):
        counters.enter(tenant)
    counters.charge("a", 100.0, 1.0)
    counters.charge("b", 70.0, 1.0)
    counters.enter("late")

    assert counters.counter("late") == 70.0


def test_where_nobody_waits_it_is_lifted_to_the_one_that_waited_last() -> None:
    counters = VirtualCounters()
    counters.enter("a")
    counters.leave("a")
    counters.charge("a", 100.0, 1.0)
    counters.enter("late")

    assert counters.counter("late") == 100.0


def test_a_tenant_above_the_smallest_counter_is_not_lowered() -> None:
    counters = VirtualCounters()
    counters.enter("a")
    counters.charge("b", 100.0, 1.0)
    counters.enter("b")

    assert counters.counter("b") == 100.0


def test_what_is_given_back_is_told_once() -> None:
    counters = VirtualCounters()
    counters.charge("a", 10.0, 2.0)
    assert set(counters.take_lowered()) == set()
    counters.charge("a", -4.0, 2.0)

    assert counters.counter("a") == 3.0
    assert set(counters.take_lowered()) == {"a"}
    assert set(counters.take_lowered()) == set()


def test_what_is_expected_counts_until_it_has_come_or_will_not() -> None:
    counters = VirtualCounters()
    counters.expect("a", 10.0, 2.0)
    assert counters.counter("a") == 5.0
    counters.charge("a", 4.0, 2.0)
    counters.expect("a", -10.0, 2.0)

    assert counters.counter("a") == 2.0
    assert set(counters.take_lowered()) == {"a"}
    assert counters.given()["a"].cost == 2.0


def test_a_lift_leaves_expectations_out() -> None:
    counters = VirtualCounters()
    counters.enter("a")
    counters.charge("a", 3.0, 1.0)
    counters.expect("a", 10.0, 1.0)
    counters.enter("late")

    assert counters.counter("late") == 3.0


def test_while_nobody_waits_nobody_needs_to_know_whose_counter_fell() -> None:
    counters = VirtualCounters()
    for number in range(3):
        counters.enter(f"t{number}")
        counters.charge(f"t{number}", -1.0, 1.0)
        counters.leave(f"t{number}")

    assert set(counters.take_lowered()) == set()


def test_a_cached_token_is_nearly_free_and_an_output_token_is_dearer_than_one_of_a_prompt() -> None:
    assert cost_of(1000, 0, 0) == 1000.0
    assert cost_of(1000, 1000, 0) == pytest.approx(20.0)
    assert cost_of(0, 0, 10) == 20.0


def test_counters_of_tenants_that_do_not_wait_are_forgotten_beyond_a_number() -> None:
    counters = VirtualCounters()
    counters.enter("waiting")
    for number in range(MAX_TENANTS + 10):
        counters.charge(f"t{number}", 1.0 + number, 1.0)
    counters.take_elsewhere({}, ())

    assert counters.num_tenants == MAX_TENANTS + 1
    assert counters.counter("t9") == 0.0
    assert counters.counter("t10") == 11.0
