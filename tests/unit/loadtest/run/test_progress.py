"""The figures shown while a run goes on."""

from pathlib import Path

import pytest

from penstock_loadtest.results.records import Outcome, Record
from penstock_loadtest.run.progress import KEPT, WINDOW_S, Percentiles, Progress
from penstock_loadtest.scenario import Scenario, Trace


def record(
    *,
    at: float = 0.0,
    ttft: float = 0.2,
    gap: float = 0.01,
    tokens: int = 11,
    late: float = 0.0,
    outcome: Outcome = "finished",
) -> Record:
    times = [at + ttft + gap * n for n in range(tokens)]
    first = times[0] if tokens else None
    return Record(
        index=0,
        intended_s=at,
        sent_s=at + late,
        first_s=first,
        chunk_s=times,
        chunk_tokens=[1] * tokens,
        tokens=tokens,
        outcome=outcome,
    )


def test_rates_are_those_of_the_last_seconds() -> None:
    progress = Progress(Scenario())
    for n in range(300):
        progress.note_sent(n / 10)
        progress.note_ended(record(at=n / 10), n / 10)

    now = progress.snapshot(30.0)

    assert now.sent == 300
    assert now.offered_per_s == pytest.approx(10.0)
    assert now.achieved_per_s == pytest.approx(10.0)
    assert now.tokens_per_s == pytest.approx(110.0)


def test_early_rates_are_not_divided_by_time_that_has_not_passed() -> None:
    progress = Progress(Scenario())
    for n in range(20):
        progress.note_sent(n / 10)

    assert progress.snapshot(2.0).offered_per_s == pytest.approx(10.0)


def test_percentiles_are_those_of_requests_that_ended_lately() -> None:
    progress = Progress(Scenario())
    progress.note_ended(record(ttft=9.0, gap=9.0), 0.0)
    for _ in range(5):
        progress.note_ended(record(ttft=0.2, gap=0.01), WINDOW_S + 1)

    now = progress.snapshot(WINDOW_S + 2)

    assert now.ttft_s == pytest.approx(Percentiles(0.2, 0.2))
    assert now.tpot_s == pytest.approx(Percentiles(0.01, 0.01))


def test_nothing_ended_has_no_percentiles() -> None:
    now = Progress(Scenario()).snapshot(0.0)

    assert (now.ttft_s, now.tpot_s, now.lateness_p99_s, now.is_late) == (None, None, None, False)


def test_in_flight_is_what_was_sent_and_has_not_ended() -> None:
    progress = Progress(Scenario())
    for _ in range(5):
        progress.note_sent(1.0)
    progress.note_ended(record(), 1.0)
    progress.note_ended(record(outcome="shed", tokens=0), 1.0)

    now = progress.snapshot(2.0)

    assert now.in_flight == 3
    assert now.outcomes == {"finished": 1, "shed": 1}


@pytest.mark.parametrize(("late", "is_late"), [(0.005, False), (0.02, True)])
def test_a_p99_lateness_over_10_ms_is_said(late: float, is_late: bool) -> None:
    progress = Progress(Scenario())
    for _ in range(100):
        progress.note_ended(record(late=late), 1.0)

    assert progress.snapshot(2.0).is_late is is_late


def test_the_end_is_the_duration_or_when_the_requests_will_have_left() -> None:
    trace = Trace(format="mooncake", path=Path("trace.jsonl"))
    by_duration, by_requests, by_trace = (
        Progress(Scenario(trace=trace, duration_s=duration_s, requests=requests))
        for duration_s, requests in ((60.0, None), (None, 100), (None, None))
    )
    for _ in range(25):
        by_requests.note_sent(1.0)

    assert by_duration.snapshot(10.0).total_s == 60.0
    assert by_requests.snapshot(10.0).total_s == pytest.approx(40.0)
    assert by_trace.snapshot(10.0).total_s is None


def test_what_is_kept_is_bounded_and_rates_stay_true_beyond_it() -> None:
    progress = Progress(Scenario())
    rate = KEPT  # in the window ten times as many as are kept
    for n in range(int(rate * 2)):
        progress.note_sent(n / rate)

    assert progress.snapshot(2.0).offered_per_s == pytest.approx(rate, rel=0.01)
    assert len(progress._sent_s) == KEPT
