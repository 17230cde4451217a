"""The figures shown while a run goes on: totals, and rates and percentiles of its last seconds. Pure: times come in.

Not the run's result (`summary.py`): latencies here are those of requests that ended lately, and of at most KEPT of
them. `note_sent` and `note_ended` are for the event loop; a snapshot may be taken by another thread meanwhile, so that
counting up is no burden of the load.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock_loadtest.results.records import Outcome, Record
from penstock_loadtest.results.summary import MAX_LATENESS_S
from penstock_loadtest.scenario import Scenario

WINDOW_S = 10.0
KEPT = 4096


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
    """Seconds after the start at which sending ends: the duration, or estimated from the requests left and the rate;
    None: not known."""
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

    def note_sent(self, now_s: float) -> None:
        self._sent += 1
        self._in_flight += 1
        self._sent_s.append(now_s)

    def note_ended(self, record: Record, now_s: float) -> None:
        self._in_flight -= 1
        self._outcomes[record.outcome] += 1
        self._ended.append(
            Ended(now_s, record.outcome == "finished", record.tokens, record.ttft_s, record.tpot_s, record.lateness_s)
        )

    def snapshot(self, now_s: float) -> Snapshot:
        """The figures of the last WINDOW_S."""
        sent_s = [at_s for at_s in list(self._sent_s) if at_s >= now_s - WINDOW_S]
        ended = [one for one in list(self._ended) if one.at_s >= now_s - WINDOW_S]
        ended_s = [one.at_s for one in ended]
        lateness_s = _percentiles([one.lateness_s for one in ended if one.lateness_s is not None])
        return Snapshot(
            elapsed_s=now_s,
            total_s=self._total_s(now_s),
            sent=self._sent,
            in_flight=self._in_flight,
            offered_per_s=_rate(sent_s, len(sent_s), now_s),
            achieved_per_s=_rate(ended_s, sum(one.is_finished for one in ended), now_s),
            tokens_per_s=_rate(ended_s, sum(one.tokens for one in ended), now_s),
            ttft_s=_percentiles([one.ttft_s for one in ended if one.ttft_s is not None]),
            tpot_s=_percentiles([one.tpot_s for one in ended if one.tpot_s is not None]),
            lateness_p99_s=None if lateness_s is None else lateness_s.p99,
            outcomes=dict(self._outcomes),
            is_sending=(self._duration_s is None or now_s < self._duration_s)
            and (self._requests is None or self._sent < self._requests),
        )

    def _total_s(self, now_s: float) -> float | None:
        by_requests = (
            None
            if self._requests is None or not self._sent or now_s <= 0
            else now_s * max(1.0, self._requests / self._sent)
        )
        known = [total for total in (self._duration_s, by_requests) if total is not None]
        return min(known) if known else None


def _rate(times_s: Sequence[float], count: int, now_s: float) -> float:
    """Count per second of the window; where younger times were dropped too, of the part of it that `times_s` cover."""
    span_s = min(now_s, WINDOW_S)
    if len(times_s) == KEPT:
        span_s = min(span_s, now_s - times_s[0])
    return count / span_s if span_s > 0 else 0.0


def _percentiles(values: list[float]) -> Percentiles | None:
    """p50 and p99 by nearest rank; None without values."""
    values.sort()
    return Percentiles(*(values[int(q * (len(values) - 1) + 0.5)] for q in (0.5, 0.99))) if values else None
