"""What truncation leaves, against whole numbers, high precision and enumeration."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.compute.kernels import choice
from penstock.workers.compute.noise import _log, logarithm
from penstock.workers.compute.truncation import (
    FRACTION_BITS,
    MOST_TOKENS,
    Cut,
    find_cut,
    kept_ids,
    least_of_min_p,
    target_weight,
    weigh,
)

GOLDEN = {
    0.0: 17592186044416,
    -0.34657: 12439598709468,
    -0.34658: 12439474314097,
    -1.0: 6471803571004,
    -2.5: 1444054567247,
    -10.0: 798684011,
    -20.0: 36260,
    -31.0: 1,
}
ROWS = st.lists(
    st.sampled_from((0.0, -0.0, -1.0, -1.5, -2.0, -31.0, -32.0, -40.0, -math.inf))
    | st.floats(-35, 0, width=32, allow_subnormal=False),
    min_size=1,
    max_size=40,
).map(lambda scores: np.array([0.0, *scores], dtype=np.float32))


def exact_weight(score: float) -> Decimal:
    with localcontext() as context:
        context.prec = 60
        return Decimal(score).exp() * (1 << FRACTION_BITS)


def enumerate_kept(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The definition, token by token."""
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if 0 < top_k < len(scaled):
        order = [token for token in order if scaled[token] >= scaled[order[top_k - 1]]]
    if top_p < 1:
        weights = [int(weigh(np.array([scaled[token]], dtype=np.float64))[0]) for token in order]
        wanted, size = target_weight(sum(weights), top_p), 1
        while sum(weights[:size]) < wanted:
            size += 1
        order = order[:size]
    return sorted(token for token in order if min_p == 0 or float(scaled[token]) >= logarithm(min_p))


def test_weights_are_what_they_were_when_they_were_defined() -> None:
    assert weigh(np.array(list(GOLDEN), dtype=np.float64)).tolist() == list(GOLDEN.values())


@given(st.floats(-80, 0))
def test_a_weight_is_the_exponential_to_a_unit_or_3e_13(score: float) -> None:
    error = abs(Decimal(int(weigh(np.array([score]))[0])) - exact_weight(score))

    assert error <= Decimal("0.5001") + exact_weight(score) * Decimal("3e-13")


def test_scores_that_cannot_be_weighed_weigh_nothing() -> None:
    assert weigh(np.array([-math.inf, -1e30, -700.0, -31.5])).tolist() == [0, 0, 0, 0]


def test_of_neighbouring_scores_the_lower_one_never_weighs_more() -> None:
    seams = -(np.arange(46, dtype=np.float64) + 0.5) * math.log(2)  # where the power of two changes
    ladder = seams.astype(np.float32)
    for _ in range(50):
        ladder = np.nextafter(ladder, np.float32(0))
    for _ in range(100):
        lower = np.nextafter(ladder, np.float32(-np.inf))

        assert (weigh(lower.astype(np.float64)) <= weigh(ladder.astype(np.float64))).all()
        ladder = lower


@given(st.integers(1, 2**62), st.floats(0, 1, exclude_max=True))
def test_the_target_is_the_share_rounded_up_and_never_none_or_more_than_all(total: int, top_p: float) -> None:
    target = target_weight(total, top_p)

    assert 1 <= target <= total
    assert abs(target - Fraction(top_p) * total) <= 1 + Fraction(total, 2**51)


@settings(max_examples=300)
@given(
    ROWS,
    st.sampled_from((0, 1, 2, 5, 41, 10**6)),
    st.sampled_from((0.0, 1e-300, 1e-9, 0.2, 0.5, 0.9, 0.999999, 1.0)) | st.floats(0, 1),
    st.sampled_from((0.0, 1e-310, 0.01, 0.36787944117144233, 1.0)),
)
def test_what_is_left_is_what_enumeration_leaves(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    cut = find_cut(scaled, top_k, top_p, least_of_min_p(min_p))

    assert kept_ids(scaled, cut).tolist() == enumerate_kept(
        scaled, top_k, top_p, max(min_p, 2.0**-1022) if min_p else 0
    )


def test_a_nucleus_that_cuts_through_equals_keeps_the_lowest_ids() -> None:
    assert find_cut(np.zeros(8, dtype=np.float32), 0, 0.3, -math.inf) == Cut(0.0, 2)


def test_the_order_of_the_tokens_changes_nothing_but_their_names() -> None:
    scaled = -np.abs(np.random.default_rng(1).normal(0, 4, 5000)).astype(np.float32)
    scaled[0] = 0
    order = np.random.default_rng(2).permutation(5000)

    cuts = [find_cut(row, 0, 0.93, -math.inf) for row in (scaled, scaled[order])]

    assert cuts[0].least == cuts[1].least
    assert order[cuts[1].last_id] == cuts[0].last_id


def test_a_row_of_the_largest_vocabulary_that_is_all_the_same_does_not_overflow() -> None:
    size = (1 << (63 - FRACTION_BITS)) - 1

    assert find_cut(np.zeros(size, dtype=np.float32), 0, 0.5, -math.inf).last_id == size // 2


@pytest.mark.parametrize("min_p", [0.05, 0.1, 1 / 3, 1.0, 5.0, 1e-320])
def test_the_bound_of_min_p_is_the_least_float32_that_is_not_below_its_logarithm(min_p: float) -> None:
    bound, exact = least_of_min_p(min_p), logarithm(min(max(min_p, 2.0**-1022), 1.0))

    assert float(np.nextafter(np.float32(bound), np.float32(-np.inf))) < exact <= bound <= 0
    assert least_of_min_p(0.0) == -math.inf


@given(st.floats(2.0**-1022, 1e300))
def test_the_logarithm_of_one_number_has_the_bits_of_many(x: float) -> None:
    assert logarithm(x) == _log(np.array([x]))[0]


def test_the_kernels_know_the_bound_of_a_vocabulary() -> None:
    assert choice.MOST_TOKENS == MOST_TOKENS
