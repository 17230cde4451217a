from hypothesis import given
from hypothesis import strategies as st

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.policy import Decision, Reason
from penstock.autoscale.range import Range, limit

REASONS = st.sampled_from(list(Reason))


@given(st.integers(0, 8), st.integers(0, 8), st.lists(st.tuples(st.booleans(), st.integers(0, 10), REASONS)))
def test_a_range_is_never_empty_and_never_wider_than_before(
    least: int, width: int, bounds: list[tuple[bool, int, Reason]]
) -> None:
    allowed = Range(least, least + width)
    for is_upper, number, reason in bounds:
        before, allowed = allowed, allowed.at_most(number, reason) if is_upper else allowed.at_least(number, reason)

        assert 0 <= allowed.least <= allowed.most <= before.most
        assert allowed.least >= min(before.least, allowed.most)


def test_the_bound_that_moves_a_target_names_itself() -> None:
    allowed = Range(1, 4).at_least(2, Reason.ARRIVAL).at_most(3, Reason.UNUSED)

    assert allowed.explain(Decision(2, Reason.BOUNDS), before=1).reason is Reason.ARRIVAL
    assert allowed.explain(Decision(3, Reason.BOUNDS), before=4).reason is Reason.UNUSED
    assert allowed.explain(Decision(3, Reason.FULL), before=3).reason is Reason.UNUSED
    assert Range(1, 4).explain(Decision(4, Reason.FULL), before=4).reason is Reason.FULL
    assert allowed.explain(Decision(3, Reason.DEMAND), before=2).reason is Reason.DEMAND


def test_settings_get_the_bounds_of_the_range() -> None:
    settings = AutoscaleConfig(min_replicas=1, max_replicas=4)

    limited = limit(settings, Range(0, 0))

    assert (limited.min_replicas, limited.max_replicas) == (0, 0)
    assert limit(settings, Range(1, 4)) is settings
