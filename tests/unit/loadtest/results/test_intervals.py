"""Known tables, and coverage by simulation."""

import math

import numpy as np
import pytest

from penstock_loadtest.results.intervals import (
    MIN_PAIRS,
    OrderInterval,
    bootstrap,
    estimate_difference,
    estimate_ratio,
    find_median_interval,
)

# rank of the lower order statistic of the 95 % interval for a median, and its coverage: two-sided sign test tables
TABLE = {
    6: (1, 0.9688),
    7: (1, 0.9844),
    8: (1, 0.9922),
    9: (2, 0.9609),
    10: (2, 0.9785),
    12: (3, 0.9614),
    15: (4, 0.9648),
    20: (6, 0.9586),
    25: (8, 0.9567),
}


@pytest.mark.parametrize(("n", "expected"), TABLE.items())
def test_the_order_statistics_are_those_of_the_sign_test_tables(n: int, expected: tuple[int, float]) -> None:
    interval = find_median_interval(n)

    assert interval is not None
    assert (interval.rank, round(interval.coverage, 4)) == expected


def test_the_next_narrower_interval_would_not_reach_the_confidence() -> None:
    for n in range(MIN_PAIRS, 200):
        interval = find_median_interval(n)
        assert isinstance(interval, OrderInterval)
        narrower = 1 - 2 * sum(math.comb(n, k) for k in range(interval.rank + 1)) / 2**n

        assert interval.coverage >= 0.95 > narrower


def test_with_fewer_than_six_pairs_there_is_no_interval_and_it_is_said() -> None:
    estimate = estimate_ratio([(1.0, 1.2)] * (MIN_PAIRS - 1))

    assert estimate.value == pytest.approx(1.2)
    assert (estimate.low, estimate.high, estimate.coverage) == (None, None, None)
    assert estimate.note == "a 95 % interval needs at least 6 pairs, there are 5"
    assert not estimate.is_distinguishable


def test_six_pairs_give_the_least_and_the_largest_ratio() -> None:
    ratios = [1.1, 1.3, 1.2, 1.5, 1.4, 1.6]
    estimate = estimate_ratio([(2.0, 2.0 * ratio) for ratio in ratios])

    assert (estimate.low, estimate.high) == (pytest.approx(1.1), pytest.approx(1.6))
    assert estimate.value == pytest.approx(math.sqrt(1.3 * 1.4)), "the geometric mean of the middle two"
    assert estimate.is_distinguishable


def test_swapping_the_sides_inverts_value_and_interval() -> None:
    pairs = [(1.0, 1.1), (1.2, 1.3), (0.9, 1.4), (1.1, 1.0), (1.0, 1.6), (1.3, 1.5), (1.0, 0.8)]
    one, other = estimate_ratio(pairs), estimate_ratio([(b, a) for a, b in pairs])

    assert other.value == pytest.approx(1 / (one.value or 0))
    assert other.low == pytest.approx(1 / (one.high or 0))
    assert other.high == pytest.approx(1 / (one.low or 0))


def test_a_difference_both_ways_is_not_distinguishable() -> None:
    assert not estimate_ratio([(1.0, 1.1), (1.0, 0.9)] * 5).is_distinguishable
    assert not estimate_difference([(1.0, 1.1), (1.0, 0.9)] * 5).is_distinguishable


def test_pairs_without_a_ratio_are_left_out_and_counted() -> None:
    estimate = estimate_ratio([(1.0, 2.0)] * 6 + [(0.0, 1.0), (1.0, 0.0)])

    assert estimate.pairs == 6
    assert estimate.value == pytest.approx(2.0)
    assert estimate.note == "2 pairs have no ratio: a value is not above 0"


def test_nothing_measured_is_nothing_claimed() -> None:
    assert estimate_ratio([]).value is None
    assert estimate_difference([]).value is None


def test_a_paired_difference_is_around_the_shift() -> None:
    rng = np.random.default_rng(3)
    drift = rng.normal(0, 5, 11)
    estimate = estimate_difference(
        [(d, d + 0.25 + noise) for d, noise in zip(drift, rng.normal(0, 0.01, 11), strict=True)]
    )

    assert estimate.value == pytest.approx(0.25, abs=0.02)
    assert estimate.is_distinguishable


@pytest.mark.parametrize("n", [6, 10, 15])
def test_the_interval_covers_the_true_ratio_as_often_as_it_says(n: int) -> None:
    rng = np.random.default_rng(7)
    trials, truth = 3000, 1.2
    noise = np.exp(rng.standard_t(2, (trials, n)))  # heavy tails: nothing normal is assumed
    covered = 0
    for row in noise:
        estimate = estimate_ratio([(1.0, truth * factor) for factor in row])
        covered += (estimate.low or 0) <= truth <= (estimate.high or 0)
    interval = find_median_interval(n)

    assert interval is not None
    assert covered / trials == pytest.approx(interval.coverage, abs=4 * math.sqrt(0.05 * 0.95 / trials))


def test_the_bootstrap_covers_a_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(11)
    covered = 0
    for _ in range(300):
        low, high = bootstrap(rng.normal(2.0, 1.0, (60, 1)), lambda drawn: drawn.mean(axis=(1, 2)), rng, draws=300)
        covered += low <= 2.0 <= high

    assert 0.89 <= covered / 300 <= 0.99


def test_the_bootstrap_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw from"):
        bootstrap(np.empty((0, 2)), lambda drawn: drawn[:, 0, 0], np.random.default_rng(0))
