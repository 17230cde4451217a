"""The comparison as a command runs it, against computed servers."""

import json
import random
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from penstock_loadtest.client.target import Target
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.results.records import Record
from penstock_loadtest.results.sides import Comparison, Setting
from penstock_loadtest.scenario import Kind, Scenario, Targets
from penstock_loadtest.studies.compare import Contender, make_comparison_table, run_comparison
from tests.unit.loadtest.modelled import Modelled, answered, target

SCENARIO = Scenario(name="chat", duration_s=10.0, targets=Targets(ttft_s=1.0, tpot_s=0.1))


def contender(name: str, url: str, scenario: Scenario = SCENARIO) -> Contender:
    return Contender(Setting(name=name, url=url, model="m", overrides=[]), scenario, target(url))


A, B = contender("A", "http://a/v1"), contender("B", "http://b/v1")


def served(scenario: Scenario, target: Target) -> list[Record]:
    """B is 20 % later to its first token; both drift together, and jitter by 2 %."""
    rng = random.Random(f"{scenario.name} {target.url}")
    ttft_s = (0.12 if target.url == B.target.url else 0.1) * rng.uniform(0.98, 1.02)
    return [answered(index, index / 10, ttft_s=ttft_s) for index in range(100)]


def compare(out: Path, run: Modelled, *, a: Contender = A, b: Contender = B, pairs: int = 8) -> Comparison:
    return run_comparison(a, b, out, pairs=pairs, settle_s=0.0, console=None, run=run)


def test_a_difference_is_found_and_sameness_is_not_taken_for_one(tmp_path: Path) -> None:
    found = compare(tmp_path, Modelled(served))
    rows = {row.figure: row for row in found.rows}

    assert rows["TTFT"].ratio.value == pytest.approx(1.2, rel=0.03)
    assert rows["TTFT"].is_distinguishable
    assert rows["TPOT"].ratio.value == pytest.approx(1.0)
    assert not rows["TPOT"].is_distinguishable
    assert rows["goodput"].a == rows["goodput"].b == 1.0
    assert msgspec.convert(json.loads((tmp_path / "compare.json").read_text()), Comparison, strict=False) == found


def test_runs_alternate_between_the_servers(tmp_path: Path) -> None:
    run = Modelled(served)
    compare(tmp_path, run, pairs=4)

    assert "".join("a" if used.url == A.target.url else "b" for used in run.targets) == "abbaabba"
    assert len(set(run.folders)) == 8


@pytest.mark.parametrize(("stop", "at", "kept"), [("stop_at", 4, 2), ("kill_at", 4, 2), ("stop_at", 5, 4)])
def test_a_comparison_that_was_stopped_goes_on_with_its_whole_pairs(
    tmp_path: Path, stop: str, at: int, kept: int
) -> None:
    stopped = compare(tmp_path, Modelled(served, **{stop: at}))
    rest = Modelled(served)
    found = compare(tmp_path, rest)

    assert not stopped.is_complete
    assert len(stopped.runs) == at - 1
    assert len(rest.scenarios) == 16 - kept
    assert found.is_complete
    assert sorted((run.pair, run.side) for run in found.runs) == [
        (pair, side) for pair in range(1, 9) for side in ("a", "b")
    ]


def test_a_finished_comparison_can_get_more_pairs(tmp_path: Path) -> None:
    compare(tmp_path, Modelled(served), pairs=3)
    more = Modelled(served)
    found = compare(tmp_path, more, pairs=6)

    assert len(more.scenarios) == 6
    assert found.rows[0].ratio.pairs == 6


def test_on_one_server_no_run_has_the_prompts_of_another(tmp_path: Path) -> None:
    run = Modelled(served)
    other = contender("B", A.target.url, msgspec.structs.replace(SCENARIO, kinds=[Kind(stream=False)]))
    compare(tmp_path, run, b=other, pairs=3)

    assert len({scenario.seed for scenario in run.scenarios}) == 6


def test_two_servers_get_the_same_prompts_in_a_pair(tmp_path: Path) -> None:
    run = Modelled(served)
    compare(tmp_path, run, pairs=3)
    seeds = [scenario.seed for scenario in run.scenarios]

    assert seeds[0::2] == seeds[1::2]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("side", ["a", "b"])
def test_another_load_is_not_joined_to_a_comparison(tmp_path: Path, side: str) -> None:
    compare(tmp_path, Modelled(served), pairs=1)
    other = contender(side.upper(), f"http://{side}/v1", msgspec.structs.replace(SCENARIO, drain_s=1.0))

    with pytest.raises(ScenarioInvalid, match=rf"scenario_{side}\.drain_s was 60\.0, now 1\.0"):
        compare(tmp_path, Modelled(served), **{side: other})


def test_another_server_is_not_joined_to_a_comparison(tmp_path: Path) -> None:
    compare(tmp_path, Modelled(served), pairs=1)

    with pytest.raises(ScenarioInvalid, match=r"b\.url was http://b/v1, now http://c/v1"):
        compare(tmp_path, Modelled(served), b=contender("B", "http://c/v1"))


def test_the_table_has_every_figure_with_its_unit_and_verdict(tmp_path: Path) -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(make_comparison_table(compare(tmp_path, Modelled(served))))
    rows = {line.split("│")[1].strip(): line for line in capture.get().splitlines() if line.startswith("│")}

    assert "different" in rows["TTFT, ms"]
    assert rows["TPOT, ms"].split("│")[2].strip() == "10.00"
    assert "not told apart" in rows["goodput, %"]
    assert "100.00" in rows["goodput, %"]
    assert "tokens/s" in rows
    assert max(map(len, rows.values())) <= 80


def test_a_side_called_like_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    a = contender("[red]", A.target.url)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(make_comparison_table(compare(tmp_path, Modelled(served), a=a, pairs=1)))

    assert "[red]" in capture.get()
