"""A run's figures over time, in windows of equal width: latencies and outcomes by intended time, work done by the time
it was done.

Pure: takes columns and the server's samples, returns arrays with one value a window. A window without a value for a
figure has NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock_loadtest.results.columns import OUTCOMES, Columns, Floats, Ints
from penstock_loadtest.results.records import Outcome
from penstock_loadtest.results.summary import judge
from penstock_loadtest.scenario import Targets

WIDTHS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400)
_MAX_WINDOWS = 120
_REQUESTS_A_WINDOW = 30  # wanted on average: a percentile of two requests is meaningless
_MIN_WINDOWS = 12  # even where that leaves fewer


class Observed(msgspec.Struct, frozen=True):
    """The server's report of its replicas at one time (a line of observed.jsonl)."""

    t_s: float
    replicas: dict[str, float] = {}  # by "pool/tier"


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    p50: Floats
    p90: Floats
    p99: Floats


@dataclass(frozen=True, kw_only=True)
class Series:
    """One value a window but `edges_s`, which has one more: window i is from `edges_s[i]` to `edges_s[i + 1]`, seconds
    since the run's start."""

    edges_s: Floats
    ttft_s: Percentiles  # by intended time, as every field without another remark
    tpot_s: Percentiles
    offered_per_s: Floats
    good_per_s: Floats
    goodput: Floats  # share
    finished_per_s: Floats  # by the time of the end
    output_tokens_per_s: Floats  # by the tokens' time
    in_flight: Floats  # most at once: sent and not ended
    outcomes: dict[Outcome, Ints]  # requests

    @property
    def width_s(self) -> float:
        return float(self.edges_s[1] - self.edges_s[0])

    @property
    def middle_s(self) -> Floats:
        return (self.edges_s[:-1] + self.edges_s[1:]) / 2


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """How many replicas each "pool/tier" had at each time that its metrics were read."""

    at_s: Floats
    counts: dict[str, Floats]  # NaN: not named that time


def compute_series(columns: Columns, targets: Targets, *, width_s: float | None = None) -> Series | None:
    """The figures in windows of `width_s` (None: by the run's length and requests); None without requests."""
    if not len(columns):
        return None
    begin_s, end_s = _extent(columns)
    width_s = width_s or choose_window_width_s(end_s - begin_s, len(columns))
    begin_s = np.floor(begin_s / width_s) * width_s
    edges_s = begin_s + width_s * np.arange(max(int(np.ceil((end_s - begin_s) / width_s)), 1) + 1)
    windows = len(edges_s) - 1
    window = _windows(columns.intended_s, edges_s)
    good, causes = judge(columns, targets)
    judged = np.bincount(window[np.logical_or.reduce([good, *causes.values()])], minlength=windows)
    good_count = np.bincount(window[good], minlength=windows)
    ended_s = columns.end_s[columns.is_outcome("finished")]
    return Series(
        edges_s=edges_s,
        ttft_s=_percentiles(columns.ttft_s, window, windows),
        tpot_s=_percentiles(columns.tpot_s, window, windows),
        offered_per_s=np.bincount(window, minlength=windows) / width_s,
        good_per_s=good_count / width_s,
        goodput=_share(good_count, judged),
        finished_per_s=np.bincount(_windows(ended_s[~np.isnan(ended_s)], edges_s), minlength=windows) / width_s,
        output_tokens_per_s=np.bincount(
            _windows(columns.chunk_s, edges_s), weights=columns.chunk_tokens, minlength=windows
        )
        / width_s,
        in_flight=_most_in_flight(columns, edges_s),
        outcomes={outcome: np.bincount(window[columns.is_outcome(outcome)], minlength=windows) for outcome in OUTCOMES},
    )


def choose_window_width_s(span_s: float, requests: int) -> float:
    """The least width of WIDTHS_S with not too many windows, nor too few requests in them."""
    wanted = min(_MAX_WINDOWS, max(_MIN_WINDOWS, requests / _REQUESTS_A_WINDOW))
    return next((width for width in WIDTHS_S if span_s / width <= wanted), WIDTHS_S[-1])


def collect_replicas(observed: Sequence[Observed]) -> Replicas | None:
    """Counts of replicas over time; None if the server never reported any."""
    names = sorted({name for sample in observed for name in sample.replicas})
    if not names:
        return None
    return Replicas(
        at_s=np.array([sample.t_s for sample in observed]),
        counts={
            name: np.array([sample.replicas.get(name, np.nan) for sample in observed], dtype=np.float64)
            for name in names
        },
    )


def _extent(columns: Columns) -> tuple[float, float]:
    """First intended time, and the last time at which anything happened."""
    times = np.concatenate([columns.intended_s, columns.end_s, columns.chunk_s])
    return float(columns.intended_s.min()), float(np.nanmax(times))


def _windows(times_s: Floats, edges_s: Floats) -> Ints:
    """The window of each time; the last one includes its end."""
    place: Ints = np.searchsorted(edges_s, times_s, side="right").astype(np.int64) - 1
    return np.clip(place, 0, len(edges_s) - 2)


def _percentiles(values: Floats, window: Ints, windows: int) -> Percentiles:
    has_value = ~np.isnan(values)
    values, window = values[has_value], window[has_value]
    order = np.argsort(window, kind="stable")
    cuts = np.searchsorted(window[order], np.arange(1, windows))
    found = [
        np.percentile(part, [50, 90, 99]) if len(part) else np.full(3, np.nan) for part in np.split(values[order], cuts)
    ]
    p50, p90, p99 = np.array(found).T
    return Percentiles(p50=p50, p90=p90, p99=p99)


def _share(part: Ints, whole: Ints) -> Floats:
    share = np.full(len(part), np.nan)
    np.divide(part, whole, out=share, where=whole > 0)
    return share


def _most_in_flight(columns: Columns, edges_s: Floats) -> Floats:
    """The most requests in flight in each window; one that was sent and has no end stays in flight to the last."""
    sent = ~np.isnan(columns.sent_s)
    starts_s = np.sort(columns.sent_s[sent])
    ends_s = columns.end_s[sent]
    ends_s = np.sort(ends_s[~np.isnan(ends_s)])
    # at each sending, and as each window begins: only there a window's most can be
    times_s = np.concatenate([starts_s, edges_s[:-1]])
    level = np.searchsorted(starts_s, times_s, side="right") - np.searchsorted(ends_s, times_s, side="right")
    most = np.zeros(len(edges_s) - 1)
    np.maximum.at(most, _windows(times_s, edges_s), level)
    return most
