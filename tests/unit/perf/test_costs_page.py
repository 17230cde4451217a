from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.costs_page import read_costs, show_costs
from penstock.wire.frames import Stairs, StepCosts

seconds = st.floats(0, 10)
stairs = st.builds(
    Stairs,
    st.integers(0, 512),
    st.integers(0, 8192),
    seconds,
    st.dictionaries(st.integers(1, 512), seconds, max_size=8).map(lambda found: tuple(sorted(found.items()))),
)


@given(st.builds(StepCosts, *[seconds] * 9, st.none() | stairs))
def test_costs_come_back_as_they_were_shown(costs: StepCosts) -> None:
    assert read_costs(show_costs(costs)) == costs


def test_what_a_later_version_adds_is_passed_over() -> None:
    assert read_costs({"base_s": 0.5, "something_s": 1.0}) == StepCosts(base_s=0.5)
