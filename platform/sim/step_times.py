"""True step times of a modelled replica: a measured table or constants, with noise. Never the performance model, by
which the policies predict.

A pool's `engine.timed` holds them (`penstock.workers.engine.timed` describes the table). Invariant: the same seed gives
the same noise, step by step, whatever the steps hold.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from penstock.wire.frames import StepCosts
from penstock.workers.config import TimedConfig
from penstock.workers.engine.sequence import StepShape
from penstock.workers.engine.timed import StepTable, load_table

_DRAWN = 1024
"""Factors of noise drawn at once."""


class DecodeLine(NamedTuple):
    """Seconds of a step that only decodes so many rows: `base_s + kv_token_s * kv_tokens`, below `until_kv_tokens`."""

    base_s: float
    kv_token_s: float
    until_kv_tokens: float


class StepTimes:
    """Step times without noise. Raises ConfigError for a table that can't be read."""

    def __init__(self, timed: TimedConfig) -> None:
        self._timed = timed
        self._table: StepTable | None = None if timed.table is None else load_table(timed.table)
        self._curves: dict[int, list[float]] = {}
        self.noise = 0.0 if self._table is None else self._table.noise
        """Standard deviation of a step's time, as a part of it."""
        self.source = "engine.timed" if self._table is None else self._table.source
        """Where the times are from."""

    @property
    def costs(self) -> StepCosts:
        """The coefficients that a replica's probe finds: those that fit these times best."""
        return self._timed.costs if self._table is None else self._table.costs

    def at(self, shape: StepShape) -> float:
        """Seconds of a step."""
        if self._table is not None:
            return self._table.at(shape)
        timed = self._timed
        return (
            timed.base_s
            + timed.row_s * shape.decode_rows
            + timed.prefill_token_s * shape.prefill_tokens
            + timed.kv_token_s * shape.kv_tokens
        )

    def decode_line(self, decode_rows: int, kv_tokens: int) -> DecodeLine:
        """The straight line on which steps without prompts lie from `kv_tokens` on."""
        timed, table = self._timed, self._table
        if table is None:
            return DecodeLine(timed.base_s + timed.row_s * decode_rows, timed.kv_token_s, float("inf"))
        curve = self._curves.get(decode_rows)
        if curve is None:
            curve = self._curves[decode_rows] = table.decode_times(decode_rows)
        axis = table.kv_tokens
        if kv_tokens < axis[0]:
            return DecodeLine(curve[0], 0.0, axis[0])
        index = min(bisect_right(axis, kv_tokens) - 1, len(axis) - 2)
        slope = (curve[index + 1] - curve[index]) / (axis[index + 1] - axis[index])
        until = axis[index + 1] if index < len(axis) - 2 else float("inf")
        return DecodeLine(curve[index] - slope * axis[index], slope, until)


class Noise:
    """Factors by which the steps of one replica are longer or shorter: lognormal, with mean 1, one for each step."""

    def __init__(self, noise: float, seed: tuple[int, ...]) -> None:
        """noise: standard deviation of a factor."""
        self._sigma = float(np.sqrt(np.log1p(noise**2)))
        self._rng = np.random.default_rng(seed)
        self.factors: list[float] = []

    def extend(self) -> None:
        """Draw the factors of further steps."""
        if not self._sigma:
            self.factors.extend([1.0] * _DRAWN)
            return
        normal = self._rng.standard_normal(_DRAWN)
        self.factors.extend(np.exp(self._sigma * normal - self._sigma**2 / 2).tolist())
