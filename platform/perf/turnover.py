"""How long a sequence stays among the running ones of a replica, from those that ended lately. Pure: times come in.

By Little's law: the running sequences, summed over time, for each one that ended. So nobody has to remember when which
one began, and one that began again counts with all its time.
"""

FADE = 63 / 64
"""What is left of a sum with each sequence that ends."""


class RowTurnover:
    """`row_hold_s` of a load report."""

    def __init__(self) -> None:
        self._row_s = 0.0
        self._num_ended = 0.0
        self._num_rows = 0
        self._noted_s: float | None = None

    def note(self, now: float, num_rows: int, num_ended: int) -> None:
        """Take what is the case from `now` on, and how many sequences have ended since the call before. now: seconds
        of a monotonic clock."""
        if self._noted_s is not None:
            self._row_s += self._num_rows * max(0.0, now - self._noted_s)
        self._noted_s, self._num_rows = now, num_rows
        if num_ended:
            left = FADE**num_ended
            self._row_s *= left
            self._num_ended = (self._num_ended + num_ended) * left

    @property
    def row_hold_s(self) -> float:
        """Mean seconds for which the sequences that ended lately were running; 0: none has ended."""
        return self._row_s / self._num_ended if self._num_ended else 0.0
