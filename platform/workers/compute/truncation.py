"""The set of tokens that top_k, top_p and min_p leave: a definition that gives the same set on every machine, in any
order of summation.

Scaled scores are float32: logits relative to the row's largest, divided by the temperature. In this order:

* top_k leaves the k largest, and all that equal the k-th.
* top_p leaves, of these, the first tokens, by falling score and of equals by rising id, whose weights together reach
  max(1, min(total, ceil(top_p * total))): the total, a whole number, is rounded to float64 once, the product once
  (Holtzman et al. 2020, The Curious Case of Neural Text Degeneration).
* min_p leaves scores of at least log(min_p), rounded to float32 upwards.

A token's weight is 2**44 * exp(score), rounded to a whole number (`weigh`), so sums are exact and know no order. The
exponential is one fixed sequence of IEEE operations in float64 without fused ones, as the logarithms of `noise` are:
with n the integer next to score * log2(e), the Taylor series of exp up to the tenth power, of score - n * ln 2, times
2**n. It is within 3e-13 of the true one, relatively; scores in float32 are within 6e-8. Tokens below -31.2 weigh
nothing.

What is left is always the scores above a bound and, of those that equal it, the ids up to one: a `Cut`.

Invariant: the cut depends on scores and parameters alone. The C++ kernels (sampling_row.hpp) and the GPU's
(triton/sample.py) compute the same.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.workers.compute.noise import logarithm

Row = NDArray[np.float32]
Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

FRACTION_BITS = 44
MOST_TOKENS = 1 << (63 - FRACTION_BITS)
"""A vocabulary is smaller, for the sum of its weights to fit 63 bits."""
LEAST_SCORE = -64.0
"""Lower scores are raised to it: their weight is 0 all the same."""
WEIGHTLESS = -31.5
"""Scores up to it weigh nothing."""
_LOG2_E, _LN_2 = 1.0 / math.log(2.0), math.log(2.0)  # correctly rounded: 0x1.71547652b82fep+0, 0x1.62e42fefa39efp-1
_ROUNDER = 1.5 * 2.0**52  # adding it rounds to an integer, which is then in the last bits
_SMALLEST = 2.0**-1022  # normal numbers begin there
_SERIES = [1.0 / math.factorial(n) for n in range(10, -1, -1)]


class Cut(NamedTuple):
    """The tokens that are left: scores above `least`, and those that equal it up to id `last_id`."""

    least: float
    last_id: int


def weigh(scores: Floats) -> Ids:
    """2**FRACTION_BITS * exp(score), rounded to a whole number, of scores that are at most 0."""
    scores = np.maximum(scores, LEAST_SCORE)
    shifted = scores * _LOG2_E
    shifted += _ROUNDER
    scores -= (shifted - _ROUNDER) * _LN_2
    series = np.full_like(scores, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series *= scores
        series += coefficient
    bits = series.view(np.int64)
    bits += (shifted.view(np.int64) + FRACTION_BITS) << 52  # times 2**(n + FRACTION_BITS)
    return np.rint(series).astype(np.int64)


def target_weight(total: int, top_p: float) -> int:
    """The weight that top_p wants of a total, which is 1 or more."""
    return max(1, min(total, math.ceil(float(total) * top_p)))


def least_of_min_p(min_p: float) -> float:
    """The least scaled score, a float32, that min_p leaves; -inf for 0. The best token is always left."""
    if not min_p > 0:
        return -math.inf
    bound = logarithm(min(max(min_p, _SMALLEST), 1.0))
    rounded = np.float32(bound)
    return float(rounded if float(rounded) >= bound else np.nextafter(rounded, np.float32(np.inf)))


def find_cut(scaled: Row, top_k: int, top_p: float, least: float) -> Cut:
    """What is left of a row's scaled scores, the best of which is 0. top_k: 0 is all. top_p: 1 is all. least: of
    min_p."""
    cut = Cut(-math.inf, len(scaled))
    if 0 < top_k < len(scaled):
        cut = Cut(float(np.partition(scaled, len(scaled) - top_k)[len(scaled) - top_k]), len(scaled))
    if top_p < 1:
        cut = _find_nucleus(scaled, cut.least, top_p)
    return Cut(least, len(scaled)) if least > cut.least else cut


def kept_ids(scaled: Row, cut: Cut) -> Ids:
    """Ascending ids of the tokens that are left."""
    ids = np.flatnonzero(scaled >= np.float32(cut.least))
    return ids[(scaled[ids] > np.float32(cut.least)) | (ids <= cut.last_id)] if cut.last_id < len(scaled) else ids


def _find_nucleus(scaled: Row, least: float, top_p: float) -> Cut:
    ids = np.flatnonzero(scaled >= np.float32(max(least, WEIGHTLESS)))
    scores = scaled[ids]
    weights = weigh(scores.astype(np.float64))
    total = int(weights.sum())
    target = target_weight(total, top_p)
    # all tokens up to this weight have, together, no more than what may be missing: only the others need sorting
    likely = np.flatnonzero(weights > (total - target) // len(weights))
    order = likely[np.argsort(-scores[likely], kind="stable")]
    place = order[np.searchsorted(np.cumsum(weights[order]), target)]
    return Cut(float(scores[place]), int(ids[place]))
