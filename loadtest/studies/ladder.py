"""`ladder`: runs a load at one rate after another until it is known where goodput falls.

Every step is a run of its own with its own folder, a warm-up that is left out, a pause before it, and a seed of its
own: prompts that an earlier step sent are not cached by chance. The decisions are in `knee.py`. ladder.json is written
after every step, so that the same command goes on where it was stopped.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock_loadtest.client.destination import find_destination
from penstock_loadtest.client.target import Target
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.results.knee import Ladder, Next, Rules, Step, choose_next_step, is_held, make_ladder
from penstock_loadtest.results.records import write_json
from penstock_loadtest.results.summary import Summary
from penstock_loadtest.scenario import Scenario, load_scenario
from penstock_loadtest.studies.campaign import (
    Run,
    encode_settings,
    is_reachable,
    measure_without_plots,
    must_be_same,
    new_folder,
    print_sentences,
    read_if_there,
)
from penstock_loadtest.studies.measure import EXIT_INTERRUPTED

PER_SECOND = "requests/s"
SPEED = "x the trace's speed"


class StepLength(msgspec.Struct, frozen=True, kw_only=True):
    """The length of a step."""

    warmup_s: float = 5.0  # left out of its figures
    step_s: float = 30.0  # at least so long after the warm-up
    min_requests: int = 100  # and long enough for so many requests; not with a trace


def find_unit(scenario: Scenario) -> str:
    """What a rate of the ladder counts. Raises ScenarioInvalid where the load has no steady rate to raise."""
    if scenario.loop != "open":
        raise ScenarioInvalid("A ladder raises the rate of an open loop; a closed loop has none (loop: closed).")
    if scenario.trace is not None:
        return SPEED
    if scenario.arrivals.process not in ("constant", "poisson", "gamma"):
        raise ScenarioInvalid(
            f"A ladder needs a steady rate, and the arrivals of this scenario are a {scenario.arrivals.process}."
        )
    return PER_SECOND


def set_rate(scenario: Scenario, rate: float, *, number: int, step_length: StepLength) -> Scenario:
    """The scenario of step `number` at a rate, in the unit of `find_unit`."""
    changes: dict[str, object] = {}
    measured_s = step_length.step_s
    if scenario.trace is not None:
        changes["trace"] = msgspec.structs.replace(scenario.trace, time_scale=scenario.trace.time_scale / rate)
    else:
        changes["arrivals"] = msgspec.structs.replace(scenario.arrivals, rate=rate)
        measured_s = max(measured_s, step_length.min_requests / rate)
    return msgspec.structs.replace(
        scenario,
        name=f"{scenario.name}, step {number}",
        seed=scenario.seed + number - 1,
        duration_s=step_length.warmup_s + measured_s,
        requests=None,
        warmup_s=step_length.warmup_s,
        repeat=0,
        **changes,
    )


def make_step(number: int, following: Next, folder: str, summary: Summary, *, is_balanced: bool) -> Step:
    """The record of one step of the ladder: what it was to measure (`following`), and what its run measured
    (`summary`)."""
    outcomes = summary.outcomes
    return Step(
        number=number,
        rate=following.rate,
        purpose=following.purpose,
        reason=following.reason,
        folder=folder,
        goodput=summary.goodput.share,
        judged=summary.goodput.judged,
        goodput_per_s=summary.goodput.per_s,
        offered_rate=summary.offered_rate,
        achieved_rate=summary.achieved_rate,
        output_tokens_per_s=summary.output_tokens_per_s,
        ttft_p50_s=summary.ttft_s.p50,
        ttft_p99_s=summary.ttft_s.p99,
        tpot_p50_s=summary.tpot_s.p50,
        tpot_p99_s=summary.tpot_s.p99,
        shed=outcomes.shed,
        failed=outcomes.failed,
        unfinished=outcomes.unfinished,
        is_balanced=is_balanced,
        is_late=summary.lateness.is_late,
        is_dead=summary.requests > 0 and outcomes.failed == summary.requests,
    )


def climb(
    steps: list[Step],
    rules: Rules,
    *,
    make: Callable[[int, Next], Step | None],
    settle: Callable[[], None],
    save: Callable[[Sequence[Step]], None],
) -> None:
    """Add steps until the rules want no more, or `make` was interrupted and gives None."""
    while isinstance(following := choose_next_step(steps, rules), Next):
        if steps:
            settle()
        step = make(len(steps) + 1, following)
        if step is None:
            return
        steps.append(step)
        save(steps)


def drop_dead_steps(steps: Sequence[Step]) -> list[Step]:
    """Steps to go on with: what was measured of a server that had gone is meaningless."""
    return [step for step in steps if not step.is_dead]


def ladder(
    scenario: Annotated[
        Path | None, typer.Argument(help="Scenario: a YAML file, or the name of an example. None: the defaults.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="The server, as http://HOST:PORT/v1; else OPENAI_BASE_URL.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for ladder.json and the steps; one that was begun is gone on with.")
    ] = Path("loadtest-results/ladder"),
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the scenario, as in targets.ttft_s=1; may be repeated."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model; else the first that the server lists.")] = None,
    start: Annotated[
        float | None, typer.Option(min=1e-6, help="First rate; else the scenario's (a trace: 1, its own speed).")
    ] = None,
    max_rate: Annotated[float, typer.Option(min=1e-6, help="No rate above it.")] = 10_000.0,
    factor: Annotated[float, typer.Option(min=1.01, help="The rate is raised by it while goodput holds.")] = 2.0,
    share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Goodput that must hold, as a share of the requests.")
    ] = 0.9,
    precision: Annotated[
        float, typer.Option(min=0.001, help="How far apart the rate that holds and the one that does not may be.")
    ] = 0.05,
    step_s: Annotated[float, typer.Option(min=0.1, help="Seconds of a step, warm-up aside.")] = 30.0,
    min_requests: Annotated[
        int, typer.Option(min=1, help="A step lasts long enough for so many requests (not with a trace).")
    ] = 100,
    warmup_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds at the beginning of every step that are left out.")
    ] = 5.0,
    settle_s: Annotated[float, typer.Option(min=0.0, help="Seconds of rest between steps.")] = 5.0,
    max_steps: Annotated[int, typer.Option(min=1, help="No more steps than that.")] = 30,
) -> None:
    """Raise the rate until goodput falls, and find the knee. Ctrl-C keeps what there is; the same command goes on from
    there."""
    console = Console()
    loaded = load_scenario(scenario, settings or [])
    first = start if start is not None else (1.0 if loaded.trace is not None else loaded.arrivals.rate)
    rules = Rules(
        start_rate=first,
        max_rate=max(first, max_rate),
        factor=factor,
        share=share,
        precision=precision,
        max_steps=max_steps,
    )
    step_length = StepLength(warmup_s=warmup_s, step_s=step_s, min_requests=min_requests)
    target = find_destination(loaded, url, model, os.environ)
    found = run_ladder(loaded, target, out, rules=rules, step_length=step_length, settle_s=settle_s, console=console)
    console.print(make_ladder_table(found))
    print_sentences(console, [found.verdict, str(_report(out))])
    if not found.is_complete:
        raise typer.Exit(EXIT_INTERRUPTED)


def run_ladder(
    scenario: Scenario,
    target: Target,
    out: Path,
    *,
    rules: Rules,
    step_length: StepLength,
    settle_s: float,
    console: Console | None,
    run: Run = measure_without_plots,
    answers: Callable[[Target], bool] = is_reachable,
) -> Ladder:
    """Begin a ladder, or go on with the one in the folder `out`; Ctrl-C ends it early. Leaves ladder.json.

    Raises ScenarioInvalid when the folder's ladder has other settings; its rules may be others.
    """
    unit, settings, path = find_unit(scenario), encode_settings(scenario, pace=step_length), out / "ladder.json"

    def so_far(steps: Sequence[Step]) -> Ladder:
        return make_ladder(target.url, target.model, unit, rules, settings, steps)

    def make(number: int, following: Next) -> Step | None:
        folder = new_folder(out, f"step-{number:02}-{following.rate:.4g}")
        measured = run(
            set_rate(scenario, following.rate, number=number, step_length=step_length), target, folder, console
        )
        if measured.interrupted:
            return None
        step = make_step(number, following, folder.name, measured.summary, is_balanced=measured.ledger.is_balanced)
        return step if is_held(step, rules) or answers(target) else msgspec.structs.replace(step, is_dead=True)

    steps = _begun(path, so_far([]))
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, so_far(steps))
    with suppress(KeyboardInterrupt):
        climb(
            steps,
            rules,
            make=make,
            settle=lambda: time.sleep(settle_s),
            save=lambda made: write_json(path, so_far(made)),
        )
    return so_far(steps)


def _report(out: Path) -> Path:
    """report.html, or the folder where plots can't be drawn."""
    if find_spec("matplotlib") is None:
        return out
    # matplotlib may be absent, and takes memory that the steps should not carry
    from penstock_loadtest.report.ladder import write_ladder_report  # noqa: PLC0415 (matplotlib is optional)

    return write_ladder_report(out)


def _begun(path: Path, wanted: Ladder) -> list[Step]:
    """The steps that are there already."""
    found = read_if_there(path, Ladder)
    if found is None:
        return []
    here, there = ({"url": ladder.url, "model": ladder.model, **ladder.settings} for ladder in (wanted, found))
    must_be_same(path, there, here)
    return drop_dead_steps(found.steps)


def make_ladder_table(ladder: Ladder) -> Table:
    """A row a step by rate; latencies are p50 and p99 in milliseconds."""
    table = Table(
        title=escape(f"Ladder against {ladder.url}, {ladder.model}"),
        caption=f"rate: {ladder.unit}; red: goodput did not hold",
    )
    for name in ("step", "rate", "goodput", "done/s", "TTFT ms", "TPOT ms", "lost", "note"):
        table.add_column(name, justify="left" if name in ("step", "note") else "right")
    for step in sorted(ladder.steps, key=lambda step: (step.rate, step.number)):
        table.add_row(*_row(step), style=None if is_held(step, ladder.rules) else "red")
    return table


def _row(step: Step) -> list[str]:
    goodput = "-" if step.goodput is None else f"{step.goodput:.1%}"
    finished = "-" if step.achieved_rate is None else f"{step.achieved_rate:.4g}"
    latencies = [_both_ms(step.ttft_p50_s, step.ttft_p99_s), _both_ms(step.tpot_p50_s, step.tpot_p99_s)]
    lost = f"{step.shed + step.failed + step.unfinished:,}"
    return [
        f"{step.number} {step.purpose}",
        f"{step.rate:.4g}",
        goodput,
        finished,
        *latencies,
        lost,
        ", ".join(list_flaws(step)),
    ]


def list_flaws(step: Step) -> list[str]:
    """Why a step's figures are doubtful."""
    found = (("sent late", step.is_late), ("not balanced", not step.is_balanced), ("server gone", step.is_dead))
    return [text for text, is_so in found if is_so]


def _both_ms(p50_s: float | None, p99_s: float | None) -> str:
    return "-" if p50_s is None or p99_s is None else f"{_ms(p50_s)} {_ms(p99_s)}"


def _ms(value_s: float) -> str:
    return f"{1e3 * value_s:,.{0 if value_s >= 0.1 else 1}f}"
