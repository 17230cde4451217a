"""What many replicas have to do, in arrays: a row for each replica, written when something changed there.

Not a prediction (`many`), and no replica's name. Invariant: a row holds the numbers of the `Work` it was last given.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.perf.model import Work, predict_tpot_s
from penstock.wire.frames import StepCosts

NUM_TERMS = 5
"""Terms of a step that don't hang on the request: base, rows, KV tokens, sampled rows, prefill tokens."""
NUM_STEPS = 4
"""Steps whose terms are kept: one that computes a new prompt (twice, for predictions with and without what is before
it), one that decodes it, and the one under way."""


class WorkTable:
    """Works of `num_rows` replicas; all are idle at first."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.numbers: NDArray[np.float64] = np.zeros((len(Work._fields) + 1, num_rows))
        """The works as they were written, [numbers, replicas]; `read_work` reads one."""
        self.terms: NDArray[np.float64] = np.zeros((NUM_TERMS, NUM_STEPS * num_rows))
        """Amounts that the coefficients multiply, [terms, steps * replicas]."""
        self.terms[0] = 1.0
        columns: NDArray[np.float64] = np.zeros((9, num_rows))
        self._columns = columns
        self.prefill_tokens, self.ahead_context, self.budget = columns[:6].reshape(3, -1)
        """Arrays [2 * replicas] of the prompt tokens outstanding and of the context that these attend to, zeros in the
        second half, and of the prompt tokens that a step takes."""
        self.budget[:] = 1.0
        self.rows, self.half_step, self.own_tpot_s = columns[6:]
        """Arrays [replicas] of the sequences there, of 0.5 where a step is under way and else 0, and of seconds per
        output token by the replica's own costs."""
        self.running = self.numbers[0]
        """Array [replicas] of the sequences that decode."""
        self._flat_numbers, self._flat_terms, self._flat = (
            each.data.cast("B").cast("d") for each in (self.numbers, self.terms, columns)
        )

    def write(self, row: int, work: Work, max_batched_tokens: int, costs: StepCosts) -> None:
        """Replace a replica's numbers. costs: its own."""
        running, waiting, prefill, kv_tokens, sampled = work
        budget, rows, size = max(1, max_batched_tokens - running), running + waiting, self.num_rows
        numbers, terms, flat = self._flat_numbers, self._flat_terms, self._flat
        numbers[row], numbers[size + row], numbers[2 * size + row] = running, waiting, prefill
        numbers[3 * size + row], numbers[4 * size + row], numbers[5 * size + row] = (
            kv_tokens,
            sampled,
            max_batched_tokens,
        )
        # by term and step: 4 to 7 rows, 8 to 11 KV tokens, 12 to 15 sampled rows, 19 prefill tokens under way
        terms[4 * size + row] = terms[5 * size + row] = running + 1
        terms[6 * size + row], terms[7 * size + row] = rows + 1, running
        terms[8 * size + row] = terms[9 * size + row] = terms[11 * size + row] = kv_tokens
        terms[10 * size + row] = kv_tokens + prefill
        terms[12 * size + row] = terms[13 * size + row] = sampled
        terms[14 * size + row] = terms[15 * size + row] = sampled
        terms[19 * size + row] = min(prefill, budget)
        flat[row], flat[2 * size + row] = prefill, prefill * (prefill / max(1, waiting)) / 2
        flat[4 * size + row] = flat[5 * size + row] = budget
        flat[6 * size + row], flat[7 * size + row] = rows, 0.5 if running or prefill else 0.0
        flat[8 * size + row] = predict_tpot_s(costs, work)


def read_work(numbers: NDArray[np.float64], row: int) -> tuple[Work, int]:
    """The work of a replica, and the tokens that a step of it takes. numbers: `WorkTable.numbers`, or those of some of
    its replicas."""
    *work, max_batched_tokens = map(int, numbers[:, row])
    return Work(*work), max_batched_tokens
