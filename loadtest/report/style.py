"""The style of every figure: one palette with a light and a dark value a colour, drawn once, saved as PNG (light) and
as SVG whose colours follow the page.

Colours differ in lightness too, so that they survive a grey print and the common kinds of colour blindness.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox
from matplotlib.typing import RcKeyType


class Colour(NamedTuple):
    name: str  # of the page's CSS variable
    light: str  # drawn with it; every colour has one of its own, by which the SVG's are found again
    dark: str


INK = Colour("ink", "#1d232a", "#e6e9ec")
MUTED = Colour("muted", "#59636e", "#9aa5b1")
GRID = Colour("grid", "#e4e8ec", "#2b323a")
PAPER = Colour("paper", "#fefefe", "#161b21")
BLUE = Colour("blue", "#1f6fb5", "#62aef0")
SKY = Colour("sky", "#86bce4", "#3d76a6")
NAVY = Colour("navy", "#0b3660", "#c4e1fb")
GREEN = Colour("green", "#16806a", "#4cc7a8")
ORANGE = Colour("orange", "#e08e0b", "#eeb04a")
RED = Colour("red", "#b93a1e", "#ff8766")
PURPLE = Colour("purple", "#81519e", "#c598e3")
GREY = Colour("grey", "#a3acb5", "#6a7580")
PALETTE = (INK, MUTED, GRID, PAPER, BLUE, SKY, NAVY, GREEN, ORANGE, RED, PURPLE, GREY)
LINES = (BLUE, ORANGE, GREEN, PURPLE, RED, NAVY, GREY, SKY)
"""Colours of series that have none of their own, in order; they repeat."""

SIZE_IN = (6.0, 3.1)  # half the report's width; fonts are for this size
_TITLE_IN = 0.3  # above a PNG; in a page the title is a heading
_RC: dict[RcKeyType, Any] = {
    "axes.edgecolor": GREY.light,
    "axes.facecolor": PAPER.light,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelcolor": MUTED.light,
    "axes.labelsize": 8,
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.unicode_minus": True,
    "figure.facecolor": PAPER.light,
    "font.family": ["DejaVu Sans"],
    "font.size": 8,
    "grid.color": GRID.light,
    "grid.linewidth": 0.8,
    "legend.borderaxespad": 0.0,
    "legend.columnspacing": 1.2,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.labelcolor": MUTED.light,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "savefig.facecolor": PAPER.light,
    "svg.fonttype": "none",
    "text.color": INK.light,
    "text.parse_math": False,  # names of tenants may have dollar signs
    "xtick.color": GREY.light,
    "xtick.labelcolor": MUTED.light,
    "xtick.major.size": 3,
    "ytick.color": GREY.light,
    "ytick.labelcolor": MUTED.light,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}


class Picture(NamedTuple):
    """A figure as it stands in a page."""

    title: str
    caption: str
    alt: str
    svg: Markup


class Plot(NamedTuple):
    """A figure with its title, caption and description."""

    name: str  # of its file, without .png
    title: str  # stands above it: in the page as a heading
    figure: Figure
    caption: str  # how to read it
    alt: str  # what it shows, for those who can't see it


@contextmanager
def drawing() -> Iterator[None]:
    """A context in which figures have the house style; nothing outside is changed."""
    with mpl.rc_context(_RC):
        yield


def new_axes(*, height_in: float = SIZE_IN[1]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(SIZE_IN[0], height_in))
    return figure, figure.add_subplot()


def add_legend(drawn: Axes) -> None:
    """Put the legend in a row above the axes."""
    _, labels = drawn.get_legend_handles_labels()
    drawn.legend(loc="lower left", bbox_to_anchor=(0.0, 1.02), ncols=len(labels))


def set_seconds_axis(drawn: Axes, low: float, high: float, *, is_x: bool = False) -> None:
    """Label an axis of durations with their units; logarithmic where `low` to `high` spans more than 30 times (both
    above 0)."""
    axis = drawn.xaxis if is_x else drawn.yaxis
    if low > 0 and high / low > 30:
        (drawn.set_xscale if is_x else drawn.set_yscale)("log")
        axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 2000 else (1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
    else:
        (drawn.set_xlim if is_x else drawn.set_ylim)(0, high * 1.06 or 1.0)
        axis.set_major_locator(make_tick_locator())
    axis.set_major_formatter(EngFormatter(unit="s", sep="\N{NO-BREAK SPACE}"))


def set_counts_axis(drawn: Axes, *, is_whole: bool = False) -> None:
    highest = drawn.dataLim.ymax  # infinite where nothing was drawn
    drawn.set_ylim(0, highest * 1.06 if 0 < highest < math.inf else 1.0)
    drawn.yaxis.set_major_locator(make_tick_locator(is_whole=is_whole))
    drawn.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def make_tick_locator(parts: int = 5, *, is_whole: bool = False) -> MaxNLocator:
    """A locator that puts ticks at multiples of 1, 2 or 5."""
    return MaxNLocator(parts, steps=[1, 2, 5, 10], integer=is_whole)


def save_plot(plot: Plot, folder: Path) -> Picture:
    """Write the PNG, with its title; returns what a page needs."""
    with drawing():
        # once for both, and not again at every drawing as a figure's own engine would
        ConstrainedLayoutEngine().execute(plot.figure)
        picture = Picture(plot.title, plot.caption, plot.alt, _svg(plot))
        (folder / f"{plot.name}.png").write_bytes(_png(plot))
    return picture


def _png(plot: Plot) -> bytes:
    """The figure under its title, which stands above the figure's own edge."""
    width_in, height_in = plot.figure.get_size_inches()
    plot.figure.text(0.012, 1.0 + 0.05 / height_in, plot.title, ha="left", va="bottom", fontsize=10, fontweight="bold")
    data = BytesIO()
    bounds = Bbox([[0, 0], [width_in, height_in + _TITLE_IN]])
    plot.figure.savefig(data, format="png", dpi=160, bbox_inches=bounds, metadata={"Software": None})
    return data.getvalue()


def _svg(plot: Plot) -> Markup:
    """The figure as an <svg> element to stand in a page: colours are the page's CSS variables, text is text in the
    page's font, ids are the figure's own."""
    text = StringIO()
    with mpl.rc_context({"svg.hashsalt": plot.name}):
        plot.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->\s*", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", drawn, count=1)
    drawn = drawn.replace("<svg ", '<svg aria-hidden="true" ', 1)
    drawn = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", drawn)
    for colour in PALETTE:
        drawn = drawn.replace(colour.light, f"var(--{colour.name})")
    return Markup(_rename_ids(drawn, plot.name))


def _rename_ids(drawn: str, name: str) -> str:
    """The SVG without the ids that nothing refers to; the others begin with the figure's name, so that figures of one
    page don't share any."""
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', drawn))
    drawn = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", drawn)
    return re.sub(r'(url\(#|href="#)([^")]+)', rf"\g<1>{name}-\g<2>", drawn)
