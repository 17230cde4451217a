"""`overhead`: what a platform costs per request and token in CPU, and adds in latency, over a fake engine.

CPU is of the processes named and everything below them. The engine's own is kept out by running it elsewhere, or by
naming its process; this tester's never counts. After every run the same processes are read over the same time without
load, and that is subtracted. The figures are in `cost.py`. overhead.json is written after every run, so that the same
command goes on where it was stopped.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from penstock_loadtest.client.destination import find_destination
from penstock_loadtest.client.target import Target
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.results import cost
from penstock_loadtest.results.cost import (
    Cell,
    CellRun,
    CellSummary,
    CpuUse,
    Fit,
    Overhead,
    find_missing_cells,
    keep_whole_cells,
    list_cells,
    make_cell_run,
    make_overhead,
)
from penstock_loadtest.results.intervals import Estimate
from penstock_loadtest.results.records import write_json
from penstock_loadtest.scenario import Kind, Lengths, Prompts, Scenario
from penstock_loadtest.studies import campaign
from penstock_loadtest.studies.measure import EXIT_INTERRUPTED, Measurement
from penstock_loadtest.studies.process_tree import read_tree_cpu_s


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The grid, and what a run of it is."""

    lengths: list[int]  # tokens of an answer
    concurrencies: list[int]  # requests at once
    requests: int  # of a run; at least four for every one at once
    prompt_tokens: int
    rounds: int

    def cells(self, *, is_direct_too: bool) -> list[Cell]:
        return list_cells(self.rounds, self.concurrencies, self.lengths, is_direct_too=is_direct_too)

    def scenario(self, cell: Cell) -> Scenario:
        """Greedy answers of exactly the length; prompts differ from run to run."""
        place = self.concurrencies.index(cell.concurrency) * len(self.lengths) + self.lengths.index(cell.output_tokens)
        kind = Kind(
            prompts=Prompts(tokens=Lengths(constant=self.prompt_tokens)),
            output_tokens=Lengths(constant=cell.output_tokens),
            ignore_eos=True,
            temperature=0.0,
        )
        return Scenario(
            name=f"overhead: {cell.concurrency} at once, {cell.output_tokens}-token answers, {cell.path}",
            seed=(cell.round * 1000 + place) * 2 + (cell.path == "direct"),
            loop="closed",
            concurrency=cell.concurrency,
            requests=max(self.requests, 4 * cell.concurrency),
            duration_s=None,
            kinds=[kind],
        )


class Meter(NamedTuple):
    """Reads CPU seconds of the platform; the clock and the rest between two readings are parameters of tests."""

    cpu_s: Callable[[], float]
    now_s: Callable[[], float] = time.perf_counter
    rest: Callable[[float], None] = time.sleep

    def measure_cpu(self, run: Callable[[], Measurement]) -> tuple[Measurement, CpuUse]:
        """Make a run; returns it with its CPU use, and that of the same time without it."""
        before_s, began_s = self.cpu_s(), self.now_s()
        measured = run()
        busy_s, wall_s = self.cpu_s() - before_s, self.now_s() - began_s
        if measured.interrupted:
            return measured, CpuUse(wall_s=wall_s, busy_s=busy_s, idle_s=0.0)
        idle_from_s, idle_since_s = self.cpu_s(), self.now_s()
        self.rest(wall_s)
        idle_s = (self.cpu_s() - idle_from_s) * wall_s / (self.now_s() - idle_since_s)
        return measured, CpuUse(wall_s=wall_s, busy_s=busy_s, idle_s=idle_s)


def overhead(
    pid: Annotated[
        list[int], typer.Option(help="Process of the platform, counted with all below it; may be repeated.")
    ],
    url: Annotated[
        str | None, typer.Option(help="The platform's gateway, as http://HOST:PORT/v1; else OPENAI_BASE_URL.")
    ] = None,
    direct: Annotated[
        str | None, typer.Option(help="The engine behind it: latency through the platform is then compared with it.")
    ] = None,
    exclude_pid: Annotated[
        list[int] | None,
        typer.Option(help="Process that does not count, nor what is below it: the fake engine; may be repeated."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for overhead.json and the runs; one that was begun is gone on with.")
    ] = Path("loadtest-results/overhead"),
    model: Annotated[str | None, typer.Option(help="Model; else the first that the server lists.")] = None,
    direct_model: Annotated[str | None, typer.Option(help="Model of the engine; else the first that it lists.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of an answer.")] = "16,64,256",
    concurrency: Annotated[str, typer.Option(help="Requests at once.")] = "1,16",
    requests: Annotated[int, typer.Option(min=1, help="Requests of a run, at least four for every one at once.")] = 96,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of every cell of the grid.")] = 3,
) -> None:
    """What the platform costs per request and token against a fake engine. Ctrl-C keeps what there is; the same command
    goes on from there."""
    console = Console()
    load = Load(
        lengths=parse_numbers(lengths, "--lengths"),
        concurrencies=parse_numbers(concurrency, "--concurrency"),
        requests=requests,
        prompt_tokens=prompt_tokens,
        rounds=rounds,
    )
    left_out = [*(exclude_pid or []), os.getpid()]
    meter = Meter(lambda: read_tree_cpu_s(pid, left_out))
    meter.cpu_s()  # a process that is not there is refused before any load
    targets: dict[cost.Path, Target] = {"platform": find_destination(Scenario(), url, model, os.environ)}
    if direct is not None:
        targets["direct"] = find_destination(Scenario(), direct, direct_model, os.environ)
    found = run_overhead(targets, load, meter, out, console=console)
    console.print(make_cost_table(found.lines))
    campaign.print_sentences(console, [*map(describe_fit, found.fits), *found.notes, str(out / "overhead.json")])
    if not found.is_complete:
        raise typer.Exit(EXIT_INTERRUPTED)


def parse_numbers(text: str, option: str) -> list[int]:
    """`16,64,256` as numbers above 0. Raises ScenarioInvalid."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ScenarioInvalid(
            f"{option} is {text!r}; it must be numbers above 0 with commas between them, like 16,64,256."
        )
    return list(dict.fromkeys(int(part) for part in parts))


def run_overhead(
    targets: dict[cost.Path, Target],
    load: Load,
    meter: Meter,
    out: Path,
    *,
    console: Console | None,
    run: campaign.Run = campaign.measure_without_plots,
) -> Overhead:
    """Begin the grid, or go on with the one in the folder `out`; Ctrl-C ends it early. Leaves overhead.json.

    Raises ScenarioInvalid when the folder's grid has other settings; it may have other `rounds`.
    """
    is_direct_too, path = "direct" in targets, out / "overhead.json"
    cells = load.cells(is_direct_too=is_direct_too)
    urls = {name: target.url for name, target in targets.items()}
    settings = campaign.encode_settings(
        load.scenario(cells[0]), load=msgspec.structs.replace(load, rounds=0), urls=urls
    )

    def so_far(runs: Sequence[CellRun]) -> Overhead:
        return make_overhead(urls["platform"], urls.get("direct"), settings, runs, cells)

    def make(cell: Cell) -> CellRun | None:
        folder = campaign.new_folder(
            out, f"round-{cell.round}-{cell.concurrency}-at-once-{cell.output_tokens}-tokens-{cell.path}"
        )

        def measure_cell() -> Measurement:
            return run(load.scenario(cell), targets[cell.path], folder, console)

        measured, cpu = meter.measure_cpu(measure_cell) if cell.path == "platform" else (measure_cell(), None)
        return None if measured.interrupted else make_cell_run(cell, folder.name, measured.summary, cpu)

    runs = _begun(path, so_far([]), is_direct_too=is_direct_too)
    out.mkdir(parents=True, exist_ok=True)
    with suppress(KeyboardInterrupt):
        if find_missing_cells(cells, runs):
            _warm_up(targets, load, out, console, run)
        fill(runs, cells, make=make, save=lambda made: write_json(path, so_far(made)))
    write_json(path, so_far(runs))
    return so_far(runs)


def fill(
    runs: list[CellRun],
    cells: Sequence[Cell],
    *,
    make: Callable[[Cell], CellRun | None],
    save: Callable[[Sequence[CellRun]], None],
) -> None:
    """Add the runs of the grid that are missing, or those until `make` was interrupted and gives None."""
    for cell in find_missing_cells(cells, runs):
        made = make(cell)
        if made is None:
            return
        runs.append(made)
        save(runs)


def _warm_up(
    targets: dict[cost.Path, Target], load: Load, out: Path, console: Console | None, run: campaign.Run
) -> None:
    """A few requests that do not count: connections, caches and just-in-time compilers are not the steady cost."""
    for path, target in targets.items():
        scenario = load.scenario(Cell(0, load.concurrencies[0], load.lengths[0], path))
        run(
            msgspec.structs.replace(scenario, requests=4 * scenario.concurrency),
            target,
            campaign.new_folder(out, f"warm-up-{path}"),
            console,
        )


def _begun(path: Path, wanted: Overhead, *, is_direct_too: bool) -> list[CellRun]:
    """The runs that are there already."""
    found = campaign.read_if_there(path, Overhead)
    if found is None:
        return []
    campaign.must_be_same(path, found.settings, wanted.settings)
    return keep_whole_cells(found.runs, is_direct_too=is_direct_too)


def make_cost_table(lines: Sequence[CellSummary]) -> Table:
    """A row a cell of the grid, in milliseconds; added latencies with their intervals where there are enough rounds."""
    caption = "ms; CPU of a request less the idle share; +: platform less engine"
    table = Table(title="Cost of the platform", caption=caption)
    for name in ("at once", "tokens", "CPU", "and idle", "idle cores", "+TTFT", "+gap", "+gap p99"):
        table.add_column(name, justify="right")
    for line in lines:
        added = [
            _measure_added(estimate)
            for estimate in (line.added_ttft_ms, line.added_inter_token_ms, line.added_inter_token_p99_ms)
        ]
        idle = "-" if line.idle_cores is None else f"{line.idle_cores:.4f}"
        table.add_row(str(line.concurrency), str(line.output_tokens), _ms(line.cpu_ms), _ms(line.busy_ms), idle, *added)
    return table


def describe_fit(fit: Fit) -> str:
    where = "over all concurrencies" if fit.concurrency is None else f"at {fit.concurrency} at once"
    fixed = f"{fit.fixed_ms:.3f} ms{_interval(fit.fixed_interval_ms, 3)}"
    token = f"{fit.per_token_us:.2f} us{_interval(fit.per_token_interval_us, 2)}"
    return (
        f"CPU {where}: {fixed} a request + {token} a token; {fit.runs} runs, the worst {fit.worst_ms:.3f} ms off the "
        "line."
    )


def _interval(interval: tuple[float, float] | None, digits: int) -> str:
    return "" if interval is None else f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _measure_added(estimate: Estimate | None) -> str:
    if estimate is None or estimate.value is None:
        return "-"
    interval = "" if estimate.low is None else f"\n{estimate.low:+.3f} to {estimate.high:+.3f}"
    return f"{estimate.value:+.3f}{interval}"
