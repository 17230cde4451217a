"""report.html of a ladder: goodput and latencies against the rate, with the knee marked, and a row a step."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from penstock_loadtest.report.folder import read_json
from penstock_loadtest.report.number_formats import format_duration, format_number, format_share
from penstock_loadtest.report.parts import Banner, Card, Column, PageHeader, Rows, Table
from penstock_loadtest.report.render import render_page
from penstock_loadtest.report.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    NAVY,
    PAPER,
    RED,
    SKY,
    Colour,
    Picture,
    Plot,
    add_legend,
    drawing,
    new_axes,
    save_plot,
    set_counts_axis,
    set_seconds_axis,
)
from penstock_loadtest.results.columns import Floats
from penstock_loadtest.results.knee import Ladder, Step, is_held


def write_ladder_report(folder: Path) -> Path:
    """Write plots and report.html from ladder.json, however far the ladder got. Raises RecordsInvalid."""
    ladder = read_json(folder / "ladder.json", Ladder)
    pictures, path = folder / "plots", folder / "report.html"
    pictures.mkdir(exist_ok=True)
    with drawing():
        drawn = [save_plot(plot, pictures) for plot in draw_ladder_plots(ladder)]
    path.write_text(render_ladder(ladder, drawn), encoding="utf-8")
    return path


def draw_ladder_plots(ladder: Ladder) -> list[Plot]:
    """The plots of a ladder: steps in the order of their rates; those that held are filled dots, the others hollow."""
    steps = sorted(ladder.steps, key=lambda step: (step.rate, step.number))
    if not steps:
        return []
    plots = [_goodput(ladder, steps), _rates(ladder, steps)]
    for name, title, figures in (
        (
            "ladder_ttft",
            "TTFT",
            [
                ("p50", SKY, _column(steps, lambda step: step.ttft_p50_s)),
                ("p99", NAVY, _column(steps, lambda step: step.ttft_p99_s)),
            ],
        ),
        (
            "ladder_tpot",
            "TPOT",
            [
                ("p50", SKY, _column(steps, lambda step: step.tpot_p50_s)),
                ("p99", NAVY, _column(steps, lambda step: step.tpot_p99_s)),
            ],
        ),
    ):
        if not np.isnan(figures[0][2]).all():
            plots.append(_latencies(name, title, ladder, steps, figures))
    return plots


def render_ladder(ladder: Ladder, pictures: Sequence[Picture]) -> str:
    """The page as HTML."""
    title = f"Ladder against {ladder.model}"
    line = f"{len(ladder.steps)} steps · {ladder.url}"
    top = PageHeader(title, "Load test", title, line, _list_banners(ladder), _list_cards(ladder))
    return render_page("ladder.html.j2", top, {"pictures": pictures, "steps": _step_table(ladder)})


def _list_banners(ladder: Ladder) -> list[Banner]:
    banners = []
    late = [step.number for step in ladder.steps if step.is_late]
    if not ladder.is_complete:
        banners.append(Banner("This ladder is not finished.", "The same command goes on with it."))
    if late:
        banners.append(
            Banner(
                "The tester was late",
                f"in step {', '.join(map(str, late))}: its figures measure the tester along with the server.",
            )
        )
    if any(not step.is_balanced for step in ladder.steps):
        numbers = ", ".join(str(step.number) for step in ladder.steps if not step.is_balanced)
        banners.append(Banner("The ledger does not balance", f"in step {numbers}."))
    return banners


def _list_cards(ladder: Ladder) -> list[Card]:
    held = [step for step in ladder.steps if step.rate == ladder.knee]
    best = held[-1] if held else None
    knee = Card(
        "Knee",
        f"{format_number(ladder.knee)} {ladder.unit}" if ladder.knee is not None else "none",
        ladder.verdict,
        is_bad=ladder.knee is None,
    )
    if best is None:
        return [knee]
    return [
        knee,
        Card(
            "Goodput there",
            format_share(best.goodput),
            f"{format_number(best.goodput_per_s)} good requests/s; at least {format_share(ladder.rules.share)} is held",
        ),
        Card(
            "TTFT there, median and p99",
            format_duration(best.ttft_p50_s),
            "time to first token",
            second=f"p99 {format_duration(best.ttft_p99_s)}",
        ),
        Card(
            "TPOT there, median and p99",
            format_duration(best.tpot_p50_s),
            "time per output token",
            second=f"p99 {format_duration(best.tpot_p99_s)}",
        ),
    ]


def _step_table(ladder: Ladder) -> Table:
    titles = (
        "rate",
        "goodput",
        "good/s",
        "offered/s",
        "finished/s",
        "tokens/s",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "shed",
        "failed",
    )
    columns = [Column("step", is_text=True), *map(Column, titles), Column("why", is_text=True)]
    steps = sorted(ladder.steps, key=lambda step: (step.rate, step.number))
    return Table(f"Steps by {ladder.unit}", columns, [Rows("", [_row(step, ladder) for step in steps])])


def _row(step: Step, ladder: Ladder) -> list[str]:
    held = "held" if is_held(step, ladder.rules) else "not held"
    flaws = [
        text
        for text, is_so in (
            ("sent late", step.is_late),
            ("ledger off", not step.is_balanced),
            ("server gone", step.is_dead),
        )
        if is_so
    ]
    rates = [
        format_number(value)
        for value in (step.goodput_per_s, step.offered_rate, step.achieved_rate, step.output_tokens_per_s)
    ]
    latencies = [
        format_duration(value) for value in (step.ttft_p50_s, step.ttft_p99_s, step.tpot_p50_s, step.tpot_p99_s)
    ]
    counts = [f"{step.shed:,}", f"{step.failed + step.unfinished:,}"]
    return [
        f"{step.number}, {held}",
        format_number(step.rate),
        format_share(step.goodput),
        *rates,
        *latencies,
        *counts,
        "; ".join([f"{step.purpose}: {step.reason}", *flaws]),
    ]


def _goodput(ladder: Ladder, steps: Sequence[Step]) -> Plot:
    figure, drawn = new_axes()
    _curve(drawn, steps, _column(steps, lambda step: step.goodput), ladder, GREEN, "goodput")
    drawn.axhline(
        ladder.rules.share,
        color=RED.light,
        linewidth=1.1,
        linestyle=(0, (4, 3)),
        label=f"{format_share(ladder.rules.share)} wanted",
        zorder=1.5,
    )
    drawn.set_ylim(0, 1.05)
    drawn.yaxis.set_major_formatter(PercentFormatter(1.0))
    _rate_axis(drawn, ladder, steps)
    add_legend(drawn)
    alt = "; ".join(f"{format_share(step.goodput)} at {format_number(step.rate)}" for step in steps)
    return Plot(
        "ladder_goodput",
        "Goodput",
        figure,
        "Full dots: the goodput was held. The knee is the highest rate that holds.",
        f"Goodput by {ladder.unit}: {alt}.",
    )


def _rates(ladder: Ladder, steps: Sequence[Step]) -> Plot:
    figure, drawn = new_axes()
    offered = _column(steps, lambda step: step.offered_rate)
    drawn.plot(
        [step.rate for step in steps], offered, color=MUTED.light, linewidth=1.1, linestyle=(0, (1, 2)), label="offered"
    )
    _curve(drawn, steps, _column(steps, lambda step: step.achieved_rate), ladder, BLUE, "finished")
    _curve(drawn, steps, _column(steps, lambda step: step.goodput_per_s), ladder, GREEN, "good")
    drawn.set_ylabel("requests/s")
    set_counts_axis(drawn)
    _rate_axis(drawn, ladder, steps)
    add_legend(drawn)
    alt = "; ".join(
        f"{format_number(step.achieved_rate)} finished and {format_number(step.goodput_per_s)} good at "
        f"{format_number(step.rate)}"
        for step in steps
    )
    return Plot(
        "ladder_rates",
        "Finished and good requests",
        figure,
        "What was done of what was offered.",
        f"Requests a second by {ladder.unit}: {alt}.",
    )


def _latencies(
    name: str, title: str, ladder: Ladder, steps: Sequence[Step], figures: list[tuple[str, Colour, Floats]]
) -> Plot:
    figure, drawn = new_axes()
    for label, colour, values in figures:
        _curve(drawn, steps, values, ladder, colour, label)
    values = np.concatenate([values for _, _, values in figures])
    set_seconds_axis(drawn, float(np.nanmin(values)), float(np.nanmax(values)))
    _rate_axis(drawn, ladder, steps)
    add_legend(drawn)
    alt = "; ".join(
        f"{format_duration(p50)} and {format_duration(p99)} at {format_number(step.rate)}"
        for step, p50, p99 in zip(steps, figures[0][2], figures[1][2], strict=True)
    )
    return Plot(name, title, figure, "Median and p99 of each step.", f"{title} p50 and p99 by {ladder.unit}: {alt}.")


def _curve(drawn: Axes, steps: Sequence[Step], values: Floats, ladder: Ladder, colour: Colour, label: str) -> None:
    rates = np.array([step.rate for step in steps])
    held = np.array([is_held(step, ladder.rules) for step in steps])
    drawn.plot(rates, values, color=colour.light, linewidth=1.4, label=label)
    drawn.plot(rates[held], values[held], "o", color=colour.light, markersize=5, clip_on=False)
    drawn.plot(
        rates[~held], values[~held], "o", color=colour.light, markerfacecolor=PAPER.light, markersize=5, clip_on=False
    )


def _rate_axis(drawn: Axes, ladder: Ladder, steps: Sequence[Step]) -> None:
    rates = [step.rate for step in steps]
    if max(rates) > 8 * min(rates):
        drawn.set_xscale("log")
        drawn.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        drawn.xaxis.set_minor_formatter(NullFormatter())
    drawn.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    drawn.set_xlabel(ladder.unit)
    if ladder.knee is not None:
        drawn.axvline(ladder.knee, color=INK.light, linewidth=1.0, zorder=1.2)
        drawn.annotate(
            f"knee {format_number(ladder.knee)}",
            (ladder.knee, 0.04),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
        )


def _column(steps: Sequence[Step], figure: Callable[[Step], float | None]) -> Floats:
    return np.array([np.nan if (value := figure(step)) is None else value for step in steps], dtype=np.float64)
