"""How fast the waiters for some pools are placed. Pure: times come in, monotonic seconds."""

from collections import deque

SAMPLES = 64
"""Latest placements that count."""
MIN_SAMPLES = 16
"""Placements without a pause from which a pace is believed."""


class Pace:
    def __init__(self) -> None:
        self._placed: deque[float] = deque(maxlen=SAMPLES)
        self._busy_since: float | None = None
        self._num_busy = 0

    def count(self, now: float) -> None:
        """A request was placed."""
        self._placed.append(now)
        if not self._num_busy:
            self._busy_since = now
        self._num_busy += 1

    def begin_busy(self) -> None:
        """The first request waits. The clock starts with the first placement: before it the start of a replica may have
        been waited for."""
        self._busy_since, self._num_busy = None, 0

    def latest_s(self, now: float) -> float | None:
        """Seconds a placement took of late, pauses included; None before any."""
        return (now - self._placed[0]) / len(self._placed) if self._placed else None

    def busy_s(self, now: float) -> float | None:
        """Seconds a placement took since the first one after the first request waited; None while there were few."""
        if self._busy_since is None or self._num_busy < MIN_SAMPLES:
            return None
        return (now - self._busy_since) / self._num_busy
