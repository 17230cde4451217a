from hypothesis import given
from hypothesis import strategies as st

from penstock.router.dispatch.shares.place_shares import ACTIVE_S, MIN_PLACES, PlaceShares


def shares(*tenants: tuple[str, float], now: float = 0.0, reserve: float = 0.05) -> PlaceShares:
    made = PlaceShares(reserve)
    for tenant, rate in tenants:
        made.ask(tenant, rate, now)
    return made


def test_alone_a_tenant_may_have_all_places() -> None:
    assert not shares(("flooder", 1.0)).must_leave("flooder", 31, 1, 32)


def test_with_its_share_it_leaves_the_last_places_to_others() -> None:
    both = shares(("flooder", 1.0), ("light", 1.0))

    assert both.must_leave("flooder", 30, 2, 32)
    assert not both.must_leave("flooder", 29, 3, 32)
    assert not both.must_leave("light", 15, 1, 32)


def test_a_share_goes_by_weight() -> None:
    both = shares(("heavyweight", 3.0), ("light", 1.0))

    assert not both.must_leave("heavyweight", 23, 1, 32)
    assert both.must_leave("heavyweight", 24, 1, 32)


def test_who_asks_no_more_has_no_place_kept() -> None:
    both = shares(("flooder", 1.0), ("light", 1.0))
    both.ask("flooder", 1.0, ACTIVE_S)
    assert both.must_leave("flooder", 31, 1, 32)
    both.ask("flooder", 1.0, ACTIVE_S + 0.1)

    assert not both.must_leave("flooder", 31, 1, 32)


def test_below_its_share_is_who_has_it_with_one_more_at_most():
    both = shares(("heavyweight", 3.0), ("light", 1.0))

    assert both.is_below("heavyweight", 23, 32)
    assert not both.is_below("heavyweight", 24, 32)
    assert both.is_below("light", 7, 32)
    assert not both.is_below("light", 8, 32)
    assert not shares(("alone", 1.0)).is_below("alone", 0, 32)


def test_who_has_its_share_has_it_only_while_others_want_some() -> None:
    both = shares(("flooder", 1.0), ("light", 1.0))

    assert both.has_share("flooder", 16, 32)
    assert not both.has_share("flooder", 15, 32)
    assert not both.has_share("flooder", 7, MIN_PLACES - 1)
    assert not shares(("flooder", 1.0)).has_share("flooder", 32, 32)


def test_few_places_are_not_divided_and_neither_are_any_where_none_are_reserved() -> None:
    tenants = ("flooder", 1.0), ("light", 1.0)

    assert not shares(*tenants).must_leave("flooder", MIN_PLACES - 2, 1, MIN_PLACES - 1)
    assert not shares(*tenants, reserve=0.0).must_leave("flooder", 31, 1, 32)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.01, 100.0), st.floats(0.0, 4.0))), st.integers(8, 100))
def test_a_tenant_below_its_share_is_never_kept_from_a_place(
    asked: list[tuple[str, float, float]], num_places: int
) -> None:
    made, now, latest = PlaceShares(0.5), 0.0, {}
    for tenant, rate, pause_s in asked:
        now += pause_s
        made.ask(tenant, rate, now)
        latest[tenant] = rate, now
    active = {tenant: rate for tenant, (rate, at) in latest.items() if at >= now - ACTIVE_S}

    for tenant, rate in active.items():
        below = int(rate / sum(active.values()) * num_places * 0.999)
        assert not made.must_leave(tenant, max(0, below - 1), 1, num_places)
