"""Samples of metrics that are recorded together: many one after the other cost less than each one by itself.

Not the metrics (`metrics`). Increments of one counter are added up, and what recording touches is fetched once for many
samples. For one thread. Invariant: whoever reads all of a registry on which the notes stand first sees what was noted
before.
"""

from collections.abc import Iterable

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.registry import Collector

MAX_OBSERVATIONS = 256
"""Observations that wait at most: those of some fifty requests, recorded within a millisecond."""


class Notes(Collector):
    """Samples that wait until somebody reads, or until there are MAX_OBSERVATIONS; counts alone, which are one number a
    counter, until somebody reads. To be registered before the instruments that they are for."""

    def __init__(self) -> None:
        self._counts: dict[Counter, float] = {}
        self._observations: list[tuple[Histogram, float]] = []

    def count(self, counter: Counter, amount: float = 1) -> None:
        """Note an increment. Raises ValueError for a negative one."""
        if amount < 0:
            raise ValueError(f"a counter can't go back, by {amount}")
        self._counts[counter] = self._counts.get(counter, 0) + amount

    def observe(self, histogram: Histogram, value: float) -> None:
        """Note an observation; all that is noted is recorded when there are many."""
        self._observations.append((histogram, value))
        if len(self._observations) >= MAX_OBSERVATIONS:
            self.record()

    def record(self) -> None:
        """Record what is noted."""
        counts, self._counts = self._counts, {}
        observations, self._observations = self._observations, []
        for counter, amount in counts.items():
            counter.inc(amount)
        for histogram, value in observations:
            histogram.observe(value)

    def describe(self) -> Iterable[Metric]:
        """Nothing: notes are no metrics."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Record what is noted, before the instruments behind are read."""
        self.record()
        return ()
