"""The pages of a ladder and of a comparison."""

import random
import re
from pathlib import Path

import msgspec
import pytest

from penstock_loadtest.report import number_formats
from penstock_loadtest.results.intervals import MIN_PAIRS
from penstock_loadtest.results.knee import Next, Rules, Step, choose_next_step, make_ladder
from penstock_loadtest.results.records import write_json
from penstock_loadtest.results.sides import Comparison, Run, Setting, choose_next_run, make_comparison
from tests.unit.loadtest.report.pages import written


def some_ladder(folder: Path) -> int:
    rules, steps = Rules(start_rate=1.0, max_rate=64.0), list[Step]()
    while isinstance(following := choose_next_step(steps, rules), Next):
        rate = following.rate
        share = min(1.0, max(0.0, 1.6 - rate / 14))
        figures = {
            "goodput": share,
            "goodput_per_s": share * rate,
            "offered_rate": rate,
            "achieved_rate": rate,
            "output_tokens_per_s": 40 * rate,
        }
        latencies = {"ttft_p50_s": 0.1, "ttft_p99_s": 0.1 * rate, "tpot_p50_s": 0.02, "tpot_p99_s": 0.03}
        counts = {"judged": 100, "shed": 0, "failed": 0, "unfinished": 0}
        flags = {"is_balanced": True, "is_late": rate > 20}
        named = {
            "number": len(steps) + 1,
            "rate": rate,
            "purpose": following.purpose,
            "reason": following.reason,
            "folder": "x",
        }
        steps.append(msgspec.convert(named | figures | latencies | counts | flags, Step))
    write_json(folder / "ladder.json", make_ladder("http://127.0.0.1:1/v1", "small", "requests/s", rules, {}, steps))
    return len(steps)


def test_a_ladders_page_marks_the_knee_and_has_a_row_a_step(tmp_path: Path) -> None:
    steps = some_ladder(tmp_path)

    page = written(tmp_path)

    assert sum(bool(re.match(r"\d+, (not )?held", row[0])) for row in page.cells) == steps
    assert page.count("svg") == 4
    assert page.source.count("knee ") >= 4
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {
        "ladder_goodput",
        "ladder_rates",
        "ladder_ttft",
        "ladder_tpot",
    }


def test_a_ladder_without_steps_or_without_figures_has_a_page(tmp_path: Path) -> None:
    rules = Rules(start_rate=1.0, max_rate=64.0)
    nothing = {
        name: None
        for name in Step.__struct_fields__
        if name.endswith("_s") or name in ("goodput", "offered_rate", "achieved_rate")
    }
    counts = {
        "judged": 0,
        "shed": 0,
        "failed": 9,
        "unfinished": 0,
        "is_balanced": True,
        "is_late": False,
        "is_dead": True,
    }
    dead = msgspec.convert(
        {"number": 1, "rate": 1.0, "purpose": "raise", "reason": "the first rate", "folder": "x"} | nothing | counts,
        Step,
    )
    for name, steps in (("none", []), ("dead", [dead])):
        (tmp_path / name).mkdir()
        write_json(
            tmp_path / name / "ladder.json",
            make_ladder("http://127.0.0.1:1/v1", "small", "requests/s", rules, {}, steps),
        )

    unfinished, stopped = (written(tmp_path / name) for name in ("none", "dead"))

    assert "This ladder is not finished." in unfinished.text
    assert "The server stopped answering at 1 requests/s." in stopped.text


def some_comparison(pairs: int, *, measured: int) -> Comparison:
    a, b = (Setting(name=name, url=f"http://{name}.test/v1", model="small", overrides=[]) for name in ("old", "new"))
    rng, runs = random.Random(5), list[Run]()
    while (following := choose_next_run(runs, pairs)) and len(runs) < 2 * measured:
        faster = 0.8 if following.side == "b" else 1.0
        figures = {
            "TTFT": 0.2 * faster * rng.uniform(0.98, 1.02),
            "TPOT": 0.02 * rng.uniform(0.9, 1.1),
            "throughput": 900 * rng.uniform(0.98, 1.02),
            "goodput": None,
        }
        facts = {
            "pair": following.pair,
            "side": following.side,
            "folder": "x",
            "figures": figures,
            "requests": 100,
            "finished": 99,
        }
        runs.append(msgspec.convert(facts | {"is_balanced": True, "is_late": False}, Run))
    return make_comparison(a, b, pairs, {}, runs)


def test_a_comparisons_page_has_ratios_with_intervals_and_every_run(tmp_path: Path) -> None:
    comparison = some_comparison(10, measured=10)
    write_json(tmp_path / "compare.json", comparison)

    page = written(tmp_path)

    ratio = comparison.rows[0].ratio
    assert page.row("TTFT")[3:5] == [f"{ratio.value:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"]
    assert page.row("TTFT")[-1] == "different"
    assert page.row("goodput")[3] == number_formats.NONE
    assert sum(row[0].startswith("pair ") for row in page.cells) == 20
    assert page.alerts == 0


@pytest.mark.parametrize("measured", [0, MIN_PAIRS - 1])
def test_a_comparison_with_too_few_pairs_shows_no_interval(tmp_path: Path, measured: int) -> None:
    write_json(tmp_path / "compare.json", some_comparison(10, measured=measured))

    page = written(tmp_path)

    assert "This comparison is not finished." in page.text
    assert page.row("TTFT")[-1] == "not known"
