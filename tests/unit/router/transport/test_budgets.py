import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import PenstockError
from penstock.router.transport.budgets import ALPHA, Budget
from penstock.wire.errors import Overloaded, RateLimited


def take_all(subject: Budget, tenant: str) -> tuple[int, PenstockError]:
    """How many a tenant gets one by one, and why no more."""
    for count in range(10_000):
        try:
            subject.take(tenant, 1)
        except (Overloaded, RateLimited) as error:
            return count, error
    raise AssertionError("the budget has no end")


def test_one_tenant_alone_gets_four_fifths_and_the_next_one_most_of_the_rest() -> None:
    subject = Budget(1000, "requests")

    count, error = take_all(subject, "a")
    assert count == 800
    assert isinstance(error, RateLimited)
    assert error.retry_after_s
    assert "800 are yours" in error.message
    assert take_all(subject, "b")[0] == 160


def test_tenants_that_take_in_turn_get_equal_parts() -> None:
    subject = Budget(900, "requests")
    held = dict.fromkeys("abcd", 0)
    for _ in range(900):
        for tenant in held:
            try:
                subject.take(tenant, 1)
            except RateLimited:
                continue
            held[tenant] += 1

    assert max(held.values()) - min(held.values()) <= 1
    assert sum(held.values()) == pytest.approx(900 * 4 * ALPHA / (1 + 4 * ALPHA), abs=4)


def test_what_is_beyond_all_is_the_gateways_refusal() -> None:
    subject = Budget(3, "requests")

    with pytest.raises(Overloaded, match="3 requests in hand"):
        subject.take("a", 4)


def test_a_small_budget_is_usable_to_the_last() -> None:
    assert take_all(Budget(2, "requests"), "a")[0] == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.booleans()), max_size=60))
def test_the_parts_add_up_and_nothing_is_left_when_all_is_given_back(steps: list[tuple[str, int, bool]]) -> None:
    subject = Budget(12, "requests")
    held: list[tuple[str, int]] = []
    for tenant, amount, is_back in steps:
        if is_back and held:
            subject.give_back(*held.pop(0))
        else:
            try:
                subject.take(tenant, amount)
            except (Overloaded, RateLimited):
                continue
            held.append((tenant, amount))
        assert subject.num_held == sum(amount for _, amount in held) <= 12
    for tenant, amount in held:
        subject.give_back(tenant, amount)
    assert subject.num_held == 0
