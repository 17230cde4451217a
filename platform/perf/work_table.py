"""What many replicas have to do, in arrays: a row for each replica, written when something changed there.

Not a prediction (`many`), and no replica's name. Invariant: a row holds the numbers of the `Work` it was last given.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.perf.model import Work, predict_tpot_s
from penstock.wire.frames import StepCosts

NUM_TERMS = 5
"""Terms of a step that don't hang on the request: base, rows, KV tokens, sampled rows, prefill tokens."""
PREFILL, DECODE, UNDER_WAY = range(3)
"""The steps whose terms are kept: one that computes a new prompt, one that decodes it, and the one under way."""


class WorkTable:
    """Works of `num_rows` replicas; all are idle at first."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.numbers: NDArray[np.float64] = np.zeros((3 * NUM_TERMS + 7, num_rows))
        """All that is kept, [numbers, replicas]; a part of the replicas is read with `read_work`."""
        terms, columns = self.numbers[: 3 * NUM_TERMS], self.numbers[3 * NUM_TERMS :]
        self.terms: NDArray[np.float64] = terms.reshape(NUM_TERMS, 3, num_rows)
        """Amounts that the coefficients multiply, [terms, steps, replicas]."""
        self.terms[0] = 1.0
        self.prefill_tokens, self.ahead_context, self.budget = columns[:3]
        """Arrays [replicas] of the prompt tokens outstanding, of the context that these attend to, and of the prompt
        tokens that a step takes."""
        self.budget[:] = 1.0
        self.rows, self.half_step, self.own_tpot_s, self.max_batched_tokens = columns[3:]
        """Arrays [replicas] of the sequences there, of 0.5 where a step is under way and else 0, of seconds per output
        token by the replica's own costs, and of the tokens that a step takes."""
        self._flat = self.numbers.data.cast("B").cast("d")

    def write(self, row: int, work: Work, max_batched_tokens: int, costs: StepCosts) -> None:
        """Replace a replica's numbers. costs: its own."""
        running, waiting, prefill, kv_tokens, sampled = work
        budget, rows, size, flat = max(1, max_batched_tokens - running), running + waiting, self.num_rows, self._flat
        # by term and step: 3 to 5 rows, 6 to 8 KV tokens, 9 to 11 sampled rows, 14 prefill tokens of the step under way
        flat[3 * size + row], flat[4 * size + row], flat[5 * size + row] = running + 1, rows + 1, running
        flat[6 * size + row] = flat[8 * size + row] = kv_tokens
        flat[7 * size + row] = kv_tokens + prefill
        flat[9 * size + row] = flat[10 * size + row] = flat[11 * size + row] = sampled
        flat[14 * size + row] = min(prefill, budget)
        # the columns
        flat[15 * size + row], flat[16 * size + row] = prefill, prefill * (prefill / max(1, waiting)) / 2
        flat[17 * size + row], flat[18 * size + row] = budget, rows
        flat[19 * size + row] = 0.5 if running or prefill else 0.0
        flat[20 * size + row] = predict_tpot_s(costs, work)
        flat[21 * size + row] = max_batched_tokens


def read_work(numbers: NDArray[np.float64], row: int) -> tuple[Work, int]:
    """The work of a replica, and the tokens that a step of it takes. numbers: `WorkTable.numbers`, or those of some of
    its replicas."""
    running, kv_tokens, sampled, prefill, rows, max_batched_tokens = map(int, numbers[[5, 8, 11, 15, 18, 21], row])
    return Work(running, rows - running, prefill, kv_tokens, sampled), max_batched_tokens
