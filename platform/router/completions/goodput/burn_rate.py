"""How fast requests use up what their objective leaves to miss: burn rates over three windows. Pure.

Burn rate = share of requests out of target / (1 - objective), as in chapter 5 of Google's "The Site Reliability
Workbook" (sre.google/workbook/alerting-on-slos): 1 uses up the error budget exactly when its period ends; of 30 days,
14.4 uses up 2 % in an hour. Invariant: memory does not grow with requests or time, and what is older than a window by
more than a sixtieth of it never counts, also after a time without requests.
"""

from typing import NamedTuple

NUM_BUCKETS = 60
"""Whole buckets of a window; one more is being filled."""
WINDOWS_S = {"5m": 300.0, "1h": 3600.0, "6h": 21600.0}
"""Windows by the value of their label."""
SLOT_S = min(WINDOWS_S.values()) / NUM_BUCKETS
"""Seconds whose requests go into the windows together; every window's bucket is a multiple of it."""


class Counts(NamedTuple):
    """Requests of a window."""

    total: int = 0
    missed: int = 0
    """Those that were out of target."""


class Window:
    """Requests of the last `length_s` seconds, and of the bucket that is being filled. Times: monotonic, seconds."""

    __slots__ = ("_bucket_s", "_missed", "_now", "_total")

    def __init__(self, length_s: float) -> None:
        self._bucket_s = length_s / NUM_BUCKETS
        self._total = [0] * (NUM_BUCKETS + 1)
        self._missed = [0] * (NUM_BUCKETS + 1)
        self._now: int | None = None
        """Number of the bucket that is being filled; None: nothing has come."""

    def add(self, now: float, counts: Counts) -> None:
        place = self._advance(now) % len(self._total)
        self._total[place] += counts.total
        self._missed[place] += counts.missed

    def counts(self, now: float) -> Counts:
        self._advance(now)
        return Counts(sum(self._total), sum(self._missed))

    def _advance(self, now: float) -> int:
        """Empty the buckets that have become too old; returns the number of the one that is being filled."""
        bucket, size = int(now // self._bucket_s), len(self._total)
        last = bucket if self._now is None else self._now
        for number in range(max(last, bucket - size) + 1, bucket + 1):
            self._total[number % size] = self._missed[number % size] = 0
        self._now = max(last, bucket)
        return self._now


class BurnRates:
    """Burn rates of one kind of requests, by window. objective: share that should be in target, between 0 and 1."""

    __slots__ = ("_budget", "_missed", "_slot", "_total", "_windows")

    def __init__(self, objective: float) -> None:
        self._budget = 1.0 - objective
        self._windows = {name: Window(length_s) for name, length_s in WINDOWS_S.items()}
        self._slot = 0
        """Number of the SLOT_S whose requests are in no window yet."""
        self._total = self._missed = 0

    def add(self, now: float, *, is_missed: bool) -> None:
        """Count one request that is over."""
        slot = int(now // SLOT_S)
        if slot != self._slot:
            self._put()
            self._slot = slot
        self._total += 1
        self._missed += is_missed

    def rate(self, window: str, now: float) -> float:
        """The burn rate over a window of WINDOWS_S; 0 where no request came in it."""
        self._put()
        counts = self._windows[window].counts(now)
        return counts.missed / counts.total / self._budget if counts.total else 0.0

    def _put(self) -> None:
        """Put what has been counted into the windows, each of whose buckets holds whole slots."""
        if self._total:
            counts = Counts(self._total, self._missed)
            for window in self._windows.values():
                window.add(self._slot * SLOT_S, counts)
            self._total = self._missed = 0
