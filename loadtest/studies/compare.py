"""`compare`: the same load against two servers, or in two settings against one, run by run in turn; which differences
are more than chance.

What to run, and the ratios, are in `sides.py`. compare.json is written after every run, so that the same command goes
on where it was stopped.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock_loadtest.client.destination import find_destination
from penstock_loadtest.client.target import Target
from penstock_loadtest.results.intervals import MIN_PAIRS
from penstock_loadtest.results.records import write_json
from penstock_loadtest.results.sides import (
    Comparison,
    NextRun,
    Run,
    Setting,
    Side,
    choose_next_run,
    choose_seed,
    keep_whole_pairs,
    make_comparison,
    pick_figures,
)
from penstock_loadtest.scenario import Scenario, load_scenario
from penstock_loadtest.studies import campaign
from penstock_loadtest.studies.measure import EXIT_INTERRUPTED, Measurement

SHOWN = {"throughput": ("tokens/s", 1.0), "goodput": ("goodput, %", 100.0)}
"""What a figure is called in the table and multiplied with; the others are milliseconds."""


class Contender(NamedTuple):
    """One side, ready to be run."""

    setting: Setting
    scenario: Scenario
    target: Target


def compare(
    scenario: Annotated[
        Path | None, typer.Argument(help="Scenario: a YAML file, or the name of an example. None: the defaults.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Server A, as http://HOST:PORT/v1; else OPENAI_BASE_URL.")] = None,
    url_b: Annotated[str | None, typer.Option(help="Server B; else the same as A.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for compare.json and the runs; one that was begun is gone on with.")
    ] = Path("loadtest-results/compare"),
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the scenario for both, as in arrivals.rate=4; may be repeated.",
        ),
    ] = None,
    set_a: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting for A alone; may be repeated.")
    ] = None,
    set_b: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting for B alone; may be repeated.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model at A; else the first that the server lists.")] = None,
    model_b: Annotated[str | None, typer.Option(help="Model at B; else as at A.")] = None,
    name_a: Annotated[str, typer.Option(help="What A is called.")] = "A",
    name_b: Annotated[str, typer.Option(help="What B is called.")] = "B",
    pairs: Annotated[int, typer.Option(min=1, help=f"Runs of each side; an interval needs at least {MIN_PAIRS}.")] = 10,
    run_s: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds of a run, warm-up aside; else what the scenario says.")
    ] = None,
    settle_s: Annotated[float, typer.Option(min=0.0, help="Seconds of rest between runs.")] = 2.0,
) -> None:
    """Measure two servers or settings in turn, and say which differences are real. Ctrl-C keeps what there is; the same
    command goes on from there."""
    console = Console()
    a = _contender(scenario, name_a, url, model, [*(settings or []), *(set_a or [])], run_s)
    b = _contender(scenario, name_b, url_b or url, model_b or model, [*(settings or []), *(set_b or [])], run_s)
    found = run_comparison(a, b, out, pairs=pairs, settle_s=settle_s, console=console)
    console.print(make_comparison_table(found))
    campaign.print_sentences(console, [*found.sentences, str(_report(out))])
    if not found.is_complete:
        raise typer.Exit(EXIT_INTERRUPTED)


def _contender(
    path: Path | None, name: str, url: str | None, model: str | None, overrides: list[str], run_s: float | None
) -> Contender:
    scenario = load_scenario(path, overrides)
    if run_s is not None:
        scenario = msgspec.structs.replace(scenario, duration_s=scenario.warmup_s + run_s, requests=None)
    target = find_destination(scenario, url, model, os.environ)
    return Contender(Setting(name=name, url=target.url, model=target.model, overrides=overrides), scenario, target)


def run_comparison(
    a: Contender,
    b: Contender,
    out: Path,
    *,
    pairs: int,
    settle_s: float,
    console: Console | None,
    run: campaign.Run = campaign.measure_without_plots,
) -> Comparison:
    """Begin a comparison, or go on with the one in the folder `out`; Ctrl-C ends it early. Leaves compare.json.

    Raises ScenarioInvalid when the folder's comparison is another one; it may have other `pairs`.
    """
    settings, path = (
        {
            f"scenario_{side}": campaign.encode_settings(each.scenario)["scenario"]
            for side, each in (("a", a), ("b", b))
        },
        out / "compare.json",
    )
    contenders: dict[Side, Contender] = {"a": a, "b": b}

    def so_far(runs: Sequence[Run]) -> Comparison:
        return make_comparison(a.setting, b.setting, pairs, settings, runs)

    def make(following: NextRun) -> Run | None:
        side = contenders[following.side]
        seed = choose_seed(side.scenario.seed, following, same_server=a.target.url == b.target.url)
        folder = campaign.new_folder(out, f"pair-{following.pair:02}-{following.side}")
        scenario = msgspec.structs.replace(
            side.scenario, seed=seed, repeat=0, name=f"{side.scenario.name}, {side.setting.name}, pair {following.pair}"
        )
        measured = run(scenario, side.target, folder, console)
        return None if measured.interrupted else make_run(following, folder.name, measured)

    runs = _begun(path, so_far([]))
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, so_far(runs))
    with suppress(KeyboardInterrupt):
        alternate(
            runs,
            pairs,
            make=make,
            settle=lambda: time.sleep(settle_s),
            save=lambda made: write_json(path, so_far(made)),
        )
    return so_far(runs)


def alternate(
    runs: list[Run],
    pairs: int,
    *,
    make: Callable[[NextRun], Run | None],
    settle: Callable[[], None],
    save: Callable[[Sequence[Run]], None],
) -> None:
    """Add runs until all pairs are there, or `make` was interrupted and gives None."""
    while (following := choose_next_run(runs, pairs)) is not None:
        if runs:
            settle()
        run = make(following)
        if run is None:
            return
        runs.append(run)
        save(runs)


def make_run(made: NextRun, folder: str, measured: Measurement) -> Run:
    summary = measured.summary
    return Run(
        pair=made.pair,
        side=made.side,
        folder=folder,
        figures=pick_figures(summary),
        requests=summary.requests,
        finished=summary.outcomes.finished,
        is_balanced=measured.ledger.is_balanced,
        is_late=summary.lateness.is_late,
    )


def _report(out: Path) -> Path:
    """report.html, or the folder where plots can't be drawn."""
    if find_spec("matplotlib") is None:
        return out
    # matplotlib may be absent, and takes memory that the runs should not carry
    from penstock_loadtest.report.comparison import write_comparison_report  # noqa: PLC0415 (matplotlib is optional)

    return write_comparison_report(out)


def _begun(path: Path, wanted: Comparison) -> list[Run]:
    """The runs that are there already."""
    found = campaign.read_if_there(path, Comparison)
    if found is None:
        return []
    here, there = ({"a": _identity(each.a), "b": _identity(each.b), **each.settings} for each in (wanted, found))
    campaign.must_be_same(path, there, here)
    return keep_whole_pairs(found.runs)


def _identity(setting: Setting) -> dict[str, object]:
    return {"url": setting.url, "model": setting.model}


def make_comparison_table(comparison: Comparison) -> Table:
    """Medians of the runs, and the ratio of the pairs with its interval."""
    a, b = escape(comparison.a.name), escape(comparison.b.name)
    table = Table(title=f"{b} against {a}")
    for name in ("", a, b, f"{b} / {a}", "95 % interval", "verdict"):
        table.add_column(name, justify="left" if name in ("", "verdict") else "right")
    for row in comparison.rows:
        ratio = row.ratio
        interval = "-" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
        verdict = (
            "different" if row.is_distinguishable else ("too few pairs" if ratio.low is None else "not told apart")
        )
        value = "-" if ratio.value is None else f"{ratio.value:.3f}"
        name, scale = SHOWN.get(row.figure, (f"{row.figure}, ms", 1e3))
        table.add_row(
            name,
            *("-" if side is None else f"{scale * side:,.2f}" for side in (row.a, row.b)),
            value,
            interval,
            verdict,
        )
    return table
