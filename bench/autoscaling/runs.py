"""Runs of entries on windows, by several processes, each kept in a file as soon as it is done: a bench that was broken
off goes on where it was.

A run is known by its entry, window, part, seed and the sources that it rests on, so that a change of the policy plays
ours anew and nobody else.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from bench.autoscaling import oracle
from bench.autoscaling.entries import Entry, make_run
from bench.autoscaling.play import Outcome, play
from bench.autoscaling.windows import Window
from bench.support.kept_runs import KeptRuns, append_line, compute_all, digest, make_key, read_lines

BASIS = (
    "platform/sim",
    "platform/router",
    "platform/perf",
    "platform/prefix",
    "platform/wire",
    "platform/workers/engine",
    "platform/workers/serving",
    "platform/autoscale/observation.py",
    "platform/autoscale/observe.py",
    "bench/autoscaling/entries.py",
    "bench/autoscaling/oracle_schedule.py",
    "bench/autoscaling/play.py",
    "bench/autoscaling/replicas.py",
    "bench/autoscaling/oracle.py",
    "bench/autoscaling/rivals",
)
POLICY = ("platform/autoscale",)
Part = Literal["tuning", "scored"]
Windows = dict[str, tuple[Window, Window]]


class Job(msgspec.Struct, frozen=True):
    """A run that is to be made."""

    entry: Entry
    window: str
    part: Part
    seed: int
    model_error: float = 1.0
    """Factor by which the step costs that replicas report are wrong."""


class Store:
    """Outcomes by job, in the file `path` of JSON lines."""

    def __init__(self, path: Path, windows: Windows) -> None:
        self._path = path
        self._loads = {
            (name, part): hashlib.sha256(repr(window).encode()).hexdigest()
            for name, pair in windows.items()
            for part, window in zip(("tuning", "scored"), pair, strict=True)
        }
        self._basis, self._policy = digest(BASIS), digest(BASIS + POLICY)
        self._runs = KeptRuns(path, Outcome)

    def get(self, job: Job) -> Outcome | None:
        return self._runs.get(self._key(job))

    def put(self, job: Job, outcome: Outcome) -> None:
        self._runs.put(self._key(job), describe(job), outcome)
        self.trials(job).unlink(missing_ok=True)

    def trials(self, job: Job) -> Path:
        """The file for what a job tries on its way."""
        return self._path.with_name(f"trials-{self._key(job)}.jsonl")

    def _key(self, job: Job) -> str:
        sources = self._policy if job.entry.kind.startswith("ours") else self._basis
        return make_key([job, sources, self._loads[job.window, job.part]])


def describe(job: Job) -> str:
    return f"{job.window}, {job.part}, seed {job.seed}: {job.entry.label}"


def compute(window: Window, job: Job, trials: Path) -> Outcome:
    """The outcome of one job. An oracle is searched for, each trial only for as long as it may reach the part, or with
    the targets of another seed only adjusted; the file `trials` has what a search that was broken off has tried."""
    known = {row["entry"]: msgspec.convert(row["outcome"], Outcome) for row in read_lines(trials)}

    def try_entry(entry: Entry, least: float = 0.0) -> Outcome:
        key = msgspec.json.encode(entry).decode()
        if key not in known:
            known[key] = play(window, make_run(entry), job.seed, model_error=job.model_error, least=least)
            if job.entry.kind == "oracle":
                append_line(trials, {"entry": key, "outcome": msgspec.to_builtins(known[key])})
        return known[key]

    if job.entry.kind != "oracle":
        return try_entry(job.entry)
    if "targets" in job.entry.settings:
        found = oracle.adjust(try_entry, Entry("schedule", job.entry.settings))
    else:
        found = oracle.find(partial(try_entry, least=oracle.ATTAINED), window, **job.entry.settings)
        if found.outcome.attained < oracle.ATTAINED:  # it was broken off
            found = found._replace(outcome=play(window, make_run(found.entry), job.seed, model_error=job.model_error))
    return msgspec.structs.replace(found.outcome, targets=list(found.entry.settings["targets"]))


def run_all(
    jobs: Sequence[Job], windows: Windows, store: Store, processes: int, on_done: Callable[[Job, Outcome, int], None]
) -> list[Outcome]:
    """The outcomes of the jobs, in their order; known ones from the store. on_done: called with each that is new, and
    the number that are left."""
    new = [job for job in jobs if store.get(job) is None]
    calls = [partial(compute, windows[job.window][job.part == "scored"], job, store.trials(job)) for job in new]
    for left, (job, outcome) in zip(range(len(new) - 1, -1, -1), compute_all(new, calls, processes), strict=True):
        store.put(job, outcome)
        on_done(job, outcome, left)
    found = [store.get(job) for job in jobs]
    assert all(outcome is not None for outcome in found)
    return [outcome for outcome in found if outcome is not None]
