"""bench.testers: what both testers' requests come to, and when they agree."""

import itertools
import sys
from pathlib import Path

import pytest

from bench.support.rival_tester import Load, Seen
from bench.testers import FIGURES, Comparison, Figures, Server, figures, is_within, prompts, rows, run, seen
from penstock_loadtest.results.records import Record

LOAD = Load("two at a time", requests=3, output_tokens=5, at_once=2)
SERVER = Server("server", "http://127.0.0.1:1/v1", "", (0.95, 1.05), keeps_prompts=False)


def test_ours_counts_from_sending_and_to_the_last_token() -> None:
    record = Record(
        index=0,
        intended_s=1.0,
        sent_s=1.5,
        first_s=2.0,
        end_s=4.5,
        chunk_s=[2.0, 3.0, 4.0],
        chunk_tokens=[1, 2, 2],
        outcome="finished",
        tokens=5,
    )

    assert seen(record) == Seen(sent_s=1.5, last_s=4.0, ttft_s=0.5, tpot_s=0.5, tokens=5)


def test_a_request_that_did_not_finish_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match="request 7 is failed: the connection broke"):
        seen(Record(index=7, intended_s=0.0, outcome="failed", error="the connection broke"))


def test_figures_are_medians_and_tokens_over_first_sending_to_last_token() -> None:
    requests = [Seen(10.0, 12.0, 0.3, 0.02, 5), Seen(11.0, 14.0, 0.1, 0.04, 5), Seen(12.0, 13.0, 0.2, 0.03, 5)]

    assert figures(requests, LOAD, cpu_s=0.6) == pytest.approx(
        Figures(ttft_ms=200, tpot_ms=30, tokens_per_s=15 / 4, cpu_ms=200)
    )


def test_a_run_with_a_request_or_a_token_too_few_is_refused() -> None:
    with pytest.raises(RuntimeError, match="2 requests of"):
        figures([Seen(0, 1, 0.1, 0.1, 5)] * 2, LOAD, 0)
    with pytest.raises(RuntimeError, match="not 3 of 5"):
        figures([Seen(0, 1, 0.1, 0.1, 5), Seen(0, 1, 0.1, 0.1, 4), Seen(0, 1, 0.1, 0.1, 5)], LOAD, 0)


@pytest.mark.parametrize(("factor", "expected"), [(1.0, True), (1.04, True), (1.06, False), (0.94, False)])
def test_testers_agree_when_the_interval_of_the_ratio_is_within_the_bounds(factor: float, expected: bool) -> None:
    theirs = [Figures(100 + pair, 20, 300, 9) for pair in range(8)]
    comparison = Comparison(SERVER, LOAD, [f._replace(ttft_ms=factor * f.ttft_ms) for f in theirs], theirs)

    ratio = comparison.ratio(FIGURES["TTFT p50"][0])

    assert ratio.value == pytest.approx(factor)
    assert is_within(ratio, SERVER.bounds) is expected


def test_too_few_pairs_do_not_agree() -> None:
    runs = [Figures(100, 20, 300, 9)] * 3

    assert not is_within(Comparison(SERVER, LOAD, runs, runs).ratio(FIGURES["TPOT p50"][0]), SERVER.bounds)


def test_every_figure_has_rows_for_medians_ratio_and_both_ends_of_the_interval() -> None:
    runs = [Figures(100, 20, 300, 9)] * 8

    names = [row.name for row in rows(Comparison(SERVER, LOAD, runs, runs))]

    assert len(names) == 4 * len(FIGURES) + 1
    assert all(name.startswith("server, two at a time: ") for name in names)


def test_prompts_have_as_many_words_and_part_at_the_start() -> None:
    texts = prompts("a", 50, 100) + prompts("b", 50, 100)

    assert {len(text.split()) for text in texts} == {100}
    assert all(a.split()[:16] != b.split()[:16] for a, b in itertools.combinations(texts, 2))


def test_a_command_that_fails_shows_the_end_of_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with 3:\nno server there"):
        run(
            [sys.executable, "-c", "import sys; sys.stderr.write('no server there'); sys.exit(3)"], "", tmp_path / "log"
        )


def test_cpu_of_a_command_is_counted_and_the_key_reaches_it_by_its_environment(tmp_path: Path) -> None:
    code = "import os, time\nwhile time.process_time() < 0.2: pass\nprint(os.environ['OPENAI_API_KEY'])"

    assert 0.2 <= run([sys.executable, "-c", code], "sk-1", tmp_path / "log") < 2
    assert (tmp_path / "log").read_text() == "sk-1\n"
