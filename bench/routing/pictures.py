"""The contest drawn: the part of all requests in target over the rate, a panel for each load and size, and a page with
it and every table."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from bench.routing.contest import Contest
from bench.routing.rivals import POLICIES
from bench.routing.summary import OURS, describe, format_cell, format_verdicts, judge
from bench.support.tables import make_page_table
from penstock_loadtest.report.parts import PageHeader
from penstock_loadtest.report.render import render_page
from penstock_loadtest.report.style import (
    BLUE,
    GREEN,
    GREY,
    NAVY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Colour,
    Plot,
    drawing,
    save_plot,
)

COLOURS: Final[dict[str, Colour]] = dict(
    zip(POLICIES, (GREY, SKY, NAVY, ORANGE, RED, GREEN, PURPLE, BLUE), strict=True)
)
NAME: Final = "routing_contest"
PANEL_IN: Final = (2.4, 2.0)


def write_page(contest: Contest, uneven: Mapping[str, bool], folder: Path) -> Path:
    """Write routing_contest.png and routing_contest.html into the folder; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    with drawing():
        picture = save_plot(draw_contest(contest), folder)
    tables = [format_verdicts(contest, uneven), *(format_cell(*each) for each in contest.items())]
    title = "Routing policies, simulated"
    line = "The same requests, replicas and queue under each policy; assumed step times. ± is a 95 % interval."
    sections = {"pictures": [picture], "tables": [make_page_table(*table) for table in tables]}
    path = folder / f"{NAME}.html"
    header = PageHeader(title, "Penstock", title, line, [], [])
    path.write_text(render_page("plots.html.j2", header, sections), encoding="utf-8")
    return path


def draw_contest(contest: Contest) -> Plot:
    """A row of panels for each size, a column for each load."""
    loads = list(dict.fromkeys(cell.load for cell in contest))
    sizes = list(dict.fromkeys(cell.replicas for cell in contest))
    figure = Figure(figsize=(PANEL_IN[0] * max(2, len(loads)), PANEL_IN[1] * len(sizes) + 0.4))
    panels = figure.subplots(len(sizes), len(loads), sharex=True, sharey=True, squeeze=False)
    for row, replicas in enumerate(sizes):
        for column, load in enumerate(loads):
            cells = sorted(cell for cell in contest if (cell.load, cell.replicas) == (load, replicas))
            panel = panels[row][column]
            for name in contest[cells[0]] if cells else ():
                parts = [fmean(each.goodput / each.rate for each in contest[cell][name]) for cell in cells]
                width = 2.4 if name == OURS else 1.2
                rates = [cell.part for cell in cells]
                panel.plot(rates, parts, "o-", color=COLOURS[name].light, linewidth=width, markersize=3, label=name)
            panel.set_title(f"{load}, {replicas}", fontsize=8)
            panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    names = list(next(iter(contest.values())))
    handles = panels[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(names), fontsize=7)
    figure.supxlabel("rate, as a part of the capacity with one endless cache", fontsize=8)
    caption = "Requests in target as a part of all. Each panel: load, number of replicas."
    alt = "; ".join(f"{cell.label}: {describe(judge(each), is_uneven=False)}" for cell, each in contest.items())
    return Plot(NAME, "Part of all requests in target", figure, caption, alt)
