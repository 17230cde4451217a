import math
from itertools import islice, pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_loadtest.scenario import Arrivals
from penstock_loadtest.workload.arrivals import draw_arrival_times, make_rate_profile

RATES = st.floats(0.01, 1000)
STEADY = st.one_of(
    st.builds(lambda rate: Arrivals(process="constant", rate=rate), RATES),
    st.builds(lambda rate: Arrivals(rate=rate), RATES),
    st.builds(lambda rate, cv: Arrivals(process="gamma", rate=rate, cv=cv), RATES, st.floats(0.05, 8)),
)
CHANGING = st.builds(
    lambda process, rate, to_rate: Arrivals(process=process, rate=rate, to_rate=to_rate),
    st.sampled_from(["step", "ramp", "spike"]),
    RATES,
    st.just(0.0) | RATES,
)


def until(end_s: float, arrivals: Arrivals, duration_s: float | None = 60.0, seed: int = 3) -> np.ndarray:
    return np.array(
        list(
            takewhile(lambda at_s: at_s < end_s, draw_arrival_times(arrivals, duration_s, np.random.default_rng(seed)))
        )
    )


def counts(arrivals: Arrivals, end_s: float, seeds: int) -> np.ndarray:
    return np.array([len(until(end_s, arrivals, seed=seed)) for seed in range(seeds)])


def ks_distance_to_exponential(gaps: np.ndarray) -> float:
    """Kolmogorov-Smirnov: largest distance between the gaps' distribution and the exponential one with mean 1."""
    fitted = 1 - np.exp(-np.sort(gaps))
    steps = np.arange(len(gaps) + 1) / len(gaps)
    return float(max(np.abs(fitted - steps[1:]).max(), np.abs(fitted - steps[:-1]).max()))


@given(STEADY | CHANGING, st.integers(0, 2**32))
def test_times_ascend_from_zero_on_and_are_reproducible(arrivals: Arrivals, seed: int) -> None:
    times = list(islice(draw_arrival_times(arrivals, 60.0, np.random.default_rng(seed)), 200))

    assert all(0 <= time < math.inf for time in times)
    assert all(before <= after for before, after in pairwise(times))
    assert times[:50] == list(islice(draw_arrival_times(arrivals, 60.0, np.random.default_rng(seed)), 50))


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.sampled_from(["constant", "poisson", "gamma"]))
def test_a_higher_rate_is_the_same_process_run_faster(rate: float, other: float, process: str) -> None:
    """What makes a ladder's steps comparable."""
    times, faster = (
        list(islice(draw_arrival_times(Arrivals(process=process, rate=each), None, np.random.default_rng(1)), 50))
        for each in (rate, other)
    )  # type: ignore[arg-type]

    assert np.array(times) * rate == pytest.approx(np.array(faster) * other)


def test_constant_arrivals_are_a_clock_without_drift() -> None:
    times = until(10.0, Arrivals(process="constant", rate=100))

    assert times == pytest.approx(np.arange(1000) / 100, abs=1e-12)


def test_poisson_gaps_are_exponential_and_have_the_rate() -> None:
    times = until(4000.0, Arrivals(rate=5))
    gaps = np.diff(times) * 5

    assert len(times) == pytest.approx(20_000, abs=4 * math.sqrt(20_000))
    assert ks_distance_to_exponential(gaps) < 1.63 / math.sqrt(len(gaps)), "1 % level"
    assert np.corrcoef(gaps[:-1], gaps[1:])[0, 1] == pytest.approx(0, abs=0.03), "independent"


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
def test_gamma_gaps_have_the_rate_and_the_variation(cv: float) -> None:
    times = until(4000.0, Arrivals(process="gamma", rate=5, cv=cv))
    gaps = np.diff(times)

    assert len(times) == pytest.approx(20_000, rel=4 * max(cv, 0.3) / math.sqrt(20_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)


def test_gamma_with_a_variation_of_one_is_poisson() -> None:
    gaps = np.diff(until(4000.0, Arrivals(process="gamma", rate=5, cv=1))) * 5

    assert ks_distance_to_exponential(gaps) < 1.63 / math.sqrt(len(gaps))


@pytest.mark.parametrize("cv", [0.2, 4.0])
def test_bursty_arrivals_have_their_rate_from_the_first_second_on(cv: float) -> None:
    """Begun with an arrival instead, cv 4 would have 7.5 requests more in the beginning than its rate says."""
    first = counts(Arrivals(process="gamma", rate=2, cv=cv), 5.0, 1500)

    assert first.mean() == pytest.approx(10, abs=4 * first.std() / math.sqrt(1500))
    assert 4 * first.std() / math.sqrt(1500) < 1.6, "the test can tell"


@pytest.mark.parametrize(
    ("arrivals", "rate_at"),
    [
        (Arrivals(process="step", rate=20, to_rate=80, at_s=50), lambda t: np.where(t < 50, 20.0, 80.0)),
        (Arrivals(process="step", rate=20, to_rate=80), lambda t: np.where(t < 40, 20.0, 80.0)),
        (Arrivals(process="ramp", rate=10, to_rate=100), lambda t: 10 + 90 * t / 120),
        (Arrivals(process="ramp", rate=0, to_rate=100, length_s=60), lambda t: np.minimum(100, 100 * t / 60)),
        (Arrivals(process="ramp", rate=90, to_rate=0.5, length_s=100), lambda t: np.maximum(0.5, 90 - 0.895 * t)),
        (
            Arrivals(process="spike", rate=20, to_rate=150, at_s=30, length_s=10),
            lambda t: np.where((t >= 30) & (t < 40), 150.0, 20.0),
        ),
        (Arrivals(process="spike", rate=20, to_rate=0), lambda t: np.where((t >= 40) & (t < 60), 0.0, 20.0)),
    ],
)
def test_a_changing_rate_is_met_at_every_moment(arrivals: Arrivals, rate_at: object) -> None:
    """Arrivals by time-rescaling with the integral of the rate, computed by steps here, the arrivals must become a
    Poisson process of rate 1."""
    assert callable(rate_at)
    grid = np.linspace(0, 120, 1_200_001)
    integral = np.concatenate([[0], np.cumsum(rate_at((grid[:-1] + grid[1:]) / 2)) * (grid[1] - grid[0])])

    times = until(120.0, arrivals, duration_s=120.0)
    rescaled = np.interp(times, grid, integral)
    gaps = np.diff(rescaled, prepend=0.0)

    assert len(times) == pytest.approx(integral[-1], abs=4 * math.sqrt(integral[-1]))
    assert ks_distance_to_exponential(gaps) < 1.63 / math.sqrt(len(gaps))
    uniform = np.sort(rescaled / integral[-1])
    assert np.abs(uniform - np.arange(len(uniform)) / len(uniform)).max() < 1.63 / math.sqrt(len(uniform)), (
        "nowhere too many or too few"
    )


def test_a_rate_that_falls_to_zero_for_good_ends_the_arrivals() -> None:
    times = list(
        draw_arrival_times(Arrivals(process="step", rate=10, to_rate=0, at_s=20), None, np.random.default_rng(3))
    )

    assert 150 < len(times) < 250
    assert max(times) <= 20


def test_nothing_arrives_while_the_rate_is_zero() -> None:
    times = until(90.0, Arrivals(process="step", rate=0, to_rate=10), duration_s=90.0)

    assert times.min() >= 30
    assert len(times) > 500


@settings(deadline=None)
@given(CHANGING, st.floats(1, 1000), st.floats(0.01, 0.99))
def test_the_time_by_which_so_many_are_expected_has_so_many_before_it(
    arrivals: Arrivals, duration_s: float, share: float
) -> None:
    for segment in make_rate_profile(arrivals, duration_s):
        length_s = min(segment.length_s, 1e6)
        slope = (segment.end_rate - segment.rate) / segment.length_s
        wanted = share * min(segment.requests, 1e6)

        passed_s = segment.time_of(wanted) - segment.start_s

        assert 0 <= passed_s <= segment.length_s * (1 + 1e-9)
        if wanted > 1e-6 and passed_s < length_s:
            assert segment.rate * passed_s + slope * passed_s**2 / 2 == pytest.approx(wanted, rel=1e-6, abs=1e-6)
