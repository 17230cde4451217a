"""Draws from a scenario's `Lengths`: token counts and seconds."""

import math
from typing import Final

import numpy as np

from penstock_loadtest.scenario import Lengths

_Z99: Final = 2.3263478740408408
"""99th percentile of the standard normal distribution."""


def draw(lengths: Lengths, rng: np.random.Generator) -> float:
    """One value, clipped to min..max. Takes one draw of `rng`, or none of a constant."""
    return min(max(_draw(lengths, rng), lengths.min), lengths.max)


def draw_tokens(lengths: Lengths, rng: np.random.Generator) -> int:
    """One count, rounded, at least 1."""
    return max(1, round(draw(lengths, rng)))


def _draw(lengths: Lengths, rng: np.random.Generator) -> float:
    if lengths.uniform is not None:
        return rng.uniform(*lengths.uniform)
    if lengths.lognormal is not None:
        median, p99 = lengths.lognormal
        return median * math.exp(rng.standard_normal() * math.log(p99 / median) / _Z99)
    if lengths.choices is not None:
        return lengths.choices[int(rng.random() * len(lengths.choices))]
    assert lengths.constant is not None, "Lengths refuses to be made without a distribution"
    return lengths.constant
