"""The figures shown while a run goes on: totals, and rates and percentiles of its last seconds. Pure: times come in.

Not the run's result (`summary.py`): latencies here are those of requests that ended lately, and of at most KEPT of them.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock_loadtest.records import Outcome, Record
from penstock_loadtest.scenario import Scenario
from penstock_loadtest.summary import MAX_LATENESS_S

WINDOW_S = 10.0
KEPT = 20_000


class Ended(NamedTuple):
    """What is kept of a request for a while."""

    at_s: float
    is_finished: bool
    tokens: int
    ttft_s: float | None
    tpot_s: float | None
    lateness_s: float | None


class Percentiles(NamedTuple):
    p50: float
    p99: float


class Snapshot(NamedTuple):
    elapsed_s: float
    total_s: float | None
    """When sending ends, as far as it is known: the duration, or estimated from the requests left and the rate."""
    sent: int
    in_flight: int
    offered_per_s: float
    achieved_per_s: float
    tokens_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    lateness_p99_s: float | None
    outcomes: dict[Outcome, int]
    is_sending: bool

    @property
    def is_late(self) -> bool:
        return self.lateness_p99_s is not None and self.lateness_p99_s > MAX_LATENESS_S


class Progress:
    def __init__(self, scenario: Scenario) -> None:
        self._duration_s = scenario.duration_s
        self._requests = scenario.requests
        self._sent_s: deque[float] = deque(maxlen=KEPT)
        self._ended: deque[Ended] = deque(maxlen=KEPT)
        self._outcomes: Counter[Outcome] = Counter()
        self._sent = 0
        self._in_flight = 0

    def sent(self, now_s: float) -> None:
        self._sent += 1
        self._in_flight += 1
        self._sent_s.append(now_s)

    def ended(self, record: Record, now_s: float) -> None:
        self._in_flight -= 1
        self._outcomes[record.outcome] += 1
        self._ended.append(Ended(now_s, record.outcome == "finished", record.tokens, record.ttft_s, record.tpot_s, record.lateness_s))

    def snapshot(self, now_s: float) -> Snapshot:
        """The figures now; what is older than WINDOW_S is dropped."""
        self._forget(now_s - WINDOW_S)
        ended = self._ended
        return Snapshot(
            elapsed_s=now_s,
            total_s=self._total_s(now_s),
            sent=self._sent,
            in_flight=self._in_flight,
            offered_per_s=_rate(self._sent_s, len(self._sent_s), now_s),
            achieved_per_s=_rate([one.at_s for one in ended], sum(one.is_finished for one in ended), now_s),
            tokens_per_s=_rate([one.at_s for one in ended], sum(one.tokens for one in ended), now_s),
            ttft_s=_percentiles([one.ttft_s for one in ended if one.ttft_s is not None]),
            tpot_s=_percentiles([one.tpot_s for one in ended if one.tpot_s is not None]),
            lateness_p99_s=None if (late := _percentiles([one.lateness_s for one in ended if one.lateness_s is not None])) is None else late.p99,
            outcomes=dict(self._outcomes),
            is_sending=(self._duration_s is None or now_s < self._duration_s) and (self._requests is None or self._sent < self._requests),
        )

    def _forget(self, before_s: float) -> None:
        while self._sent_s and self._sent_s[0] < before_s:
            self._sent_s.popleft()
        while self._ended and self._ended[0].at_s < before_s:
            self._ended.popleft()

    def _total_s(self, now_s: float) -> float | None:
        by_requests = None if self._requests is None or not self._sent or now_s <= 0 else now_s * max(1.0, self._requests / self._sent)
        known = [total for total in (self._duration_s, by_requests) if total is not None]
        return min(known) if known else None


def _rate(times_s: Sequence[float] | deque[float], count: int, now_s: float) -> float:
    """Per second of the window, or of the part of it that `times_s` reach back when more was dropped than is old."""
    span_s = min(now_s, WINDOW_S)
    if len(times_s) == KEPT:
        span_s = min(span_s, now_s - times_s[0])
    return count / span_s if span_s > 0 else 0.0


def _percentiles(values: list[float]) -> Percentiles | None:
    return Percentiles(*np.quantile(values, (0.5, 0.99)).tolist()) if values else None
