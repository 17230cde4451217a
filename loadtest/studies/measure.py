"""One run from start to report: what `run`, `ladder`, `compare` and `overhead` share.

The folder of a run:
    scenario.json   the load                    target.json    the server
    records.jsonl   a line a request
    repeats.jsonl   the records of requests that were sent again at the end, where there are any
    observed.jsonl  replicas over time, where the server's /metrics has them
    run.json        further facts of the run    summary.json, ledger.json, plots/, report.html
Ctrl-C ends the load and leaves all of it, SIGTERM lets what is under way end first; a second one exits at once, and
`penstock-loadtest report` makes the rest.
"""

import asyncio
import gc
import os
import resource
import sys
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import msgspec
import uvloop
from rich.console import Console

from penstock_loadtest.client.client import Answer, Client, Clock
from penstock_loadtest.client.metered_usage import read_metered_usage, wait_for_settled_usage
from penstock_loadtest.client.target import Target
from penstock_loadtest.errors import LoadtestError, RecordsInvalid, ScenarioInvalid, TargetUnreachable
from penstock_loadtest.planned import Planned
from penstock_loadtest.results.ledger import Ledger, Repeat, check_ledger
from penstock_loadtest.results.records import RecordWriter, read_records, write_json
from penstock_loadtest.results.series import Observed
from penstock_loadtest.results.summary import Summary, summarize
from penstock_loadtest.run.interrupts import stop_by_signals
from penstock_loadtest.run.live import show
from penstock_loadtest.run.observe import observe
from penstock_loadtest.run.progress import Progress
from penstock_loadtest.run.runner import RunFacts, run_load
from penstock_loadtest.scenario import Scenario, to_tree
from penstock_loadtest.workload.plan import draw_plan

GC_THRESHOLD = 50_000
SWITCH_INTERVAL_S = 2e-4
"""How long the event loop may wait for the threads that prepare requests and draw the progress."""
EXIT_INTERRUPTED = 130


class Measurement(NamedTuple):
    folder: Path
    summary: Summary
    ledger: Ledger
    interrupted: bool
    turns_not_sent: int = 0
    """Later turns of sessions that never left: a turn before them did not finish, or the run ended first."""


def measure(
    scenario: Scenario, target: Target, folder: Path, *, console: Console | None, plots: bool = True
) -> Measurement:
    """Run the scenario and leave everything in the folder. `console` None: nothing is shown meanwhile; `plots` False:
    no plots and no report.html.

    Raises LoadtestError: a folder that can't be used, a scenario that can't be planned and one that sends nothing,
    without leaving a run; a plan that breaks off midway after what had been sent is reported.
    """
    if plots:
        must_have_plots()
    _begin(folder, scenario, target)
    try:
        with _fast_interpreter(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            facts, metered = runner.run(_load(scenario, target, folder, console))
    except LoadtestError:
        _leave(folder)
        raise
    except OSError as error:
        raise RecordsInvalid(f"{folder} can't be written: {error.strerror or error}.") from None
    if facts.plan_error is not None and not facts.sent:
        _leave(folder)
        raise facts.plan_error
    measurement = _conclude(scenario, target, folder, facts, metered, plots=plots)
    if facts.plan_error is not None:
        raise facts.plan_error
    return measurement


def must_have_plots() -> None:
    """Raises ScenarioInvalid where the library that draws plots is missing."""
    if find_spec("matplotlib") is None:
        raise ScenarioInvalid(
            "The report's plots need matplotlib: pip install 'penstock[loadtest]'; a load runs without it with "
            "--no-plots."
        )


def _begin(folder: Path, scenario: Scenario, target: Target) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "records.jsonl").exists():
            raise RecordsInvalid(f"{folder} holds a run already; name another folder.")
        write_json(folder / "scenario.json", to_tree(scenario))
        write_json(folder / "target.json", {"url": target.url, "model": target.model, "exact": target.exact})
    except OSError as error:
        raise RecordsInvalid(f"{folder} can't be written: {error.strerror}.") from None


def _leave(folder: Path) -> None:
    """Restore the folder to what it was, if nothing was sent."""
    if (folder / "records.jsonl").stat().st_size:
        return
    for name in ("scenario.json", "target.json", "records.jsonl", "observed.jsonl"):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # it had something else in it
        folder.rmdir()


async def _load(
    scenario: Scenario, target: Target, folder: Path, console: Console | None
) -> tuple[RunFacts, dict[str, int] | None]:
    """Run the load; returns its facts, and completion tokens by the tenants' meters where those are read."""
    clock, progress = Clock(), Progress(scenario)
    stop, enough, started = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.enter_context(stop_by_signals(stop, hurry=lambda: _exit_at_once(records, console), enough=enough))
        client = Client(target, clock)
        stack.push_async_callback(client.close)
        records = stack.enter_context(RecordWriter(folder / "records.jsonl"))
        before = await read_metered_usage(target) if scenario.meter else None
        if target.metrics_url is not None:
            note = stack.enter_context(_Notes(folder / "observed.jsonl")).write
            await stack.enter_async_context(
                _run_in_background(started, observe(client.get, target.metrics_url, clock.now, note))
            )
        if console is not None:
            await stack.enter_async_context(_run_in_background(started, show(progress, clock.now, console)))

        def on_sent(_: Planned) -> None:
            progress.note_sent(clock.now())

        reported: Counter[str] = Counter()

        def on_ended(answer: Answer) -> None:
            records.write(answer.record)
            reported[answer.record.tenant] += answer.record.metered_tokens or 0
            progress.note_ended(answer.record, clock.now())

        facts = await run_load(
            scenario,
            draw_plan(scenario),
            client,
            on_sent=on_sent,
            on_ended=on_ended,
            stop=stop,
            enough=enough,
            on_start=started.set,
        )
        return facts, None if before is None else await _read_usage_since(target, before, reported)


async def _read_usage_since(target: Target, before: dict[str, int], reported: Counter[str]) -> dict[str, int] | None:
    """Completion tokens by the tenants' meters since `before`; None: the server does not answer any more, and the run
    is concluded without.

    reported: completion tokens of each tenant's answers, by the answers' usage.
    """
    try:
        return await wait_for_settled_usage(target, before, reported)
    except TargetUnreachable:
        return None


def _conclude(
    scenario: Scenario, target: Target, folder: Path, facts: RunFacts, metered: dict[str, int] | None, *, plots: bool
) -> Measurement:
    if facts.repeats:
        with RecordWriter(folder / "repeats.jsonl") as again:
            for _, second in facts.repeats:
                again.write(second)
    summary = summarize(read_records(folder / "records.jsonl"), scenario)
    all_records = chain(read_records(folder / "records.jsonl"), (second for _, second in facts.repeats))
    ledger = check_ledger(
        all_records, [Repeat(first, second) for first, second in facts.repeats], exact=target.exact, metered=metered
    )
    write_json(folder / "run.json", _facts(facts) | {"metered": metered})
    write_json(folder / "summary.json", summary)
    write_json(folder / "ledger.json", ledger)
    if plots:
        # matplotlib may be absent, and takes half a second and 50 MiB that the load should not carry
        from penstock_loadtest.report.page import write_report  # noqa: PLC0415 (matplotlib is optional)

        write_report(folder)
    return Measurement(folder, summary, ledger, facts.is_interrupted, facts.turns_not_sent)


def _facts(facts: RunFacts) -> dict[str, object]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "tester": {
            "version": version("penstock"),
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
            "max_rss_bytes": usage.ru_maxrss * 1024,
        },
        "sent": facts.sent,
        "turns_not_sent": facts.turns_not_sent,
        "most_in_flight": facts.most_in_flight,
        "last_sent_s": round(facts.last_sent_s, 6),
        "ended_s": round(facts.ended_s, 6),
        "is_interrupted": facts.is_interrupted,
        "repeats": len(facts.repeats),
        "plan_error": None if facts.plan_error is None else str(facts.plan_error),
    }


class _Notes:
    """Writer of observations, a line each; the file exists from the first one on. A context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, observed: Observed) -> None:
        if self._file is None:
            self._file = self._path.open("wb", buffering=0)
        self._file.write(msgspec.json.encode(observed) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


@asynccontextmanager
async def _run_in_background(started: asyncio.Event, work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` in a task while the context is open, from when the run has started; cancelled at the end."""

    async def run() -> None:
        with closing(work):
            await started.wait()
            await work

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _exit_at_once(records: RecordWriter, console: Console | None) -> None:
    records.close()
    if console is not None:
        console.show_cursor(True)
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def _fast_interpreter() -> Iterator[None]:
    """A context in which objects that exist now are left out of garbage collection, which comes less often, and threads
    give way to the event loop sooner."""
    thresholds, interval_s = gc.get_threshold(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *thresholds[1:])
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
