"""Confidence intervals: for paired ratios and differences, and by bootstrap for statistics without a formula.

Pure. The paired ones assume nothing of the values but that the pairs are independent of each other: what drifts over
time hits both sides of a pair and cancels, which is why the measurements are interleaved.

Source: the interval for a median from two order statistics, whose coverage is a binomial sum (Thompson 1936; Conover,
Practical Nonparametric Statistics, 3.2; David and Nagaraja, Order Statistics, 7.1). The bootstrap is the percentile one
(Efron 1979).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
MIN_PAIRS = 6
"""Fewest pairs for an interval: with fewer, even the interval from the least to the largest value covers the median
less often than 95 %: 1 - 2 / 2**5 is 93.75 %."""

Floats = npt.NDArray[np.float64]


class OrderInterval(NamedTuple):
    """An interval from the `rank`-th smallest of n values to the `rank`-th largest, counted from 1."""

    rank: int
    coverage: float
    """Chance that it holds the median, at least CONFIDENCE."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A median over pairs, with its interval."""

    pairs: int  # that have a value
    value: float | None  # None: no pair has
    low: float | None = None  # None: too few pairs
    high: float | None = None
    coverage: float | None = None  # of the interval; at least 95 %
    neutral: float  # what it is when both sides are alike: 1 for ratios, 0 for differences
    note: str | None = None  # why there is no interval, or what was left out

    @property
    def is_distinguishable(self) -> bool:
        """Whether the interval excludes `neutral`, the value of no difference; False without an interval."""
        return self.low is not None and self.high is not None and not self.low <= self.neutral <= self.high


def find_median_interval(n: int, confidence: float = CONFIDENCE) -> OrderInterval | None:
    """The narrowest symmetric pair of order statistics that holds the median of n independent values with at least
    `confidence`; None: none does.

    The median lies outside when fewer than `rank` of the values fall on one side of it, and that number is binomial(n,
    1/2). Exact for continuous distributions; ties only raise the coverage.
    """
    rank, outside = 0, 0.0
    while True:
        further = outside + 2 * math.comb(n, rank) / 2**n  # both sides
        if further > 1 - confidence:
            return OrderInterval(rank, 1 - outside) if rank else None
        rank, outside = rank + 1, further


def estimate_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """The median of b / a over pairs (a, b), the geometric mean of the middle two when their number is even, with its
    exact 95 % interval.

    It needs at least MIN_PAIRS pairs; with fewer there is no interval, and the note says so. Pairs with a value that is
    not above 0 have no ratio.
    """
    logs = [math.log(b / a) for a, b in pairs if a > 0 and b > 0]
    estimate = _estimate(logs, dropped=len(pairs) - len(logs), neutral=0.0)
    exponentials = {
        name: None if value is None else math.exp(value)
        for name, value in (("value", estimate.value), ("low", estimate.low), ("high", estimate.high))
    }
    return msgspec.structs.replace(estimate, neutral=1.0, **exponentials)


def estimate_difference(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """The median of b - a over pairs (a, b), with its exact 95 % interval; see `estimate_ratio`."""
    return _estimate([b - a for a, b in pairs], dropped=0, neutral=0.0)


def _estimate(values: list[float], *, dropped: int, neutral: float) -> Estimate:
    ordered = sorted(values)
    notes = [f"{dropped} pairs have no ratio: a value is not above 0"] if dropped else []
    interval = find_median_interval(len(ordered))
    if interval is None:
        notes.append(f"a 95 % interval needs at least {MIN_PAIRS} pairs, there are {len(ordered)}")
    return Estimate(
        pairs=len(ordered),
        value=float(np.median(ordered)) if ordered else None,
        low=ordered[interval.rank - 1] if interval else None,
        high=ordered[-interval.rank] if interval else None,
        coverage=interval.coverage if interval else None,
        neutral=neutral,
        note="; ".join(notes) or None,
    )


def bootstrap(
    rows: Floats,
    statistic: Callable[[Floats], Floats],
    rng: np.random.Generator,
    *,
    draws: int = 2000,
    confidence: float = CONFIDENCE,
) -> tuple[float, float]:
    """Percentile bootstrap of a statistic of independent rows, each drawn again with replacement.

    `rows` has shape (n, columns); `statistic` takes (draws, n, columns) and gives (draws,), NaN where a draw has none.
    Only approximate, and too narrow with few rows; for what has no exact interval, like the slope of a fit. Raises
    ValueError without rows.
    """
    if not len(rows):
        raise ValueError("there is nothing to draw from")
    values = statistic(rows[rng.integers(0, len(rows), (draws, len(rows)))])
    low, high = np.nanquantile(values, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
    return low, high
