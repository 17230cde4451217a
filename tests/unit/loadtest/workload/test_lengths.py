import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_loadtest.scenario import Lengths
from penstock_loadtest.workload.lengths import draw, draw_tokens

VALUES = st.floats(0, 1e6)
WAYS = st.one_of(
    st.builds(lambda value: {"constant": value}, VALUES),
    st.builds(lambda a, b: {"uniform": (min(a, b), max(a, b))}, VALUES, VALUES),
    st.builds(lambda a, b: {"lognormal": (min(a, b), max(a, b))}, st.floats(1e-3, 1e6), st.floats(1e-3, 1e6)),
    st.builds(lambda values: {"choices": values}, st.lists(VALUES, min_size=1, max_size=5)),
)


def drawn(lengths: Lengths, count: int = 20_000) -> np.ndarray:
    rng = np.random.default_rng(5)
    return np.array([draw(lengths, rng) for _ in range(count)])


def test_a_constant_is_always_itself() -> None:
    assert set(drawn(Lengths(constant=7), 10)) == {7.0}


def test_uniform_fills_the_range_evenly() -> None:
    values = drawn(Lengths(uniform=(10, 50)))

    assert values.min() >= 10
    assert values.max() <= 50
    assert np.quantile(values, [0.1, 0.5, 0.9]) == pytest.approx([14, 30, 46], abs=0.6)


def test_lognormal_has_the_median_and_99th_percentile_it_was_given() -> None:
    values = drawn(Lengths(lognormal=(200, 900)))

    assert np.quantile(values, [0.5, 0.99]) == pytest.approx([200, 900], rel=0.05)
    assert np.quantile(values, 0.01) == pytest.approx(200 * 200 / 900, rel=0.05), "symmetric on the logarithmic scale"


def test_choices_are_equally_likely() -> None:
    values, counts = np.unique(drawn(Lengths(choices=[1, 5, 9])), return_counts=True)

    assert values.tolist() == [1, 5, 9]
    assert counts / counts.sum() == pytest.approx([1 / 3] * 3, abs=0.015)


def test_draws_are_clipped() -> None:
    values = drawn(Lengths(lognormal=(100, 500), min=50, max=120), 2000)

    assert (values.min(), values.max()) == (50, 120)
    assert len(set(values)) > 500


def test_tokens_are_whole_and_at_least_one() -> None:
    rng = np.random.default_rng(5)
    counts = [draw_tokens(Lengths(uniform=(0, 3)), rng) for _ in range(200)]

    assert set(counts) == {1, 2, 3}
    assert all(type(count) is int for count in counts)


@given(WAYS, VALUES, VALUES, st.integers(0, 2**32))
def test_a_draw_lies_within_its_bounds_and_is_reproducible(
    way: dict[str, object], low: float, high: float, seed: int
) -> None:
    lengths = Lengths(**way, min=min(low, high), max=max(low, high))  # type: ignore[arg-type]

    value = draw(lengths, np.random.default_rng(seed))

    assert lengths.min <= value <= lengths.max
    assert value == draw(lengths, np.random.default_rng(seed))
