"""What a step takes by how many tokens it decodes, and what a drafter takes beside it, as measured at start. Pure.

The performance model's line knows one price for a row. A CPU's products have several: rows that meet a panel of weights
together cost little until there are as many as meet it at once, and then as much as what they compute. What a draft is
worth hangs on that, so it is weighed by these times. The line, which is corrected while the engine serves, says how
much longer steps take by now.
"""

from bisect import bisect_right
from dataclasses import dataclass

from penstock.wire.frames import StepCosts


@dataclass(frozen=True, slots=True)
class RowTimes:
    costs: StepCosts
    """What the same steps showed to the performance model."""
    steps: tuple[tuple[int, float], ...]
    """Decoded tokens, ascending from 1, two or more, and the seconds of a step of so many, never falling."""
    call_s: float = 0.0
    """Seconds that a draft takes, however long, for however many sequences."""
    round_s: float = 0.0
    """Seconds of each token of the longest draft."""
    made_token_s: float = 0.0
    """Seconds of each token that is made, without verifying it."""

    def step_s(self, num_tokens: int) -> float:
        """Seconds of a step that decodes so many tokens behind short contexts; between what was measured, and beyond,
        lines."""
        at = min(max(1, bisect_right(self.steps, (num_tokens, 0.0))), len(self.steps) - 1)
        (first, first_s), (last, last_s) = self.steps[at - 1 : at + 1]
        slope_s = (last_s - first_s) / (last - first)
        if num_tokens > last:  # noise must not make rows free that were not measured
            slope_s = max(slope_s, self.costs.row_s)
            return last_s + slope_s * (num_tokens - last)
        return first_s + slope_s * (num_tokens - first)

    def scale(self, costs: StepCosts) -> float:
        """How much longer steps take by `costs`, the same corrected since."""
        before, now = (each.base_s + each.row_s for each in (self.costs, costs))
        return now / before if before > 0 and now > 0 else 1.0

    def more_s(self, costs: StepCosts, num_tokens: int, count: int) -> float:
        """Seconds that `count` more tokens take in a step that decodes `num_tokens`."""
        return max(0.0, self.step_s(num_tokens + count) - self.step_s(num_tokens)) * self.scale(costs)

    def correction_s(self, costs: StepCosts, num_tokens: int) -> float:
        """Seconds that a step of so many decoded tokens takes beyond the line."""
        if not num_tokens:
            return 0.0
        line_s = max(costs.knee_s, costs.base_s + costs.row_s * num_tokens)
        return self.step_s(num_tokens) * self.scale(costs) - line_s
