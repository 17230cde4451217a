"""Coefficients of the performance model from measured steps: a fit over a probe's grid, and its slow correction online.

Not a probe: the engine makes the samples. In steady decoding alone the cost of a row can't be separated from that of
its context, so a fit needs samples that vary rows, prefill and context independently; `adapt` therefore only scales,
and never re-divides between coefficients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.perf.model import scale_costs, step_time_s
from penstock.wire.frames import StepCosts

Matrix = NDArray[np.float64]

ADAPT_BOUND = 2.0
"""A step counts as at most this many times longer or shorter than predicted: an outlier (a page fault, a kernel being
built) moves little."""

MAX_KNEES = 9
"""Candidates tried; a fit of a probe's grid takes milliseconds."""
KNEE_GAIN = 0.5
"""A knee must at least halve the squared error: a line without one is simpler."""


class StepSample(NamedTuple):
    """One measured step; fields as in `step_time_s`."""

    rows: int
    prefill_tokens: int
    query_context: float
    kv_tokens: int
    draft_tokens: int
    seconds: float
    draft_rounds: int = 0
    sampled_rows: int = 0


def fit(samples: Sequence[StepSample]) -> StepCosts:
    """Non-negative least squares of relative error, so that short steps count as much as long ones.

    The knee is searched among the quicker half of the steps: for each, the line is fitted to the steps above it, and
    the one whose model fits all steps best wins; none (0) wins a tie. Raises ValueError without samples or with a step
    that took no time.
    """
    if not samples:
        raise ValueError("a fit needs at least one sample")
    seconds = np.array([sample.seconds for sample in samples], dtype=np.float64)
    if not seconds.min() > 0:
        raise ValueError(f"a step can't take {seconds.min()} s")
    features = np.array(
        [(1, *sample[:5], sample.draft_rounds, sample.sampled_rows) for sample in samples], dtype=np.float64
    )
    best, best_error = _fit_above(features, seconds, 0.0)
    for knee_s in np.unique(np.quantile(seconds, np.linspace(0, 0.5, MAX_KNEES), method="nearest")):
        costs, error = _fit_above(features, seconds, float(knee_s))
        if error < best_error * KNEE_GAIN:
            best, best_error = costs, error
    return best


def _fit_above(features: Matrix, seconds: NDArray[np.float64], knee_s: float) -> tuple[StepCosts, float]:
    """The line through the steps longer than the knee, and the squared relative error of line and knee over all
    steps."""
    above = seconds > knee_s
    if knee_s and above.sum() < features.shape[1]:
        return StepCosts(knee_s=knee_s), float("inf")
    line = _nonnegative_least_squares(features[above] / seconds[above, None], np.ones(int(above.sum())))
    error = np.maximum(knee_s, features @ line) / seconds - 1
    *others, sampled_row_s = line.tolist()
    return StepCosts(*[*others, knee_s, sampled_row_s]), float(error @ error)


def adapt(costs: StepCosts, sample: StepSample, rate: float) -> StepCosts:
    """Costs scaled towards a measured step; `rate` in 0..1 is the share of its (bounded, relative) error that is taken
    over."""
    predicted_s = predict_sample_s(costs, sample)
    if predicted_s <= 0 or sample.seconds <= 0:
        return costs
    ratio = min(max(sample.seconds / predicted_s, 1 / ADAPT_BOUND), ADAPT_BOUND)
    return scale_costs(costs, ratio**rate)


def predict_sample_s(costs: StepCosts, sample: StepSample) -> float:
    """Seconds that the model predicts for a measured step."""
    return step_time_s(
        costs,
        rows=sample.rows,
        prefill_tokens=sample.prefill_tokens,
        query_context=sample.query_context,
        kv_tokens=sample.kv_tokens,
        draft_tokens=sample.draft_tokens,
        draft_rounds=sample.draft_rounds,
        sampled_rows=sample.sampled_rows,
    )


def _nonnegative_least_squares(matrix: Matrix, target: NDArray[np.float64]) -> NDArray[np.float64]:
    """argmin over x >= 0 of |matrix x - target|: the active-set method of Lawson and Hanson, Solving Least Squares
    Problems (1974), chapter 23."""
    norms = np.linalg.norm(matrix, axis=0)
    scaled_matrix = matrix / np.where(norms > 0, norms, 1.0)  # coefficients differ by orders of magnitude
    size = matrix.shape[1]
    solution = np.zeros(size)
    passive = np.zeros(size, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.linalg.norm(target)))
    for _ in range(3 * size):
        gradient = scaled_matrix.T @ (target - scaled_matrix @ solution)
        gradient[passive] = -np.inf
        entering = int(gradient.argmax())
        if gradient[entering] <= tolerance:
            break
        passive[entering] = True
        solution = _solve_passive(scaled_matrix, target, solution, passive)
    return np.where(norms > 0, solution / np.where(norms > 0, norms, 1.0), 0.0)


def _solve_passive(
    matrix: Matrix, target: NDArray[np.float64], solution: NDArray[np.float64], passive: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Least squares over the passive columns; while one turns negative, step back to where the first becomes zero and
    drop it. Changes `passive`."""
    while passive.any():
        trial = np.zeros_like(solution)
        trial[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
        blocking = passive & (trial <= 0)
        if not blocking.any():
            return trial
        steps = solution[blocking] / np.maximum(solution[blocking] - trial[blocking], 1e-300)
        solution = np.maximum(solution + steps.min() * (trial - solution), 0.0)
        passive &= solution > 1e-15
    return np.zeros_like(solution)
