"""The bench's figures from its outcomes: means over seeds, by window and over the smooth windows together. Pure."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from bench.autoscaling.contest import NAMES, Contest, Point, Scored
from bench.autoscaling.oracle import ATTAINED
from bench.autoscaling.play import Outcome
from bench.autoscaling.replicas import bound_hours
from bench.autoscaling.runs import Windows
from bench.autoscaling.windows import BURSTS, SMOOTH, Window

BOUND_MARGIN_S = 60.0
"""Requests that come so shortly before a window's end are left out of the bound: their work may lie behind it."""


class Figures(NamedTuple):
    """An autoscaler on a window, means over seeds. ratio: hours as a multiple of the oracle's; None without one."""

    name: str
    window: str
    attained: float
    least_attained: float
    """Lowest of the seeds."""
    hours: float
    other_hours: float
    ratio: float | None
    changes_per_hour: float
    refused: float
    most: int
    bursts: dict[str, float]
    settings: dict[str, Any]

    @property
    def all_hours(self) -> float:
        """Replica-hours with the other tier's answers at their price."""
        return self.hours + self.other_hours


class Total(NamedTuple):
    """An autoscaler on all smooth windows together."""

    name: str
    attained: float
    """Part of all requests."""
    least_attained: float
    """Lowest of the windows."""
    hours: float
    ratio: float | None
    highest_ratio: float | None
    """Highest of the windows."""
    changes_per_hour: float


def collect_figures(contest: Contest, windows: Windows) -> list[Figures]:
    oracle = {each.window: _mean_hours(each.outcomes) for each in contest.scored if each.name == "oracle"}
    return [_figures(each, windows[each.window][1], oracle.get(each.window)) for each in contest.scored]


def sum_smooth(contest: Contest, windows: Windows, figures: Sequence[Figures]) -> list[Total]:
    """Totals of those who played every smooth window that was played."""
    names = list(dict.fromkeys(each.name for each in contest.scored))
    smooth = [window for window in SMOOTH if window in windows]
    found = []
    for name in names if smooth else []:
        outcomes = [
            outcome
            for each in contest.scored
            if each.name == name and each.window in smooth
            for outcome in each.outcomes
        ]
        rows = [row for row in figures if row.name == name and row.window in smooth]
        found.append(_total(name, outcomes, rows, figures, windows))
    return found


def least_hours(window: Window) -> float:
    """The relaxed bound of a window, replica-hours."""
    last_s = window.end_s - BOUND_MARGIN_S
    return bound_hours(
        [(prompt, out) for at_s, prompt, out in window.rows if window.begin_s <= at_s < last_s], ATTAINED
    )


def find_hindsight(points: Iterable[Point], attained: float = ATTAINED) -> list[Point]:
    """The cheapest setting of each autoscaler and window that had so much in target, chosen after the fact."""
    best: dict[tuple[str, str], Point] = {}
    for point in points:
        key = point.name, point.window
        if point.outcome.attained >= attained and (key not in best or point.outcome.hours < best[key].outcome.hours):
            best[key] = point
    return list(best.values())


def to_json(contest: Contest, windows: Windows) -> dict[str, Any]:
    """What autoscaling.json holds of a contest."""
    figures = collect_figures(contest, windows)
    return {
        "windows": {
            name: {
                "requests": sum(at_s >= window.begin_s for at_s, _, _ in window.rows),
                "seconds": round(window.end_s - window.begin_s, 1),
                "bound_hours": round(least_hours(window), 3),
            }
            for name, (_, window) in windows.items()
        },
        "smooth": [row._asdict() for row in sum_smooth(contest, windows, figures)],
        "rows": [row._asdict() for row in figures],
        "frontier": [_point(point) for point in contest.frontier],
        "hindsight": [_point(point) for point in find_hindsight(contest.frontier)],
    }


def _figures(each: Scored, window: Window, oracle_hours: float | None) -> Figures:
    outcomes = each.outcomes
    hours, other = _mean_hours(outcomes), fmean(outcome.other_hours for outcome in outcomes)
    bursts = {burst.name for outcome in outcomes for burst in window.bursts if burst.name in outcome.bursts}
    return Figures(
        name=each.name,
        window=each.window,
        attained=fmean(outcome.attained for outcome in outcomes),
        least_attained=min(outcome.attained for outcome in outcomes),
        hours=hours,
        other_hours=other,
        ratio=None if oracle_hours is None else (hours + other) / oracle_hours,
        changes_per_hour=fmean(outcome.changes for outcome in outcomes) / window.hours,
        refused=fmean(outcome.refused for outcome in outcomes),
        most=max(outcome.most for outcome in outcomes),
        bursts={name: fmean(outcome.bursts[name] for outcome in outcomes) for name in sorted(bursts)},
        settings=dict(each.entry.settings),
    )


def _total(
    name: str, outcomes: Sequence[Outcome], rows: Sequence[Figures], figures: Sequence[Figures], windows: Windows
) -> Total:
    oracle = [row.hours for row in figures if row.name == "oracle" and row.window in SMOOTH]
    hours = sum(row.all_hours for row in rows)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    span = sum(windows[row.window][1].hours for row in rows)
    return Total(
        name=name,
        attained=sum(outcome.in_target for outcome in outcomes) / sum(outcome.requests for outcome in outcomes),
        least_attained=min(row.attained for row in rows),
        hours=hours,
        ratio=hours / sum(oracle) if oracle else None,
        highest_ratio=max(ratios, default=None),
        changes_per_hour=sum(row.changes_per_hour * windows[row.window][1].hours for row in rows) / span,
    )


def _mean_hours(outcomes: Sequence[Outcome]) -> float:
    return fmean(outcome.hours for outcome in outcomes)


def _point(point: Point) -> dict[str, Any]:
    return {
        "name": point.name,
        "window": point.window,
        "settings": msgspec.to_builtins(point.entry.settings),
        "attained": point.outcome.attained,
        "hours": point.outcome.hours,
    }


def format_tables(contest: Contest, windows: Windows) -> list[tuple[str, list[str], list[list[str]]]]:
    """Tables as their captions, headings and cells."""
    figures = collect_figures(contest, windows)
    heads = ["", "in target", "replica-hours", "x oracle", "highest x oracle", "turns an hour"]
    totals = [
        [
            NAMES[row.name],
            _share(row.attained),
            f"{row.hours:.2f}",
            _times(row.ratio),
            _times(row.highest_ratio),
            f"{row.changes_per_hour:.1f}",
        ]
        for row in sum_smooth(contest, windows, figures)
    ]
    found = [("smooth windows together", heads, totals)] if totals else []
    for window in windows:
        rows = [_cells(row) for row in figures if row.window == window]
        bound = f"relaxed bound {least_hours(windows[window][1]):.2f} h"
        heads = ["", "in target", "replica-hours", "x oracle", "turns an hour", "most", "refused", "bursts"]
        found.append((f"{window}{' (bursts)' if window in BURSTS else ''}, {bound}", heads, rows))
    return found


def _cells(row: Figures) -> list[str]:
    other = f" + {row.other_hours:.2f}" if row.name == "ours and another tier" else ""
    return [
        NAMES[row.name],
        _share(row.attained),
        f"{row.hours:.2f}{other}",
        _times(row.ratio),
        f"{row.changes_per_hour:.1f}",
        str(row.most),
        f"{row.refused:.0f}",
        ", ".join(_share(value) for value in row.bursts.values()),
    ]


def _share(value: float) -> str:
    return f"{100 * value:.2f} %"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
