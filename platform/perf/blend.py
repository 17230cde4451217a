"""Step costs to predict the replicas of one pool with: the pool's mean, and what a replica differs beyond noise. Pure.

Replicas of a pool run the same model on the same kind of machine, and yet each one's coefficients differ by some per
cent: a probe takes seconds, and only a replica that is used corrects itself. Over the hundreds of steps of an answer
such a difference would outweigh any cached prefix. So the mean over the pool is used, and of a replica's own pace only
what exceeds NOISE: a slow machine still shows.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec.structs import astuple, replace
from numpy.typing import NDArray

from penstock.perf.model import Work, mean_costs, predict_tpot_s, scale_costs
from penstock.wire.frames import Stairs, StepCosts

NOISE = 1.25
"""Ratio of paces up to which two replicas are taken as equally fast."""


def blend_costs(costs: Sequence[StepCosts], works: Sequence[Work]) -> list[StepCosts]:
    """Costs to predict each replica with; `works` are what they have to do, at which their paces are compared."""
    if len(costs) == 1:
        return [costs[0]]
    common = mean_costs(costs)
    return [
        scale_costs(common, _excess(predict_tpot_s(own, work), predict_tpot_s(common, work)))
        for own, work in zip(costs, works, strict=True)
    ]


def _excess(own_s: float, common_s: float) -> float:
    """The part of own / common beyond NOISE, either way."""
    if own_s > common_s * NOISE:
        return own_s / (common_s * NOISE)
    if own_s * NOISE < common_s:
        return own_s * NOISE / common_s
    return 1.0


class RunningMean:
    """The mean of the costs of a pool's replicas, kept up to date as single ones change; equals `mean_costs` but for
    rounding. num_rows: most replicas, each known by its row."""

    def __init__(self, num_rows: int) -> None:
        self._costs: list[StepCosts | None] = [None] * num_rows
        self._seconds: NDArray[np.float64] = np.zeros((num_rows, len(StepCosts.__struct_fields__) - 1))
        """Coefficients but for the stairs, a row for each replica; zeros where there is none."""
        self.num_present = 0
        """Replicas that have costs."""
        self._recorded: Counter[tuple[int, int]] = Counter()
        """Rows and tokens of recorded steps, with the number of replicas that record so many."""
        self._eager_knee_s = 0.0
        self._cliffs: dict[int, tuple[int, float]] = {}
        """Number of replicas with a cliff at a place, and their seconds, summed; by place."""
        self._mean: StepCosts | None = None

    def write(self, row: int, costs: StepCosts | None) -> None:
        """Replace a replica's costs; None: it has none, and does not count."""
        before = self._costs[row]
        if costs == before:
            return
        self._mean = None
        self._costs[row] = costs
        self.num_present += (costs is not None) - (before is not None)
        self._seconds[row] = 0.0 if costs is None else astuple(costs)[:-1]
        for each, sign in ((before, -1), (costs, 1)):
            if each is not None and each.stairs is not None:
                self._count_stairs(each.stairs, sign)

    def read(self) -> StepCosts:
        """The mean of the replicas that have costs, at least one."""
        if self._mean is None:
            seconds = (self._seconds.sum(0) / self.num_present).tolist()
            self._mean = StepCosts(*seconds)
            if self._recorded:
                self._mean = replace(self._mean, stairs=self._mean_stairs())
        return self._mean

    def _count_stairs(self, stairs: Stairs, sign: int) -> None:
        size = stairs.recorded_rows, stairs.recorded_tokens
        self._recorded[size] += sign
        if not self._recorded[size]:
            del self._recorded[size]
        self._eager_knee_s += sign * stairs.eager_knee_s
        for place, seconds in stairs.cliffs:
            count, total = self._cliffs.get(place, (0, 0.0))
            if count + sign:
                self._cliffs[place] = count + sign, total + sign * seconds
            else:
                del self._cliffs[place]

    def _mean_stairs(self) -> Stairs:
        count = self._recorded.total()
        return Stairs(
            max(rows for rows, _ in self._recorded),
            max(tokens for _, tokens in self._recorded),
            self._eager_knee_s / count,
            tuple((place, total / count) for place, (_, total) in sorted(self._cliffs.items())),
        )
