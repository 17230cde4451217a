"""The policy that goes by money: the cheapest route that is predicted to meet the target."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.routing.tiers import TIE_SHARE, RouteForecast, TierDecision, TierReason, decide

TARGET_S = 0.5
DOWN, FULL = (RouteForecast(obstacle=reason) for reason in (TierReason.TIER_DOWN, TierReason.TIER_FULL))


def in_time(cost: int | None) -> RouteForecast:
    return RouteForecast(0.1, cost_nano=cost, tpot_s=0.02)


def late(cost: int | None, ttft_s: float = 0.8) -> RouteForecast:
    return RouteForecast(ttft_s, cost_nano=cost)


def slow(cost: int | None) -> RouteForecast:
    return RouteForecast(0.1, cost_nano=cost, tpot_s=0.2, is_slow=True)


@pytest.mark.parametrize(
    ("forecasts", "route", "reason"),
    [
        ([in_time(200), in_time(100)], 1, TierReason.CHEAPEST),
        ([in_time(100), in_time(200)], 0, TierReason.CHEAPEST),
        ([late(100), in_time(200)], 1, TierReason.PREDICTED_TTFT),
        ([in_time(200), late(100)], 0, TierReason.PREDICTED_TTFT),
        ([late(300), in_time(200)], 1, TierReason.CHEAPEST),
        ([slow(100), in_time(200)], 1, TierReason.PREDICTED_TPOT),
        ([slow(50), late(100), in_time(200)], 2, TierReason.PREDICTED_TPOT),
        ([FULL, in_time(200)], 1, TierReason.CHEAPEST),
        ([late(100, 0.9), late(200, 0.8)], 1, TierReason.NONE_BETTER),
        ([late(100, 0.8), FULL], 0, TierReason.NONE_BETTER),
        ([slow(100), late(50)], 0, TierReason.NONE_BETTER),
        ([FULL, DOWN], None, TierReason.TIER_FULL),
        ([], None, TierReason.TIER_DOWN),
    ],
)
def test_the_cheapest_that_meets_the_target_is_taken_and_of_none_the_soonest(
    forecasts: list[RouteForecast], route: int | None, reason: TierReason
) -> None:
    assert decide(forecasts, TARGET_S, by_cost=True) == TierDecision(route, reason)


@pytest.mark.parametrize(
    ("forecasts", "route", "reason"),
    [
        ([in_time(None), in_time(10**9)], 1, TierReason.CHEAPEST),
        ([in_time(10**9), in_time(None)], 0, TierReason.CHEAPEST),
        ([in_time(None), in_time(None)], 0, TierReason.PREFERRED),
        ([late(100), in_time(None)], 1, TierReason.PREDICTED_TTFT),
        ([late(None), in_time(100)], 1, TierReason.CHEAPEST),
        ([in_time(0), in_time(None)], 0, TierReason.CHEAPEST),
    ],
)
def test_a_route_without_a_price_comes_behind_all_that_have_one(
    forecasts: list[RouteForecast], route: int, reason: TierReason
) -> None:
    assert decide(forecasts, TARGET_S, by_cost=True) == TierDecision(route, reason)


def test_costs_that_are_the_same_as_far_as_can_be_told_leave_it_to_the_policys_order() -> None:
    assert decide([in_time(1029), in_time(1000)], TARGET_S, by_cost=True).route == 0
    assert decide([in_time(1031), in_time(1000)], TARGET_S, by_cost=True).route == 1


@pytest.mark.parametrize(
    ("skipped", "reason"),
    [(TierReason.CAPABILITY, TierReason.CHEAPEST), (TierReason.ESCALATED, TierReason.ESCALATED)],
)
def test_a_route_that_was_left_out_beforehand_is_no_reason_unless_it_sent_the_request_on(
    skipped: TierReason, reason: TierReason
) -> None:
    assert decide([in_time(2), in_time(1)], TARGET_S, skipped, by_cost=True) == TierDecision(1, reason)


forecasts = st.lists(
    st.one_of(
        st.builds(
            RouteForecast,
            st.floats(0, 2),
            cost_nano=st.none() | st.integers(0, 1000),
            is_slow=st.booleans(),
        ),
        st.sampled_from([DOWN, FULL]),
    ),
    max_size=6,
)


@given(forecasts)
def test_nothing_cheaper_meets_the_target_and_what_misses_it_is_taken_only_where_all_do(
    found: list[RouteForecast],
) -> None:
    route, _ = decide(found, TARGET_S, by_cost=True)

    able = [each for each in found if each.obstacle is None]
    if route is None:
        assert not able
        return
    chosen = found[route]
    assert chosen in able
    meeting = [each for each in able if (each.ttft_s or 0.0) <= TARGET_S and not each.is_slow]
    if chosen not in meeting:
        assert not meeting
        assert chosen.ttft_s == min(each.ttft_s or 0.0 for each in able)
        return
    costs = [each.cost_nano for each in meeting if each.cost_nano is not None]
    if chosen.cost_nano is None:
        assert not costs
    else:
        assert chosen.cost_nano <= min(costs) * (1 + TIE_SHARE)
