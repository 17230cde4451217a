from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.routing.policy import Wait
from penstock.router.routing.tiers import (
    OBSTACLE,
    RouteForecast,
    Tier,
    TierDecision,
    TierPolicy,
    TierReason,
    TierRule,
    decide,
    in_order,
    may_leave,
    parse_policy,
)

TARGET_S = 0.5
SOON, LATE, LATER = RouteForecast(0.1), RouteForecast(0.8), RouteForecast(2.0)
DOWN, FULL, OPEN = (
    RouteForecast(obstacle=reason) for reason in (TierReason.TIER_DOWN, TierReason.TIER_FULL, TierReason.BREAKER_OPEN)
)


class Place(NamedTuple):
    tier: Tier
    name: str


EDGE, CLOUD, PROVIDER = Place("edge", "a"), Place("cloud", "b"), Place("cloud", "c")


@pytest.mark.parametrize(
    ("forecasts", "route", "reason"),
    [
        ([SOON, SOON], 0, TierReason.PREFERRED),
        ([LATE], 0, TierReason.NONE_BETTER),
        ([LATE, SOON], 1, TierReason.PREDICTED_TTFT),
        ([LATE, LATER], 0, TierReason.NONE_BETTER),
        ([LATER, LATE], 1, TierReason.PREDICTED_TTFT),
        ([LATER, LATE, SOON], 2, TierReason.PREDICTED_TTFT),
        ([LATE, DOWN], 0, TierReason.NONE_BETTER),
        ([DOWN, LATE], 1, TierReason.TIER_DOWN),
        ([FULL, SOON], 1, TierReason.TIER_FULL),
        ([OPEN, SOON], 1, TierReason.BREAKER_OPEN),
        ([FULL, DOWN, LATER], 2, TierReason.TIER_FULL),
        ([FULL, DOWN], None, TierReason.TIER_FULL),
        ([], None, TierReason.TIER_DOWN),
    ],
)
def test_the_first_route_is_left_only_for_a_reason(
    forecasts: list[RouteForecast], route: int | None, reason: TierReason
) -> None:
    assert decide(forecasts, TARGET_S) == TierDecision(route, reason)


def test_a_prediction_that_just_meets_the_target_stays() -> None:
    assert decide([RouteForecast(TARGET_S), RouteForecast(0.0)], TARGET_S).route == 0


def test_no_further_route_is_looked_at_than_needed() -> None:
    made = []

    def make(index: int) -> RouteForecast:
        made.append(index)
        return (LATE, SOON, SOON)[index]

    decide((make(index) for index in range(3)), TARGET_S)

    assert made == [0, 1]


def test_a_route_that_was_left_out_beforehand_names_the_reason() -> None:
    assert decide([LATE, SOON], TARGET_S, skipped=TierReason.CONTEXT_TOO_LONG) == TierDecision(
        1, TierReason.CONTEXT_TOO_LONG
    )


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (TierPolicy.EDGE_FIRST, [EDGE, CLOUD, PROVIDER]),
        (TierPolicy.CLOUD_FIRST, [CLOUD, PROVIDER, EDGE]),
        (TierPolicy.EDGE_ONLY, [EDGE]),
    ],
)
def test_a_policy_orders_the_tiers_it_allows(policy: TierPolicy, expected: list[Place]) -> None:
    assert in_order([CLOUD, EDGE, PROVIDER], TierRule(policy)) == expected


@given(st.sampled_from(TierPolicy), st.lists(st.sampled_from([CLOUD, EDGE, PROVIDER])))
def test_a_request_that_stays_has_those_of_its_policys_routes_that_are_on_the_edge(
    policy: TierPolicy, routes: list[Place]
) -> None:
    rule = TierRule(policy, stays=True)

    assert in_order(routes, rule) == [route for route in in_order(routes, TierRule(policy)) if route.tier == "edge"]
    assert may_leave(rule, "edge")
    assert not may_leave(rule, "cloud")


def test_never_leave_is_another_name_for_edge_only() -> None:
    assert parse_policy("never_leave") is TierPolicy.EDGE_ONLY
    with pytest.raises(ValueError):
        parse_policy("somewhere")


def test_every_wait_for_a_replica_is_an_obstacle_of_its_tier() -> None:
    assert OBSTACLE.keys() == set(Wait)


forecasts = st.lists(
    st.one_of(st.builds(RouteForecast, st.floats(0, 5)), st.sampled_from([DOWN, FULL, OPEN])), max_size=6
)


@given(forecasts)
def test_what_is_chosen_has_no_obstacle_and_nothing_before_it_is_as_good(found: list[RouteForecast]) -> None:
    route, _ = decide(found, TARGET_S)

    able = [index for index, forecast in enumerate(found) if forecast.obstacle is None]
    if route is None:
        assert not able
        return
    assert route in able
    chosen_s = found[route].ttft_s
    assert chosen_s is not None
    for index in able:
        ttft_s = found[index].ttft_s
        assert ttft_s is not None
        if index < route:
            assert ttft_s > max(TARGET_S, chosen_s)
        elif chosen_s > TARGET_S:
            assert ttft_s >= chosen_s
