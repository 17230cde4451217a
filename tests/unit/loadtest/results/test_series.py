"""Figures over time against plain Python over the same records."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_loadtest.results.columns import read_columns
from penstock_loadtest.results.records import Record
from penstock_loadtest.results.series import (
    WIDTHS_S,
    Observed,
    Series,
    choose_window_width_s,
    collect_replicas,
    compute_series,
)
from penstock_loadtest.scenario import Targets

TARGETS = Targets(ttft_s=1.0, tpot_s=0.1)


def request(
    at: float, *, first: float | None = None, end: float | None = None, outcome: str = "finished", **more: Any
) -> Record:
    chunk_s = [] if first is None else [first]
    facts = {"sent_s": at, "chunk_s": chunk_s, "chunk_tokens": [1] * len(chunk_s), "tokens": len(chunk_s)} | more
    return Record(index=0, intended_s=at, first_s=first, end_s=end, outcome=outcome, **facts)


def over_time(*records: Record, width_s: float = 1.0) -> Series:
    found = compute_series(read_columns(records), TARGETS, width_s=width_s)
    assert found is not None
    return found


seconds = st.integers(0, 20_000).map(lambda ms: ms / 1000)


@st.composite
def any_requests(draw: st.DrawFn) -> list[Record]:
    found = []
    for _ in range(draw(st.integers(1, 20))):
        at = draw(seconds)
        first = draw(st.none() | seconds.map(lambda more, at=at: at + more))
        end = draw(st.none() | seconds.map(lambda more, at=at, first=first: (first or at) + more))
        found.append(
            request(
                at,
                first=first,
                end=end,
                outcome=draw(st.sampled_from(["finished", "failed", "cancelled", "shed", "unfinished"])),
            )
        )
    return found


@given(any_requests())
def test_windows_hold_what_plain_counting_finds(records: list[Record]) -> None:
    found = over_time(*records)

    for i, (low, high) in enumerate(zip(found.edges_s[:-1], found.edges_s[1:], strict=True)):
        is_last = i == len(found.middle_s) - 1

        def within(t: float | None, low: float = low, high: float = high, is_last: bool = is_last) -> bool:
            return t is not None and (low <= t < high or (is_last and t == high))

        intended = [r for r in records if within(r.intended_s)]
        assert found.offered_per_s[i] == len(intended)
        assert found.finished_per_s[i] == sum(r.outcome == "finished" and within(r.end_s) for r in records)
        assert found.output_tokens_per_s[i] == sum(within(t) for r in records for t in r.token_s)
        assert {name: count[i] for name, count in found.outcomes.items()} == {
            n: sum(r.outcome == n for r in intended) for n in found.outcomes
        }
        ttfts = [r.ttft_s for r in intended if r.ttft_s is not None]
        if ttfts:
            assert [found.ttft_s.p50[i], found.ttft_s.p99[i]] == pytest.approx(np.percentile(ttfts, [50, 99]))
        else:
            assert math.isnan(found.ttft_s.p90[i])


@given(any_requests())
def test_most_in_flight_is_the_highest_level_of_a_plain_count(records: list[Record]) -> None:
    found = over_time(*records)

    for i, (low, high) in enumerate(zip(found.edges_s[:-1], found.edges_s[1:], strict=True)):
        moments = [
            low,
            *(r.intended_s for r in records if low <= r.intended_s < high or r.intended_s == high == found.edges_s[-1]),
        ]
        levels = [sum(r.intended_s <= t and (r.end_s is None or r.end_s > t) for r in records) for t in moments]
        assert found.in_flight[i] == max(levels)


@given(any_requests())
def test_no_request_is_lost_between_windows(records: list[Record]) -> None:
    found = compute_series(read_columns(records), TARGETS)

    assert found is not None
    assert found.offered_per_s.sum() * found.width_s == pytest.approx(len(records))
    assert sum(count.sum() for count in found.outcomes.values()) == len(records)


def test_latencies_stand_at_the_intended_time_and_work_at_the_time_it_was_done() -> None:
    found = over_time(request(0.5, first=3.2, end=3.4), request(3.9, first=4.0, end=4.0))

    assert found.ttft_s.p50.tolist() == pytest.approx([2.7, np.nan, np.nan, 0.1], nan_ok=True)
    assert found.output_tokens_per_s.tolist() == [0, 0, 0, 2]
    assert found.finished_per_s.tolist() == [0, 0, 0, 2]
    assert found.in_flight.tolist() == [1, 1, 1, 1]


def test_a_chunk_of_several_tokens_counts_with_all_of_them() -> None:
    found = over_time(request(0.0, first=1.2, end=2.0, chunk_s=[1.2, 1.6], chunk_tokens=[1, 4], tokens=5))

    assert found.output_tokens_per_s.tolist() == [0, 5]


def test_goodput_over_time_leaves_out_requests_cancelled_in_time() -> None:
    good = request(0.0, first=0.1, end=0.1)
    left_out = [request(0.1, end=0.2, outcome="cancelled"), request(2.0, end=2.5, outcome="cancelled")]
    missed = request(1.0, end=1.5, outcome="shed")

    found = over_time(good, *left_out, missed)

    assert found.goodput.tolist() == pytest.approx([1.0, 0.0, np.nan], nan_ok=True)
    assert found.good_per_s.tolist() == [1, 0, 0]


def test_a_request_that_never_ended_stays_in_flight() -> None:
    found = over_time(request(0.0, outcome="unfinished"), request(4.5, first=4.6, end=4.7))

    assert found.in_flight.tolist() == [1, 1, 1, 1, 2]


def test_a_request_that_was_never_sent_is_not_in_flight() -> None:
    assert over_time(request(0.0, sent_s=None, outcome="unfinished")).in_flight.tolist() == [0]


def test_windows_begin_at_multiples_of_their_width() -> None:
    assert over_time(request(31.0), request(39.0, end=42.0), width_s=5.0).edges_s.tolist() == [30, 35, 40, 45]


def test_a_run_without_requests_has_no_series() -> None:
    assert compute_series(read_columns([]), TARGETS) is None


@given(st.floats(0, 1e6), st.integers(1, 10**6))
def test_there_are_never_too_many_windows(span_s: float, requests: int) -> None:
    assert (
        span_s / choose_window_width_s(span_s, requests) <= 120
        or choose_window_width_s(span_s, requests) == WIDTHS_S[-1]
    )


def test_a_busy_minute_gets_windows_of_a_second_or_less_and_a_quiet_one_wider_ones() -> None:
    assert choose_window_width_s(60.0, 3000) <= 1.0
    assert choose_window_width_s(60.0, 60) == 5.0


def test_replicas_are_one_line_for_each_pool_and_tier_with_gaps_where_they_were_not_named() -> None:
    found = collect_replicas([Observed(0.0, {"m/gpu": 1}), Observed(1.0, {"m/gpu": 3, "m/cpu": 2}), Observed(2.0)])

    assert found is not None
    assert found.counts["m/gpu"].tolist() == pytest.approx([1, 3, np.nan], nan_ok=True)
    assert found.counts["m/cpu"].tolist() == pytest.approx([np.nan, 2, np.nan], nan_ok=True)


def test_a_server_that_names_no_replicas_has_none() -> None:
    assert collect_replicas([]) is None
    assert collect_replicas([Observed(0.0)]) is None
