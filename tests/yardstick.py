"""A yardstick for CPU time: a piece of Python that is always the same, timed beside what is to be cheap. A bound stated
in it means the same on a slow core, or on one that others share, as on a fast one at rest."""

import time
from typing import NamedTuple

YARDSTICK_S = 0.0005
"""CPU seconds of the yardstick on the core for which bounds are stated."""


class _Row(NamedTuple):
    number: int
    weight: int = 0
    rest: int = 0
    more: int = 0
    last: int = 0


def rested(cost: float) -> float:
    """A CPU time that was just measured, in its own unit, as it would have been on the core for which bounds are
    stated."""
    return cost * YARDSTICK_S / measure_yardstick_s()


def measure_yardstick_s() -> float:
    """Lowest CPU seconds of several passes of the yardstick."""
    taken = []
    for _ in range(20):
        begun = time.thread_time()
        found = {number: _Row(number, 0, number % 7) for number in range(900)}
        assert sum(max(row.number, row.rest) for row in found.values()) == 404550
        taken.append(time.thread_time() - begun)
    return min(taken)
