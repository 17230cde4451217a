"""Figures of a summary against plain Python over the same records, and the rules of goodput one by one."""

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_loadtest.results.columns import Sample
from penstock_loadtest.results.records import Record
from penstock_loadtest.results.summary import Distribution, Goodput, Misses, Summary, summarize
from penstock_loadtest.scenario import Scenario, Targets

TARGETS = Targets(ttft_s=1.0, tpot_s=0.1)
SCENARIO = Scenario(targets=TARGETS)


def streamed(*, at: float = 0.0, ttft: float = 0.5, gap: float = 0.05, chunks: int = 5, **more: Any) -> Record:
    """A finished request: a token at `at + ttft`, then one every `gap`."""
    times = [at + ttft + gap * n for n in range(chunks)]
    facts = {"outcome": "finished", "end_s": times[-1], "tokens": chunks} | more
    return Record(
        index=0, intended_s=at, sent_s=at, first_s=times[0], chunk_s=times, chunk_tokens=[1] * chunks, **facts
    )


def goodput(*records: Record) -> Goodput:
    return summarize(records, SCENARIO).goodput


def misses(*records: Record) -> Misses:
    return goodput(*records).misses


@st.composite
def any_records(draw: st.DrawFn) -> list[Record]:
    time = st.integers(0, 5_000_000).map(lambda us: us / 1e6)
    records = []
    for index in range(draw(st.integers(0, 12))):
        intended = draw(time)
        counts = draw(st.lists(st.integers(1, 4), max_size=6))
        at, chunk_s = intended, []
        for _ in counts:
            at += draw(time)
            chunk_s.append(at)
        records.append(
            Record(
                index=index,
                intended_s=intended,
                sent_s=draw(st.none() | time.map(lambda late, intended=intended: intended + late / 100)),
                first_s=chunk_s[0] if chunk_s else None,
                end_s=draw(st.none() | time.map(lambda more, at=at: at + more)),
                chunk_s=chunk_s,
                chunk_tokens=counts,
                tokens=sum(counts),
                tokens_from=draw(st.sampled_from(["ids", "usage", "chunks"])),
                outcome=draw(st.sampled_from(["finished", "cancelled", "shed", "failed", "unfinished"])),
                prompt_tokens=draw(st.none() | st.integers(0, 1000)),
                cached_tokens=draw(st.none() | st.integers(0, 500)),
                tenant=draw(st.sampled_from(["a", "b"])),
                replica=draw(st.sampled_from([None, "r0"])),
                error=draw(st.none() | st.sampled_from(["Broken.", "Gone."])),
            )
        )
    return records


def check_distribution(figures: Distribution, values: list[float]) -> None:
    assert figures.count == len(values)
    if not values:
        assert figures == Distribution()
        return
    ordered = sorted(values)
    for share, figure in ((0.5, figures.p50), (0.9, figures.p90), (0.99, figures.p99)):
        rank = share * (len(ordered) - 1)
        low = int(rank)
        high = min(low + 1, len(ordered) - 1)
        assert figure == pytest.approx(ordered[low] * (1 - (rank - low)) + ordered[high] * (rank - low), abs=1e-9)
    assert figures.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert figures.max == pytest.approx(ordered[-1], abs=1e-9)


@given(any_records())
def test_figures_equal_those_computed_record_by_record(records: list[Record]) -> None:
    summary = summarize(iter(records), SCENARIO)

    check_distribution(summary.ttft_s, [r.ttft_s for r in records if r.ttft_s is not None])
    check_distribution(summary.tpot_s, [r.tpot_s for r in records if r.tpot_s is not None])
    check_distribution(summary.e2e_s, [r.e2e_s for r in records if r.e2e_s is not None])
    check_distribution(
        summary.inter_token_s, [b - a for r in records for a, b in zip(r.token_s, r.token_s[1:], strict=False)]
    )
    late = sorted(r.lateness_s for r in records if r.lateness_s is not None)
    assert summary.lateness.max_s == (pytest.approx(late[-1]) if late else None)
    assert msgspec.structs.asdict(summary.outcomes) == {
        name: sum(r.outcome == name for r in records) for name in msgspec.structs.asdict(summary.outcomes)
    }
    assert summary.output_tokens == sum(r.tokens for r in records)
    both = [r for r in records if r.prompt_tokens is not None and r.cached_tokens is not None]
    prompt = sum(r.prompt_tokens or 0 for r in both)
    assert summary.hit_rate == (pytest.approx(sum(r.cached_tokens or 0 for r in both) / prompt) if prompt else None)
    shared = sum(count for r in records for count in r.chunk_tokens if count > 1)
    assert summary.shared_chunk_share == (
        pytest.approx(shared / summary.output_tokens) if summary.output_tokens else None
    )
    assert {e.sentence: 0 for e in summary.errors}.keys() == {r.error for r in records if r.error}
    assert sum(e.count for e in summary.errors) == sum(r.error is not None for r in records)


@given(any_records())
def test_groups_are_summaries_of_their_own_requests(records: list[Record]) -> None:
    summary = summarize(records, SCENARIO)

    for groups, label in ((summary.groups.tenant, "tenant"), (summary.groups.replica, "replica")):
        assert {g.name: g.requests for g in groups} == Counter(getattr(r, label) for r in records)
        for group in groups:
            alone = summarize([r for r in records if getattr(r, label) == group.name], SCENARIO)
            assert (group.outcomes, group.ttft_s, group.tpot_s, group.e2e_s) == (
                alone.outcomes,
                alone.ttft_s,
                alone.tpot_s,
                alone.e2e_s,
            )
            assert (group.goodput.good, group.goodput.judged, group.goodput.misses) == (
                alone.goodput.good,
                alone.goodput.judged,
                alone.goodput.misses,
            )
            assert (group.output_tokens, group.hit_rate) == (alone.output_tokens, alone.hit_rate)


@given(any_records())
def test_every_request_is_good_a_miss_or_cancelled_in_time(records: list[Record]) -> None:
    result = summarize(records, SCENARIO).goodput

    assert result.judged == result.good + sum(msgspec.structs.astuple(result.misses))
    assert result.judged <= len(records) <= result.judged + sum(r.outcome == "cancelled" for r in records)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.integers(0, 50))
def test_quantiles_with_zeros_kept_as_a_count_equal_numpys(values: list[float], zeros: int) -> None:
    shares = np.array([0.0, 0.01, 0.5, 0.9, 0.99, 1.0])

    found = Sample(np.array(values), zeros=zeros).quantiles(shares)

    assert found == pytest.approx(np.quantile([0.0] * zeros + values, shares), abs=1e-9)


def test_a_finished_request_within_both_targets_is_good() -> None:
    result = goodput(streamed(ttft=1.0, gap=0.1))

    assert (result.good, result.judged, result.share) == (1, 1, 1.0)


def test_a_target_is_met_up_to_the_microsecond_that_records_are_kept_to() -> None:
    assert goodput(streamed(at=1.003, ttft=1.0)).good == 1
    assert goodput(streamed(at=1.003, ttft=1.000001)).good == 0


def whole(*, e2e: float, tokens: int) -> Record:
    return Record(
        index=0,
        intended_s=0.0,
        sent_s=0.0,
        end_s=e2e,
        outcome="finished",
        is_whole=True,
        tokens=tokens,
        chunk_s=[e2e] if tokens else [],
        chunk_tokens=[tokens] if tokens else [],
    )


def test_a_whole_answer_is_good_when_it_took_no_longer_than_both_targets_allow_together() -> None:
    allowed_s = SCENARIO.targets.ttft_s + 9 * SCENARIO.targets.tpot_s

    assert goodput(whole(e2e=allowed_s, tokens=10)).good == 1
    assert misses(whole(e2e=allowed_s + 0.01, tokens=10)) == Misses(ttft=1)


def test_a_whole_answer_without_a_token_is_a_miss() -> None:
    assert misses(whole(e2e=0.1, tokens=0)) == Misses(ttft=1)


def test_a_whole_answer_says_nothing_of_first_tokens_and_gaps() -> None:
    alone, beside = (
        summarize([whole(e2e=1.0, tokens=10)], SCENARIO),
        summarize([streamed(), whole(e2e=1.0, tokens=10)], SCENARIO),
    )

    assert (alone.ttft_s, alone.inter_token_s, alone.shared_chunk_share) == (Distribution(), Distribution(), None)
    assert beside.inter_token_s == summarize([streamed()], SCENARIO).inter_token_s
    assert alone.output_tokens == 10


def test_ttft_over_target_is_a_miss_by_ttft_even_when_tpot_is_over_too() -> None:
    assert misses(streamed(ttft=1.01), streamed(ttft=1.01, gap=0.2)) == Misses(ttft=2)


def test_tpot_over_target_is_a_miss_by_tpot() -> None:
    assert misses(streamed(gap=0.11)) == Misses(tpot=1)


def test_ttft_is_judged_from_the_intended_time_not_from_sending() -> None:
    late = Record(
        index=0,
        intended_s=0.0,
        sent_s=0.9,
        first_s=1.1,
        chunk_s=[1.1],
        chunk_tokens=[1],
        end_s=1.1,
        tokens=1,
        outcome="finished",
    )

    assert misses(late) == Misses(ttft=1)


@pytest.mark.parametrize("outcome", ["failed", "shed", "unfinished"])
def test_a_request_that_did_not_finish_is_a_miss_by_its_outcome_however_fast_its_tokens_were(outcome: str) -> None:
    result = goodput(streamed(outcome=outcome), streamed(ttft=9.0, outcome=outcome))

    assert result.misses == Misses(**{outcome: 2})
    assert result.share == 0.0


def test_a_request_cancelled_in_time_counts_neither_way() -> None:
    result = goodput(
        streamed(outcome="cancelled"), Record(index=0, intended_s=0.0, sent_s=0.0, end_s=1.0, outcome="cancelled")
    )

    assert (result.judged, result.share) == (0, None)


def test_a_cancelled_request_that_had_waited_longer_than_the_ttft_target_is_a_miss() -> None:
    without_token = Record(index=0, intended_s=0.0, sent_s=0.0, end_s=1.5, outcome="cancelled")

    assert misses(without_token, streamed(ttft=1.2, outcome="cancelled")) == Misses(ttft=2)


def test_a_cancelled_requests_tpot_is_not_held_against_it() -> None:
    assert goodput(streamed(gap=0.5, outcome="cancelled")).judged == 0


def test_a_finished_answer_without_a_token_is_a_miss_by_ttft() -> None:
    assert misses(Record(index=0, intended_s=0.0, sent_s=0.0, end_s=0.1, outcome="finished")) == Misses(ttft=1)


def test_an_answer_of_one_chunk_has_no_tpot_and_is_judged_by_ttft_alone() -> None:
    summary = summarize([streamed(chunks=1)], SCENARIO)

    assert summary.tpot_s == Distribution()
    assert summary.goodput.good == 1


def test_requests_of_the_warm_up_are_left_out_of_every_figure() -> None:
    measured = [streamed(at=10.0), streamed(at=12.0, ttft=0.7)]
    warm = [streamed(at=9.999, ttft=5.0, tenant="warm", error="Cold.")]

    with_warmup = summarize([*warm, *measured], Scenario(targets=TARGETS, warmup_s=10.0))

    assert with_warmup.warmup_requests == 1
    assert msgspec.structs.replace(with_warmup, warmup_requests=0) == summarize(measured, SCENARIO)


def test_offered_and_achieved_rates_and_throughput() -> None:
    records = [
        streamed(at=2.0 + n / 4, ttft=0.5, gap=0.05, prompt_tokens=10, cached_tokens=4) for n in range(9)
    ]  # 2.0 to 4.0; the last ends at 4.7

    summary = summarize(records, SCENARIO)

    assert summary.offered_rate == pytest.approx(4.0)
    assert summary.span_s == pytest.approx(2.7)
    assert summary.achieved_rate == pytest.approx(9 / 2.7)
    assert summary.output_tokens_per_s == pytest.approx(45 / 2.7)
    assert summary.prompt_tokens_per_s == pytest.approx(90 / 2.7)
    assert summary.hit_rate == pytest.approx(0.4)


def test_a_request_that_hangs_until_its_timeout_does_not_dilute_throughput() -> None:
    served = [streamed(at=n / 4) for n in range(9)]
    hung = Record(index=9, intended_s=1.0, sent_s=1.0, end_s=601.0, outcome="unfinished")

    assert summarize([*served, hung], SCENARIO).output_tokens_per_s == summarize(served, SCENARIO).output_tokens_per_s


def test_a_run_is_late_when_p99_lateness_exceeds_ten_milliseconds() -> None:
    def run(lateness_s: float) -> Summary:
        return summarize([Record(index=0, intended_s=1.0, sent_s=1.0 + lateness_s, outcome="failed")], SCENARIO)

    assert not run(0.0099).lateness.is_late
    assert run(0.0101).lateness.is_late


def test_tokens_of_one_chunk_share_its_time_and_are_reported() -> None:
    record = Record(
        index=0,
        intended_s=0,
        first_s=1.0,
        chunk_s=[1.0, 1.3],
        chunk_tokens=[1, 3],
        tokens=4,
        tokens_from="ids",
        end_s=1.3,
        outcome="finished",
    )

    summary = summarize([record], SCENARIO)

    assert summary.inter_token_s == Distribution(
        count=3,
        mean=pytest.approx(0.1),
        p50=0.0,
        p90=pytest.approx(0.24),
        p99=pytest.approx(0.294),
        max=pytest.approx(0.3),
    )
    assert summary.tpot_s.p50 == pytest.approx(0.1)
    assert summary.shared_chunk_share == 0.75
    assert summary.token_sources.ids == 4


def test_the_ten_commonest_errors_are_listed_and_the_others_counted() -> None:
    errors = [
        Record(index=0, intended_s=0.0, status=500, outcome="failed", error=f"Error {n}.")
        for n in range(12)
        for _ in range(n + 1)
    ]

    summary = summarize(errors, SCENARIO)

    assert [(e.sentence, e.count) for e in summary.errors] == [(f"Error {n}.", n + 1) for n in range(11, 1, -1)]
    assert summary.other_errors == 3


def test_a_run_without_requests_has_a_summary() -> None:
    summary = summarize([], SCENARIO)

    assert (summary.requests, summary.goodput.share, summary.offered_rate, summary.span_s) == (0, None, None, None)
    assert summary.ttft_s == summary.inter_token_s == Distribution()
    assert summary.groups.tenant == []


def test_a_run_in_which_everything_failed_has_a_goodput_of_zero() -> None:
    summary = summarize(
        [
            Record(index=n, intended_s=float(n), sent_s=float(n), end_s=n + 0.1, outcome="failed", error="Refused.")
            for n in range(3)
        ],
        SCENARIO,
    )

    assert (summary.goodput.share, summary.achieved_rate, summary.output_tokens_per_s) == (0.0, 0.0, 0.0)
    assert summary.ttft_s == Distribution()


def test_a_summary_survives_json() -> None:
    summary = summarize([streamed(), streamed(at=1.0, replica="r0", error="Odd.")], SCENARIO)

    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary


def test_memory_of_a_summary_is_numbers_not_records() -> None:
    """Records come from a generator and none is kept: 64 chunks of a record as Python floats alone would be 2 kB."""
    alive: set[int] = set()

    class Watched(Record):
        def __del__(self) -> None:
            alive.discard(id(self))

    def records() -> Iterator[Record]:
        for n in range(300):
            record = Watched(index=n, intended_s=float(n), chunk_s=[1.0] * 64, chunk_tokens=[1] * 64)
            alive.add(id(record))
            most.append(len(alive))
            yield record
            del record

    most: list[int] = []
    summarize(records(), SCENARIO)

    assert max(most) <= 3
