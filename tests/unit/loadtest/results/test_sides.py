"""The order of runs, and what they say."""

import random

import msgspec
import pytest

from penstock_loadtest.results.sides import (
    FIGURES,
    Comparison,
    NextRun,
    Run,
    Setting,
    Side,
    choose_next_run,
    choose_seed,
    compare_figures,
    keep_whole_pairs,
    make_comparison,
)

A = Setting(name="old", url="http://a/v1", model="m", overrides=[])
B = Setting(name="new", url="http://b/v1", model="m", overrides=[])


def run(
    pair: int,
    side: Side,
    value: float | None = 1.0,
    *,
    is_late: bool = False,
    is_balanced: bool = True,
    **figures: float | None,
) -> Run:
    values = dict.fromkeys(FIGURES, value) | figures
    return Run(
        pair=pair,
        side=side,
        folder="",
        figures=values,
        requests=10,
        finished=10,
        is_balanced=is_balanced,
        is_late=is_late,
    )


def test_pairs_are_interleaved_so_that_drift_hits_both_sides() -> None:
    runs: list[Run] = []
    while (following := choose_next_run(runs, 4)) is not None:
        runs.append(run(following.pair, following.side))

    assert "".join(made.side for made in runs) == "abbaabba"
    assert [made.pair for made in runs] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_half_a_pair_is_made_again() -> None:
    runs = [run(1, "a"), run(1, "b"), run(2, "b")]

    assert keep_whole_pairs(runs) == runs[:2]
    assert choose_next_run(keep_whole_pairs(runs), 2) == NextRun(2, "b")


def test_both_servers_get_the_same_requests_in_a_pair_and_others_in_the_next() -> None:
    seeds = {
        (pair, side): choose_seed(5, NextRun(pair, side), same_server=False) for pair in (1, 2) for side in ("a", "b")
    }

    assert seeds[1, "a"] == seeds[1, "b"] == 5
    assert seeds[2, "a"] == seeds[2, "b"] != 5


def test_one_server_never_gets_the_same_requests_twice() -> None:
    seeds = [choose_seed(5, NextRun(pair, side), same_server=True) for pair in range(1, 20) for side in ("a", "b")]

    assert len(set(seeds)) == len(seeds)


def test_a_real_difference_is_distinguished_through_drift() -> None:
    rng = random.Random(4)
    runs = []
    for pair in range(1, 11):
        drift = 1 + pair
        runs += [run(pair, "a", drift), run(pair, "b", drift * 1.2 * rng.uniform(0.99, 1.01))]
    found = make_comparison(A, B, 10, {}, runs)
    ttft = found.rows[0]

    assert ttft.ratio.value == pytest.approx(1.2, abs=0.01)
    assert ttft.is_distinguishable
    assert found.is_complete
    assert found.sentences[0].startswith("TTFT of new is 1.196 times that of old (95 % interval 1.1")
    assert found.sentences[0].endswith("10 pairs): the difference is real.")


def test_noise_is_not_taken_for_a_difference() -> None:
    runs = [made for pair in range(1, 11) for made in (run(pair, "a", 1.0), run(pair, "b", 1.0 + 0.1 * (-1) ** pair))]

    assert not any(row.is_distinguishable for row in compare_figures(runs))


def test_with_few_pairs_there_is_a_ratio_but_no_verdict() -> None:
    found = make_comparison(A, B, 2, {}, [run(1, "a"), run(1, "b", 2.0), run(2, "b", 2.0), run(2, "a")])

    assert found.rows[0].ratio.value == pytest.approx(2.0)
    assert not found.rows[0].is_distinguishable
    assert (
        found.sentences[0]
        == "TTFT of new is 2.000 times that of old; a 95 % interval needs at least 6 pairs, there are 2."
    )


def test_figures_that_were_not_measured_are_not_compared() -> None:
    runs = [run(1, "a", TPOT=None), run(1, "b")]
    rows = {row.figure: row for row in compare_figures(runs)}

    assert rows["TPOT"].ratio.value is None
    assert (rows["TPOT"].a, rows["TPOT"].b) == (None, None)
    assert rows["TTFT"].ratio.value == pytest.approx(1.0)


def test_what_makes_the_figures_doubtful_is_said() -> None:
    found = make_comparison(A, B, 3, {}, [run(1, "a", is_late=True), run(1, "b", is_balanced=False)])

    assert not found.is_complete
    assert found.sentences[-3:] == [
        "Not finished: 1 of 3 pairs.",
        "In 1 of 2 runs the tester sent late: they measured it along with the server.",
        "The ledger of 1 of 2 runs does not balance.",
    ]


def test_a_comparison_survives_json() -> None:
    found = make_comparison(A, B, 1, {"scenario": {}}, [run(1, "a"), run(1, "b")])

    assert msgspec.convert(msgspec.to_builtins(found), Comparison, strict=False) == found
