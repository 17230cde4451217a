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
        self.terms: NDArray[np.float64] = np.zeros((NUM_TERMS, 3, num_rows))
        """Amounts that the coefficients multiply, [NUM_TERMS, steps, replicas]."""
        self.terms[0] = 1.0
        self._columns: NDArray[np.float64] = np.zeros((7, num_rows))
        self.prefill_tokens, self.ahead_context, self.budget = self._columns[:3]
        """Arrays [replicas] of the prompt tokens outstanding, of the context that these attend to, and of the prompt
        tokens that a step takes."""
        self.rows, self.half_step, self.own_tpot_s, self.max_batched_tokens = self._columns[3:]
        """Arrays [replicas] of the sequences there, of 0.5 where a step is under way and else 0, of seconds per output
        token by the replica's own costs, and of the tokens that a step takes."""
        self._flat_terms = memoryview(self.terms).cast("B").cast("d")
        self._flat_columns = memoryview(self._columns).cast("B").cast("d")

    def write(self, row: int, work: Work, max_batched_tokens: int, costs: StepCosts) -> None:
        """Replace a replica's numbers. costs: its own."""
        running, waiting, prefill, kv_tokens, sampled = work
        budget, rows, size = max(1, max_batched_tokens - running), running + waiting, self.num_rows
        terms, columns = self._flat_terms, self._flat_columns
        # by term and step: 3 to 5 rows, 6 to 8 KV tokens, 9 to 11 sampled rows, 14 prefill tokens of the step under way
        terms[3 * size + row], terms[4 * size + row], terms[5 * size + row] = running + 1, rows + 1, running
        terms[6 * size + row] = terms[8 * size + row] = kv_tokens
        terms[7 * size + row] = kv_tokens + prefill
        terms[9 * size + row] = terms[10 * size + row] = terms[11 * size + row] = sampled
        terms[14 * size + row] = min(prefill, budget)
        columns[row], columns[size + row] = prefill, prefill * (prefill / max(1, waiting)) / 2
        columns[2 * size + row], columns[3 * size + row] = budget, rows
        columns[4 * size + row] = 0.5 if running or prefill else 0.0
        columns[5 * size + row] = predict_tpot_s(costs, work)
        columns[6 * size + row] = max_batched_tokens

    def read(self, row: int) -> Work:
        """The work of a replica as it was last written."""
        running = int(self.terms[1, UNDER_WAY, row])
        return Work(
            num_running=running,
            num_waiting=int(self.rows[row]) - running,
            prefill_tokens=int(self.prefill_tokens[row]),
            kv_tokens=int(self.terms[2, UNDER_WAY, row]),
            num_sampled=int(self.terms[3, UNDER_WAY, row]),
        )
