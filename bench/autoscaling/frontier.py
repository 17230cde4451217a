"""The frontier drawn: for each window the part in target over the replica-hours of every setting, as PNGs and one
page."""

from pathlib import Path
from typing import Final

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from bench.autoscaling.contest import NAMES, Contest
from bench.autoscaling.oracle import ATTAINED
from bench.autoscaling.runs import Windows
from bench.autoscaling.summary import collect_figures, format_tables, least_hours
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
    new_axes,
    save_plot,
)

COLOURS: Final[dict[str, Colour]] = {
    "ours": BLUE,
    "ours and another tier": NAVY,
    "ours and a floor": NAVY,
    "ours and order": NAVY,
    "static": GREY,
    "ray default": ORANGE,
    "ray": ORANGE,
    "keda": PURPLE,
    "hpa": SKY,
    "dynamo": GREEN,
    "oracle": RED,
}
MARKERS: Final = {"ours and another tier": "D", "ours and order": "^", "ray default": "s"}
"""What tells apart those that share a colour."""
LEAST_SHOWN: Final = 0.6


def write_frontier(contest: Contest, windows: Windows, folder: Path) -> Path:
    """Write frontier_WINDOW.png and frontier.html into the folder; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    with drawing():
        plots = [draw_frontier(contest, windows, window) for window in windows]
        pictures = [save_plot(plot, folder) for plot in plots]
    title = "Autoscalers, simulated"
    line = "Part of all requests in target over replica-hours; assumed step times, 60 s to start."
    header = PageHeader(title, "Penstock", title, line, [], [])
    path = folder / "frontier.html"
    page = render_page(
        "plots.html.j2",
        header,
        {"pictures": pictures, "tables": [make_page_table(*table) for table in format_tables(contest, windows)]},
    )
    path.write_text(page, encoding="utf-8")
    return path


def draw_frontier(contest: Contest, windows: Windows, window: str) -> Plot:
    """One window: small dots are settings with one seed, large ones what was frozen, over all seeds."""
    figure, drawn = new_axes(height_in=3.2)
    for name in NAMES:
        points = [point.outcome for point in contest.frontier if (point.name, point.window) == (name, window)]
        points.sort(key=lambda outcome: outcome.hours)
        colour = COLOURS[name].light
        hours, parts = [point.hours for point in points], [point.attained for point in points]
        drawn.plot(hours, parts, ".", color=colour, markersize=4)
    figures = [row for row in collect_figures(contest, windows) if row.window == window]
    for row in figures:
        marker, colour = MARKERS.get(row.name, "o"), COLOURS[row.name].light
        drawn.plot([row.all_hours], [row.attained], marker, color=colour, markersize=7, label=NAMES[row.name])
    drawn.axhline(ATTAINED, color=RED.light, linewidth=1.0, linestyle=(0, (4, 3)))
    drawn.axvline(least_hours(windows[window][1]), color=GREY.light, linewidth=1.0)
    drawn.set_ylim(LEAST_SHOWN, 1.01)
    drawn.set_xscale("log")
    drawn.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    drawn.xaxis.set_major_formatter(FuncFormatter(lambda hours, _: f"{hours:g}"))
    drawn.xaxis.set_minor_formatter(NullFormatter())
    drawn.set_xlabel("replica-hours")
    drawn.yaxis.set_major_formatter(PercentFormatter(1.0))
    drawn.legend(loc="lower right", ncols=2, fontsize=7)
    alt = "; ".join(f"{NAMES[row.name]} {row.attained:.1%} at {row.all_hours:.1f} hours" for row in figures)
    caption = (
        f"Large: frozen before, all seeds. Small: other settings, one seed. Dashed: {ATTAINED:.0%}. Grey line: the "
        f"relaxed bound. Parts below {LEAST_SHOWN:.0%} are not shown."
    )
    return Plot(f"frontier_{window}", window, figure, caption, alt)
