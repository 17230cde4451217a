"""Step costs to predict the replicas of one pool with: the pool's mean, and what a replica differs beyond noise. Pure.

Replicas of a pool run the same model on the same kind of machine, and yet each one's coefficients differ by some per
cent: a probe takes seconds, and only a replica that is used corrects itself. Over the hundreds of steps of an answer
such a difference would outweigh any cached prefix. So the mean over the pool is used, and of a replica's own pace only
what exceeds NOISE: a slow machine still shows.
"""

from collections.abc import Sequence

from penstock.perf.model import Work, mean_costs, predict_tpot_s, scale_costs
from penstock.wire.frames import StepCosts

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
