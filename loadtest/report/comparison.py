"""report.html of a comparison: the ratio of every figure with its interval, and the runs it rests on."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from penstock_loadtest.report.folder import read_json
from penstock_loadtest.report.number_formats import NONE, format_duration, format_number, format_share
from penstock_loadtest.report.parts import Banner, Card, Column, PageHeader, Rows, Table
from penstock_loadtest.report.render import render_page
from penstock_loadtest.report.style import (
    BLUE,
    GREY,
    INK,
    MUTED,
    NAVY,
    ORANGE,
    PAPER,
    Picture,
    Plot,
    add_legend,
    drawing,
    make_tick_locator,
    new_axes,
    save_plot,
    set_seconds_axis,
)
from penstock_loadtest.results.sides import Comparison, Row, Run

_OTHER_UNITS = {
    "throughput": lambda value: f"{format_number(value)} tokens/s",
    "goodput": format_share,
}  # every other figure is a time


def write_comparison_report(folder: Path) -> Path:
    """Write plots and report.html from compare.json, however many pairs are there. Raises RecordsInvalid."""
    comparison = read_json(folder / "compare.json", Comparison)
    pictures, path = folder / "plots", folder / "report.html"
    pictures.mkdir(exist_ok=True)
    with drawing():
        drawn = [save_plot(plot, pictures) for plot in draw_comparison_plots(comparison)]
    path.write_text(render_comparison(comparison, drawn), encoding="utf-8")
    return path


def draw_comparison_plots(comparison: Comparison) -> list[Plot]:
    rows = [row for row in comparison.rows if row.ratio.value is not None]
    if not rows:
        return []
    return [
        _ratios(comparison, rows),
        *(_runs(comparison, row.figure) for row in rows if row.figure not in _OTHER_UNITS),
    ]


def render_comparison(comparison: Comparison, pictures: Sequence[Picture]) -> str:
    """The page as HTML."""
    a, b = comparison.a, comparison.b
    title = f"{b.name} against {a.name}"
    sides = " · ".join(" ".join([f"{side.name}: {side.model} at {side.url}", *side.overrides]) for side in (a, b))
    pairs = len({run.pair for run in comparison.runs if run.side == "b"})
    top = PageHeader(
        title=title,
        kicker="Load test: comparison",
        heading=title,
        line=f"{pairs} pairs of runs, in turn · {sides}",
        banners=_list_banners(comparison),
        cards=[_card(row, title) for row in comparison.rows if row.ratio.value is not None],
    )
    sections = {
        "pictures": pictures,
        "ratios": _ratio_table(comparison),
        "sentences": comparison.sentences,
        "runs": _run_table(comparison),
    }
    return render_page("comparison.html.j2", top, sections)


def _list_banners(comparison: Comparison) -> list[Banner]:
    banners = []
    if not comparison.is_complete:
        banners.append(Banner("This comparison is not finished.", "The same command goes on with it."))
    if any(run.is_late for run in comparison.runs):
        banners.append(Banner("The tester was late", "in some of the runs: they measured it along with the servers."))
    return banners


def _card(row: Row, title: str) -> Card:
    return Card(f"{row.figure}, {title}", _ratio(row.ratio.value), f"{_interval(row)}: {_verdict(row)}")


def _ratio_table(comparison: Comparison) -> Table:
    columns = [
        Column("", is_text=True),
        *map(Column, (comparison.a.name, comparison.b.name, "ratio", "95 % interval", "pairs")),
        Column("verdict", is_text=True),
    ]
    rows = [
        [
            row.figure,
            _value(row.figure, row.a),
            _value(row.figure, row.b),
            _ratio(row.ratio.value),
            _interval(row),
            str(row.ratio.pairs),
            _verdict(row),
        ]
        for row in comparison.rows
    ]
    note = (
        "Medians of the runs. Ratios are of the two runs of a pair; their interval holds the median ratio with at "
        "least 95 %."
    )
    return Table(f"{comparison.b.name} / {comparison.a.name}", columns, [Rows("", rows)], note)


def _run_table(comparison: Comparison) -> Table:
    names = [row.figure for row in comparison.rows]
    columns = [
        Column("run", is_text=True),
        *map(Column, names),
        Column("requests"),
        Column("finished"),
        Column("flaws", is_text=True),
    ]
    rows = [_run_row(run, comparison, names) for run in comparison.runs]
    return Table("In the order they were made", columns, [Rows("", rows)])


def _run_row(run: Run, comparison: Comparison, names: Sequence[str]) -> list[str]:
    side = comparison.a if run.side == "a" else comparison.b
    flaws = [text for text, is_so in (("sent late", run.is_late), ("ledger off", not run.is_balanced)) if is_so]
    figures = [_value(name, run.figures.get(name)) for name in names]
    return [
        f"pair {run.pair}, {side.name}",
        *figures,
        f"{run.requests:,}",
        f"{run.finished:,}",
        ", ".join(flaws) or NONE,
    ]


def _ratios(comparison: Comparison, rows: Sequence[Row]) -> Plot:
    figure, drawn = new_axes()
    places = np.arange(len(rows))[::-1]
    drawn.axvline(1.0, color=MUTED.light, linewidth=1.1)
    for place, row in zip(places, rows, strict=True):
        colour = NAVY if row.is_distinguishable else GREY
        if row.ratio.low is not None and row.ratio.high is not None:
            drawn.hlines(place, row.ratio.low, row.ratio.high, color=colour.light, linewidth=3)
        drawn.plot(
            [row.ratio.value or np.nan], [place], "o", color=colour.light, markersize=7, markeredgecolor=PAPER.light
        )
    drawn.set_yticks(places, [row.figure for row in rows])
    drawn.set_ylim(-0.6, len(rows) - 0.4)
    drawn.xaxis.set_major_locator(make_tick_locator(6))
    drawn.set_xlabel(f"{comparison.b.name} / {comparison.a.name}")
    drawn.grid(visible=True, axis="x")
    drawn.grid(visible=False, axis="y")
    drawn.tick_params(axis="y", labelcolor=INK.light)
    alt = "; ".join(f"{row.figure} {_ratio(row.ratio.value)} ({_interval(row)})" for row in rows)
    caption = "Median ratio of the pairs with its 95 % interval. Grey: the interval includes 1."
    return Plot(
        "compare_ratios", "Ratios", figure, caption, f"Ratios of {comparison.b.name} to {comparison.a.name}: {alt}."
    )


def _runs(comparison: Comparison, name: str) -> Plot:
    figure, drawn = new_axes()
    values_of_all = []
    for side, setting, colour, marker in (("a", comparison.a, ORANGE, "o"), ("b", comparison.b, BLUE, "D")):
        points = [
            (run.pair, value)
            for run in comparison.runs
            if run.side == side and (value := run.figures.get(name)) is not None
        ]
        values_of_all += [value for _, value in points]
        drawn.plot(
            [pair for pair, _ in points],
            [value for _, value in points],
            marker=marker,
            color=colour.light,
            linewidth=1.0,
            markersize=4.5,
            label=setting.name,
        )
    drawn.set_xlabel("pair")
    drawn.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    drawn.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    set_seconds_axis(drawn, min(values_of_all), max(values_of_all))
    add_legend(drawn)
    return Plot(
        f"compare_{name.lower().replace(' ', '_').replace('-', '_')}",
        f"{name}, run by run",
        figure,
        "The median of each run.",
        f"{name} of {len(values_of_all)} runs, {format_duration(min(values_of_all))} to "
        f"{format_duration(max(values_of_all))}.",
    )


def _value(name: str, value: float | None) -> str:
    return _OTHER_UNITS.get(name, format_duration)(value)


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _interval(row: Row) -> str:
    return (
        "too few pairs for an interval"
        if row.ratio.low is None
        else f"{_ratio(row.ratio.low)} to {_ratio(row.ratio.high)}"
    )


def _verdict(row: Row) -> str:
    if row.ratio.low is None:
        return "not known"
    return "different" if row.is_distinguishable else "not distinguishable"
