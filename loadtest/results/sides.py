"""Two sides measured in pairs: what to run next, and the ratios of the runs. Pure; `compare.py` makes the runs, and
compare.json is a Comparison.

Pairs go A B, B A, A B, ...: what drifts over the time of a measurement (heat, caches, neighbours) hits both sides
alike. Every figure is one number a run, so pairs are independent of each other and their ratios have an exact interval
(`intervals.py`), whatever the requests within a run do to each other.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from penstock_loadtest.results.intervals import Estimate, estimate_ratio
from penstock_loadtest.results.summary import Summary

Side = Literal["a", "b"]

FIGURES: dict[str, Callable[[Summary], float | None]] = {
    "TTFT": lambda summary: summary.ttft_s.p50,
    "TPOT": lambda summary: summary.tpot_s.p50,
    "inter-token": lambda summary: summary.inter_token_s.p50,
    "end to end": lambda summary: summary.e2e_s.p50,
    "throughput": lambda summary: summary.output_tokens_per_s,
    "goodput": lambda summary: summary.goodput.share,
}
"""Figures that are compared: medians in seconds, delivered tokens per second, share of requests."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One side: its server, model and overrides."""

    name: str
    url: str
    model: str
    overrides: list[str]  # of the scenario, for this side alone


class Run(msgspec.Struct, frozen=True, kw_only=True):
    pair: int  # 1, 2, 3 ...
    side: Side
    folder: str  # below the comparison's
    figures: dict[str, float | None]  # by FIGURES
    requests: int
    finished: int
    is_balanced: bool
    is_late: bool


class Row(msgspec.Struct, frozen=True, kw_only=True):
    figure: str
    a: float | None  # median of A's runs
    b: float | None
    ratio: Estimate  # b / a
    is_distinguishable: bool  # the interval of the ratio excludes 1


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The content of compare.json."""

    a: Setting
    b: Setting
    pairs: int  # wanted
    settings: dict[str, object]  # everything else that a comparison that goes on must have in common with its beginning
    runs: list[Run]
    rows: list[Row]
    is_complete: bool
    sentences: list[str]  # for people


class NextRun(NamedTuple):
    pair: int
    side: Side


def choose_next_run(runs: Sequence[Run], pairs: int) -> NextRun | None:
    """The first run that is missing, in the order A B, B A, ... Returns None if all runs are there."""
    made = {(run.pair, run.side) for run in runs}
    orders: tuple[tuple[Side, Side], ...] = (("a", "b"), ("b", "a"))
    plan = (NextRun(pair, side) for pair in range(1, pairs + 1) for side in orders[(pair - 1) % 2])
    return next((run for run in plan if run not in made), None)


def keep_whole_pairs(runs: Sequence[Run]) -> list[Run]:
    """Runs to go on with: one without its other half is made again, so that the two of a pair stay next to each other
    in time."""
    made = {(run.pair, run.side) for run in runs}
    return [run for run in runs if {(run.pair, "a"), (run.pair, "b")} <= made]


def choose_seed(seed: int, run: NextRun, *, same_server: bool) -> int:
    """The seed of a run: both sides of a pair get the same requests; on one server not the same prompts, which the
    second run would find cached."""
    return seed + 2 * (run.pair - 1) + (same_server and run.side == "b")


def pick_figures(summary: Summary) -> dict[str, float | None]:
    return {name: figure(summary) for name, figure in FIGURES.items()}


def compare_figures(runs: Sequence[Run]) -> list[Row]:
    """A row for every figure, over the whole pairs."""
    sides = {(run.pair, run.side): run for run in keep_whole_pairs(runs)}
    numbers = sorted({pair for pair, _ in sides})
    return [
        _row(name, [(sides[number, "a"].figures.get(name), sides[number, "b"].figures.get(name)) for number in numbers])
        for name in FIGURES
    ]


def _row(name: str, pairs: list[tuple[float | None, float | None]]) -> Row:
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    ratio = estimate_ratio(both)
    a, b = (
        (statistics.median(values) if values else None for values in zip(*both, strict=True)) if both else (None, None)
    )
    return Row(figure=name, a=a, b=b, ratio=ratio, is_distinguishable=ratio.is_distinguishable)


def make_comparison(a: Setting, b: Setting, pairs: int, settings: dict[str, object], runs: Sequence[Run]) -> Comparison:
    rows = compare_figures(runs)
    return Comparison(
        a=a,
        b=b,
        pairs=pairs,
        settings=settings,
        runs=list(runs),
        rows=rows,
        is_complete=choose_next_run(runs, pairs) is None,
        sentences=[*(_sentence(row, a.name, b.name) for row in rows), *_warnings(runs, pairs)],
    )


def _sentence(row: Row, a: str, b: str) -> str:
    ratio = row.ratio
    if ratio.value is None:
        return f"{row.figure}: nothing to compare."
    sentence = f"{row.figure} of {b} is {ratio.value:.3f} times that of {a}"
    if ratio.low is None or ratio.high is None:
        return f"{sentence}; {ratio.note}."
    verdict = "the difference is real" if row.is_distinguishable else "not distinguishable from 1"
    return (
        f"{sentence} (95 % interval {ratio.low:.3f} to {ratio.high:.3f}, {ratio.pairs} pairs): "
        f"{verdict}{f'; {ratio.note}' if ratio.note else ''}."
    )


def _warnings(runs: Sequence[Run], pairs: int) -> list[str]:
    warnings = []
    done = len(keep_whole_pairs(runs)) // 2
    if done < pairs:
        warnings.append(f"Not finished: {done} of {pairs} pairs.")
    late, unbalanced = sum(run.is_late for run in runs), sum(not run.is_balanced for run in runs)
    if late:
        warnings.append(f"In {late} of {len(runs)} runs the tester sent late: they measured it along with the server.")
    if unbalanced:
        warnings.append(f"The ledger of {unbalanced} of {len(runs)} runs does not balance.")
    return warnings
