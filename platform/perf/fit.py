"""Coefficients of the performance model from measured steps: a fit over a probe's grid, and its slow correction online.

Not a probe: the engine makes the samples. In steady decoding alone the cost of a row can't be separated from that of
its context, so a fit needs samples that vary rows, prefill and context independently; `adapt` therefore only scales,
and never re-divides between coefficients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.perf.model import count_tokens, is_recorded, scale_costs, step_time_s
from penstock.wire.frames import Stairs, StepCosts

Matrix = NDArray[np.float64]

ADAPT_BOUND = 2.0
"""A step counts as at most this many times longer or shorter than predicted: an outlier (a page fault, a kernel being
built) moves little."""

MAX_CLIFFS = 8
"""Cliffs that are kept, the highest: a report of a replica's load has them all."""
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

    @property
    def num_tokens(self) -> int:
        return count_tokens(self.rows, self.prefill_tokens, self.draft_tokens)


NUM_COEFFICIENTS = 8
"""Coefficients of the line, those of cliffs not counted."""


class _Measured(NamedTuple):
    """Steps as a fit takes them, one a row."""

    features: Matrix
    """What each coefficient is multiplied with: 1, the numbers of `StepSample`, whether it is beyond each cliff."""
    seconds: NDArray[np.float64]
    is_eager: NDArray[np.bool_]
    """Whether it is not recorded, on a device that records others."""


class _Line(NamedTuple):
    """A fit."""

    line: NDArray[np.float64]
    knee_s: float
    eager_knee_s: float
    error: float
    """Sum of the squared relative errors."""


def fit(samples: Sequence[StepSample], stairs: Stairs | None = None) -> StepCosts:
    """Non-negative least squares of relative error, so that short steps count as much as long ones.

    A knee is searched among the quicker half of the steps: for each, the line is fitted to the steps above it, and
    the one whose model fits all steps best wins; none (0) wins a tie. stairs: of a device that replays recorded steps,
    with the places of its cliffs; their seconds are found as further coefficients, MAX_CLIFFS at most, and its own knee
    among the steps that are not recorded. Raises ValueError without samples or with a step that took no time.
    """
    if not samples:
        raise ValueError("a fit needs at least one sample")
    if not min(sample.seconds for sample in samples) > 0:
        raise ValueError(f"a step can't take {min(sample.seconds for sample in samples)} s")
    if stairs is None:
        return _make_costs(_search_knees(_tabulate(samples, None)), None)
    samples = [*samples, *_fill_plateaus(samples, stairs)]
    stairs = replace(stairs, cliffs=_find_shown(samples, stairs))
    found = _search_knees(_tabulate(samples, stairs))
    if len(stairs.cliffs) > MAX_CLIFFS:
        heights = found.line[NUM_COEFFICIENTS:].tolist()
        highest = sorted(zip(heights, stairs.cliffs, strict=True))[-MAX_CLIFFS:]
        stairs = replace(stairs, cliffs=tuple(sorted(cliff for _, cliff in highest)))
        found = _search_knees(_tabulate(samples, stairs))
    return _make_costs(found, stairs)


def _find_shown(samples: Sequence[StepSample], stairs: Stairs) -> tuple[tuple[int, float], ...]:
    """The cliffs that recorded steps are beyond. Others would be taken for the knee of steps that are not recorded."""
    recorded = [sample for sample in samples if is_recorded(stairs, sample.rows, sample.num_tokens)]
    most = max((sample.num_tokens for sample in recorded), default=0)
    return tuple(cliff for cliff in stairs.cliffs if cliff[0] < most)


def _fill_plateaus(samples: Sequence[StepSample], stairs: Stairs) -> list[StepSample]:
    """Twins of the recorded decode steps: each with the fewest rows that the same recording
    takes, which then take as long."""
    places = [0, *(place for place, _ in stairs.cliffs)]
    twins = []
    for sample in samples:
        is_plain = not (sample.prefill_tokens or sample.draft_tokens or sample.sampled_rows)
        least = max(place for place in places if place < max(1, sample.rows)) + 1
        if is_plain and least < sample.rows <= stairs.recorded_rows:
            twins.append(sample._replace(rows=least))
    return twins


def _tabulate(samples: Sequence[StepSample], stairs: Stairs | None) -> _Measured:
    columns, is_eager = [], []
    for sample in samples:
        cliffs = () if stairs is None else [sample.num_tokens > place for place, _ in stairs.cliffs]
        columns.append((1, *sample[:5], sample.draft_rounds, sample.sampled_rows, *cliffs))
        is_eager.append(stairs is not None and not is_recorded(stairs, sample.rows, sample.num_tokens))
    seconds = np.array([sample.seconds for sample in samples], dtype=np.float64)
    return _Measured(np.array(columns, dtype=np.float64), seconds, np.array(is_eager))


def _search_knees(measured: _Measured) -> _Line:
    """The line with the knees that fit best: first that of steps that are not recorded, then that of all."""
    best = _fit_above(measured, 0.0, 0.0)
    if measured.is_eager.any():
        tried = [_fit_above(measured, 0.0, knee_s) for knee_s in _find_candidates(measured.seconds[measured.is_eager])]
        best = min(best, *tried, key=lambda line: line.error)
    for knee_s in _find_candidates(measured.seconds):
        line = _fit_above(measured, knee_s, best.eager_knee_s)
        if line.error < best.error * KNEE_GAIN:
            best = line
    return best


def _find_candidates(seconds: NDArray[np.float64]) -> list[float]:
    found: list[float] = np.unique(np.quantile(seconds, np.linspace(0, 0.5, MAX_KNEES), method="nearest")).tolist()
    return found


def _fit_above(measured: _Measured, knee_s: float, eager_knee_s: float) -> _Line:
    """The line through the steps longer than their knee, and the squared relative error of line and knees over all
    steps."""
    features, seconds = measured.features, measured.seconds
    knees = np.where(measured.is_eager, max(knee_s, eager_knee_s), knee_s)
    above = seconds > knees
    if (knee_s or eager_knee_s) and above.sum() < features.shape[1]:
        return _Line(np.zeros(features.shape[1]), knee_s, eager_knee_s, float("inf"))
    line = _nonnegative_least_squares(features[above] / seconds[above, None], np.ones(int(above.sum())))
    error = np.maximum(knees, features @ line) / seconds - 1
    return _Line(line, knee_s, eager_knee_s, float(error @ error))


def _make_costs(found: _Line, stairs: Stairs | None) -> StepCosts:
    *others, sampled_row_s = found.line[:NUM_COEFFICIENTS].tolist()
    costs = StepCosts(*[*others, found.knee_s, sampled_row_s])
    if stairs is None:
        return costs
    heights = found.line[NUM_COEFFICIENTS:].tolist()
    cliffs = [(place, height) for (place, _), height in zip(stairs.cliffs, heights, strict=True) if height]
    stairs = replace(stairs, eager_knee_s=found.eager_knee_s, cliffs=tuple(cliffs))
    return replace(costs, stairs=stairs)


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
