import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.pace import Pace


def test_a_burst_does_not_wait_and_the_rest_comes_at_the_rate() -> None:
    subject = Pace(rate=2, burst=3)

    assert [subject.count("a", 10, 5) for _ in range(5)] == [0, 0, 0, pytest.approx(0.5), pytest.approx(1)]
    assert subject.count("b", 10, 5) == 0


def test_a_wait_is_bounded_and_over_once_the_debt_is() -> None:
    subject = Pace(rate=2, burst=3)
    waits = [subject.count("a", 10, 5) for _ in range(100)]

    assert max(waits) == 5
    assert subject.count("a", 10 + 5 + 1.5, 5) == 0


def test_what_is_not_within_the_rate_does_not_count() -> None:
    subject = Pace(rate=2, burst=3)

    assert [subject.take("a", 10) for _ in range(5)] == [True, True, True, False, False]
    assert [subject.take("a", 10.5) for _ in range(2)] == [True, False]


def test_a_rate_below_one_lets_one_through() -> None:
    subject = Pace(rate=0.1, burst=0.1)

    assert [subject.take("a", now_s) for now_s in (0, 1, 9, 10.001)] == [True, False, False, True]


def test_names_are_forgotten_the_quietest_first() -> None:
    subject = Pace(rate=1, burst=1, max_names=2)
    for name in ("a", "b", "a", "c"):
        subject.take(name, 0)

    assert len(subject) == 2
    assert not subject.take("a", 0)
    assert subject.take("b", 0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_never_more_than_burst_and_rate_are_taken(gaps: list[float]) -> None:
    subject, now_s, taken = Pace(rate=5, burst=4), 0.0, 0
    for gap in gaps:
        now_s += gap
        taken += subject.take("a", now_s)

    assert taken <= 4 + 5 * now_s + 1e-6
