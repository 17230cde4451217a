"""What steps with drafts are predicted to take: by the times of rows where they were measured, else by the costs of the
performance model. Pure.

Not what steps have shown since (`draft_costs`).
"""

from dataclasses import dataclass, field

import msgspec

from penstock.perf.model import cliffs_s, count_tokens, floor_s, step_time_s
from penstock.wire.frames import StepCosts
from penstock.workers.engine.row_times import RowTimes
from penstock.workers.engine.sequence import StepShape

READ_AGAIN = 0.5
"""What attention to the context takes for a token more of the same sequence, of what it took for the first one, which
has brought keys and values from memory."""


@dataclass(slots=True)
class Prices:
    times: RowTimes | None = None
    """What steps and drafts take, as measured; None: the costs say it."""
    costs: StepCosts = field(default_factory=StepCosts)
    """Costs of the performance model as they are known by now; all 0: unknown."""

    def plain_s(self, shape: StepShape) -> float:
        """Seconds of a step with what was looked up and nothing else; 0: that is not known."""
        plain_s = drafted_s(self.costs, shape, 0)
        return plain_s + self.correction_s(shape) if plain_s > 0 else plain_s

    def correction_s(self, shape: StepShape) -> float:
        """Seconds that a step takes beyond the line of the costs."""
        return 0.0 if self.times is None or shape.prefill_tokens else self.times.correction_s(self.costs, shape.rows)

    def verified_s(self, shape: StepShape, count: int) -> float:
        """Seconds that verifying `count` tokens takes in a step."""
        costs = self.costs
        if self.times is None:
            return min(costs.row_s, costs.draft_token_s) * count
        context = shape.kv_tokens / max(1, shape.decode_rows)
        read_s = count * READ_AGAIN * costs.kv_token_s * context
        num_computed = count_tokens(shape.rows, shape.prefill_tokens, 0)
        if shape.prefill_tokens and num_computed + count > self.times.steps[-1][0]:  # its products are wide already
            return max(costs.row_s, costs.prefill_token_s) * count + read_s
        return self.times.more_s(costs, num_computed, count) + read_s

    def made_s(self, shape: StepShape, num_rounds: int) -> float:
        """Seconds that a drafter takes for so many rounds beside a step."""
        if self.times is None:
            return num_rounds * self.costs.draft_round_s
        num_rows = shape.decode_rows - shape.looked_up_rows
        each_s = self.times.round_s + self.times.made_token_s * num_rows
        return self.times.scale(self.costs) * (self.times.call_s + num_rounds * each_s)

    def token_s(self, shape: StepShape, plain_s: float, num_likely: int, most: int) -> float:
        """Seconds of each token that is verified, where it will be `num_likely` together, `most` at the most. plain_s:
        of the step without."""
        if self.times is None:
            return (drafted_s(self.costs, shape, most) - plain_s) / max(1, most)
        count = min(max(1, num_likely), max(1, most))
        return self.verified_s(shape, count) / count

    def making_s(self, num_seqs: int) -> tuple[float, float]:
        """Seconds that drafts for so many sequences take to be made: of the call, and of each round."""
        if self.times is None:
            return 0.0, self.costs.draft_round_s
        scale = self.times.scale(self.costs)
        return scale * self.times.call_s, scale * (self.times.round_s + self.times.made_token_s * num_seqs)


def line_s(costs: StepCosts, shape: StepShape) -> float:
    """Seconds of a step without drafts by the model's line alone."""
    return step_time_s(
        msgspec.structs.replace(costs, knee_s=0.0, stairs=None),
        rows=shape.rows,
        prefill_tokens=shape.prefill_tokens,
        query_context=shape.query_context,
        kv_tokens=shape.kv_tokens,
        sampled_rows=shape.sampled_rows,
    )


def drafted_s(costs: StepCosts, shape: StepShape, count: int) -> float:
    """Seconds of a step that verifies so many draft tokens, without what it takes to make them."""
    num_computed = count_tokens(shape.rows, shape.prefill_tokens, 0)
    return step_s(costs, shape.rows, num_computed + count, line_s(costs, shape) + count * costs.draft_token_s)


def step_s(costs: StepCosts, rows: int, num_tokens: int, by_line_s: float) -> float:
    """Seconds of a step for which the model's line gives `by_line_s`: drafts can make one that is recorded one that is
    not."""
    return max(floor_s(costs, rows, num_tokens), by_line_s + cliffs_s(costs, num_tokens))
