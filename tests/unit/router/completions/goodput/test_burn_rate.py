from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.completions.goodput.burn_rate import NUM_BUCKETS, SLOT_S, WINDOWS_S, BurnRates, Counts, Window

STEPS = st.lists(st.tuples(st.floats(0, 200), st.booleans()), max_size=120)
"""Seconds since the request before, and whether the request was out of target."""


def test_a_burn_rate_is_the_share_out_of_target_by_what_the_objective_leaves() -> None:
    rates = BurnRates(objective=0.99)
    for number in range(1000):
        rates.add(50.0, is_missed=number < 144)

    assert rates.rate("1h", 50.0) == pytest.approx(14.4), "2 % of 30 days' error budget in an hour (SRE workbook)"


def test_right_after_a_quiet_time_only_what_came_since_counts() -> None:
    rates = BurnRates(objective=0.9)
    for at_s in range(300):
        rates.add(float(at_s), is_missed=True)
    assert rates.rate("5m", 299.0) == pytest.approx(10.0)

    assert rates.rate("5m", 299.0 + 306) == 0.0
    rates.add(700.0, is_missed=False)
    assert rates.rate("5m", 700.0) == 0.0
    assert rates.rate("1h", 700.0) == pytest.approx(10 * 300 / 301)


def test_each_window_forgets_in_its_own_time() -> None:
    rates = BurnRates(objective=0.5)
    rates.add(0.0, is_missed=True)

    def burning(at_s: float) -> list[str]:
        return [name for name in WINDOWS_S if rates.rate(name, at_s)]

    assert burning(299.0) == ["5m", "1h", "6h"]
    assert burning(400.0) == burning(3599.0) == ["1h", "6h"]
    assert burning(4000.0) == burning(21599.0) == ["6h"]
    assert burning(22000.0) == []


@given(STEPS, st.floats(0, 1000))
def test_a_window_counts_what_is_in_it_to_a_bucket(steps: list[tuple[float, bool]], rest_s: float) -> None:
    window = Window(300.0)
    times = list(accumulate(after_s for after_s, _ in steps))
    for at_s, (_, is_missed) in zip(times, steps, strict=True):
        window.add(at_s, Counts(1, int(is_missed)))
    now = (times[-1] if times else 0.0) + rest_s

    def truth(length_s: float) -> Counts:
        inside = [is_missed for at_s, (_, is_missed) in zip(times, steps, strict=True) if at_s > now - length_s]
        return Counts(len(inside), sum(inside))

    found, least, most = window.counts(now), truth(300.0), truth(300.0 * (1 + 1 / NUM_BUCKETS) + 1e-6)
    assert least.total <= found.total <= most.total
    assert least.missed <= found.missed <= most.missed


@given(STEPS)
def test_requests_of_a_slot_go_into_the_windows_together_and_none_is_lost(steps: list[tuple[float, bool]]) -> None:
    rates, windows = BurnRates(0.5), {name: Window(length_s) for name, length_s in WINDOWS_S.items()}
    now = 0.0
    for after_s, is_missed in steps:
        now += after_s
        rates.add(now, is_missed=is_missed)
        for window in windows.values():
            window.add(now, Counts(1, int(is_missed)))

    for name, window in windows.items():
        total, missed = window.counts(now)
        assert rates.rate(name, now) == (pytest.approx(2 * missed / total) if total else 0.0)
    assert all(length_s / NUM_BUCKETS % SLOT_S == 0 for length_s in WINDOWS_S.values())


def test_memory_does_not_grow() -> None:
    window = Window(300.0)
    for number in range(10_000):
        window.add(number / 3, Counts(1, 0))

    assert len(window._total) == len(window._missed) == NUM_BUCKETS + 1
