"""What a platform costs per request and token, from runs over a grid of answer lengths. Pure; `overhead.py` makes the
runs, overhead.json is an Overhead.

CPU is of the process tree that was named, less what the same tree spends idle over the same time. Per answer it is
fitted as fixed + per_token * tokens by least squares over all runs, each run a point; the intervals of the fit are a
bootstrap over the runs, so they are rough with few. Added latency is the difference of the medians of neighbouring
runs, through the platform and directly to its engine.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from penstock_loadtest.results.intervals import Estimate, Floats, bootstrap, estimate_difference
from penstock_loadtest.results.summary import Summary

Path = Literal["platform", "direct"]
MIN_RUNS = 6
"""Fewest points for an interval: a bootstrap of fewer is meaningless."""


class Cell(NamedTuple):
    """One run of the grid."""

    round: int  # 1, 2, 3 ...
    concurrency: int
    output_tokens: int
    path: Path


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of CPU of the tree while the load ran, and of the same tree idle for the same time."""

    wall_s: float
    busy_s: float
    idle_s: float


class CellRun(msgspec.Struct, frozen=True, kw_only=True):
    round: int
    concurrency: int
    output_tokens: int  # of every request
    path: Path
    folder: str
    requests: int
    finished: int
    tokens: int  # delivered
    cpu: CpuUse | None  # None: direct
    ttft_p50_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None
    is_late: bool

    @property
    def cell(self) -> Cell:
        return Cell(self.round, self.concurrency, self.output_tokens, self.path)

    @property
    def cpu_ms(self) -> float | None:
        """CPU milliseconds per finished request, idle share subtracted. None if not measured."""
        return (
            None if self.cpu is None or not self.finished else 1e3 * (self.cpu.busy_s - self.cpu.idle_s) / self.finished
        )

    @property
    def tokens_each(self) -> float:
        return self.tokens / self.finished if self.finished else 0.0


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """cpu_ms of a request = fixed_ms + per_token_us / 1000 * tokens. Intervals are of 95 %; None with fewer than
    MIN_RUNS."""

    concurrency: int | None  # None: over all of them
    runs: int
    fixed_ms: float
    fixed_interval_ms: tuple[float, float] | None
    per_token_us: float
    per_token_interval_us: tuple[float, float] | None
    worst_ms: float  # largest distance of a run from the line


class CellSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the grid over its rounds."""

    concurrency: int
    output_tokens: int
    cpu_ms: float | None  # of a request, median of the rounds, idle share subtracted
    busy_ms: float | None  # the same, with it
    idle_cores: float | None  # CPU seconds per second of the tree when idle
    added_ttft_ms: Estimate | None  # None: not measured directly
    added_inter_token_ms: Estimate | None
    added_inter_token_p99_ms: Estimate | None


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """The content of overhead.json."""

    url: str
    direct: str | None
    settings: dict[str, object]
    runs: list[CellRun]
    lines: list[CellSummary]
    fits: list[Fit]
    is_complete: bool
    notes: list[str]


def list_cells(rounds: int, concurrencies: Sequence[int], lengths: Sequence[int], *, is_direct_too: bool) -> list[Cell]:
    """Every cell once a round; platform and direct next to each other, which of them first changing with every cell."""
    cells: list[Cell] = []
    for number in range(1, rounds + 1):
        for concurrency in concurrencies:
            for place, length in enumerate(lengths):
                paths: list[Path] = ["platform", "direct"] if is_direct_too else ["platform"]
                cells += [
                    Cell(number, concurrency, length, path) for path in (paths if (number + place) % 2 else paths[::-1])
                ]
    return cells


def find_missing_cells(cells: Sequence[Cell], runs: Sequence[CellRun]) -> list[Cell]:
    """Cells that are still to be run, in their order."""
    made = {run.cell for run in runs}
    return [cell for cell in cells if cell not in made]


def keep_whole_cells(runs: Sequence[CellRun], *, is_direct_too: bool) -> list[CellRun]:
    """Runs to go on with: those whose neighbour on the other path is there too."""
    made = {run.cell for run in runs}
    paths: tuple[Path, ...] = ("platform", "direct") if is_direct_too else ("platform",)
    return [run for run in runs if all(run.cell._replace(path=path) in made for path in paths)]


def make_cell_run(cell: Cell, folder: str, summary: Summary, cpu: CpuUse | None) -> CellRun:
    return CellRun(
        **cell._asdict(),
        folder=folder,
        requests=summary.requests,
        finished=summary.outcomes.finished,
        tokens=summary.output_tokens,
        cpu=cpu,
        ttft_p50_s=summary.ttft_s.p50,
        inter_token_p50_s=summary.inter_token_s.p50,
        inter_token_p99_s=summary.inter_token_s.p99,
        is_late=summary.lateness.is_late,
    )


class LinearFits(NamedTuple):
    """The straight lines y = fixed + slope * x, one for every set of points."""

    fixed: Floats
    slope: Floats


def fit_line(points: Floats) -> LinearFits:
    """The line through points (x, y); shape (..., n, 2) gives (...). NaN where all x of a set are the same."""
    x, y = points[..., 0], points[..., 1]
    from_mean = x - x.mean(axis=-1, keepdims=True)
    spread = (from_mean**2).sum(axis=-1)
    slope = (from_mean * y).sum(axis=-1) / np.where(spread == 0, np.nan, spread)
    return LinearFits(y.mean(axis=-1) - slope * x.mean(axis=-1), slope)


def fit_cost(runs: Sequence[CellRun], concurrency: int | None, rng: np.random.Generator) -> Fit | None:
    """The fit over the runs of one concurrency (None: of all); None without two different lengths of answer."""
    points = np.array(
        [
            (run.tokens_each, run.cpu_ms)
            for run in runs
            if run.cpu_ms is not None and concurrency in (None, run.concurrency)
        ],
        dtype=np.float64,
    ).reshape(-1, 2)
    if len(set(points[:, 0].round())) < 2:
        return None
    fixed, slope = map(float, fit_line(points))
    has_interval = len(points) >= MIN_RUNS
    return Fit(
        concurrency=concurrency,
        runs=len(points),
        fixed_ms=fixed,
        fixed_interval_ms=bootstrap(points, lambda drawn: fit_line(drawn).fixed, rng) if has_interval else None,
        per_token_us=1e3 * slope,
        per_token_interval_us=bootstrap(points, lambda drawn: 1e3 * fit_line(drawn).slope, rng)
        if has_interval
        else None,
        worst_ms=float(np.abs(points[:, 1] - fixed - slope * points[:, 0]).max()),
    )


def summarize_cells(runs: Sequence[CellRun]) -> list[CellSummary]:
    cells = dict.fromkeys((run.concurrency, run.output_tokens) for run in runs)
    return [
        _summarize_cell([run for run in runs if (run.concurrency, run.output_tokens) == cell], *cell)
        for cell in sorted(cells)
    ]


def _summarize_cell(runs: list[CellRun], concurrency: int, output_tokens: int) -> CellSummary:
    cpu = [run for run in runs if run.cpu is not None and run.finished]
    return CellSummary(
        concurrency=concurrency,
        output_tokens=output_tokens,
        cpu_ms=_median([run.cpu_ms for run in cpu]),
        busy_ms=_median([1e3 * run.cpu.busy_s / run.finished for run in cpu if run.cpu]),
        idle_cores=_median([run.cpu.idle_s / run.cpu.wall_s for run in cpu if run.cpu]),
        added_ttft_ms=_compute_added(runs, "ttft_p50_s"),
        added_inter_token_ms=_compute_added(runs, "inter_token_p50_s"),
        added_inter_token_p99_ms=_compute_added(runs, "inter_token_p99_s"),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _compute_added(
    runs: list[CellRun], figure: Literal["ttft_p50_s", "inter_token_p50_s", "inter_token_p99_s"]
) -> Estimate | None:
    by_cell: dict[Cell, float | None] = {run.cell: getattr(run, figure) for run in runs}
    pairs = []
    for cell, value in by_cell.items():
        base = by_cell.get(cell._replace(path="direct"))
        if cell.path == "platform" and value is not None and base is not None:
            pairs.append((1e3 * base, 1e3 * value))
    return estimate_difference(pairs) if pairs else None


def make_overhead(
    url: str,
    direct: str | None,
    settings: dict[str, object],
    runs: Sequence[CellRun],
    cells: Sequence[Cell],
    seed: int = 0,
) -> Overhead:
    rng = np.random.default_rng(seed)
    concurrencies = sorted({run.concurrency for run in runs})
    fits = [fit_cost(runs, concurrency, rng) for concurrency in (concurrencies if len(concurrencies) > 1 else [])]
    fits.append(fit_cost(runs, None, rng))
    return Overhead(
        url=url,
        direct=direct,
        settings=settings,
        runs=list(runs),
        lines=summarize_cells(runs),
        fits=[found for found in fits if found],
        is_complete=not find_missing_cells(cells, runs),
        notes=_notes(runs, cells),
    )


def _notes(runs: Sequence[CellRun], cells: Sequence[Cell]) -> list[str]:
    notes = []
    left = len(find_missing_cells(cells, runs))
    if left:
        notes.append(f"Not finished: {len(cells) - left} of {len(cells)} runs.")
    used = [run.cpu for run in runs if run.cpu is not None]
    if used:
        wall_s, idle_s, busy_s = (sum(getattr(cpu, name) for cpu in used) for name in ("wall_s", "idle_s", "busy_s"))
        notes.append(
            f"Idle, the processes spend {1e3 * idle_s / wall_s:.1f} ms of CPU a second; under load "
            f"{1e3 * busy_s / wall_s:.1f}. The idle share is subtracted."
        )
    lost = sum(run.requests - run.finished for run in runs)
    if lost:
        notes.append(
            f"{lost} of {sum(run.requests for run in runs)} requests did not finish; the cost is counted per finished "
            "one."
        )
    if any(run.is_late for run in runs):
        notes.append("In some runs the tester sent late; its host is too busy for the latencies to count.")
    return notes
