"""Runs of entries on windows, by several processes, each kept in a file as soon as it is done: a bench that was broken
off goes on where it was.

A run is known by its entry, window, part, seed and the sources that it rests on, so that a change of the policy plays
ours anew and nobody else.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.autoscaling import oracle
from bench.autoscaling.entries import Entry, make_run
from bench.autoscaling.play import Outcome, play
from bench.autoscaling.windows import Window

ROOT = Path(__file__).resolve().parents[2]
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
        self._known: dict[str, Outcome] = {}
        for row in _read_lines(path):
            self._known[row["key"]] = msgspec.convert(row["outcome"], Outcome)

    def get(self, job: Job) -> Outcome | None:
        return self._known.get(self._key(job))

    def put(self, job: Job, outcome: Outcome) -> None:
        key = self._key(job)
        self._known[key] = outcome
        _append(self._path, {"key": key, "run": describe(job), "outcome": msgspec.to_builtins(outcome)})
        self.trials(job).unlink(missing_ok=True)

    def trials(self, job: Job) -> Path:
        """The file for what a job tries on its way."""
        return self._path.with_name(f"trials-{self._key(job)}.jsonl")

    def _key(self, job: Job) -> str:
        sources = self._policy if job.entry.kind.startswith("ours") else self._basis
        basis = msgspec.json.encode([job, sources, self._loads[job.window, job.part]])
        return hashlib.sha256(basis).hexdigest()[:32]


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The file's lines without those that were broken off; none where it is not there."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def _append(path: Path, row: dict[str, Any]) -> None:
    """Add a line; the empty one before it ends what was broken off."""
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(row) + "\n")


def describe(job: Job) -> str:
    return f"{job.window}, {job.part}, seed {job.seed}: {job.entry.label}"


def digest(names: Iterable[str]) -> str:
    """Digest of the Python files of these folders, and of these files, of the repository."""
    found = hashlib.sha256()
    for name in names:
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(file.read_bytes())
    return found.hexdigest()


def compute(window: Window, job: Job, trials: Path) -> Outcome:
    """The outcome of one job. An oracle is searched for, or with the targets of another seed only adjusted; the file
    `trials` has what a search that was broken off has tried."""
    known = {row["entry"]: msgspec.convert(row["outcome"], Outcome) for row in _read_lines(trials)}

    def try_entry(entry: Entry) -> Outcome:
        key = msgspec.json.encode(entry).decode()
        if key not in known:
            known[key] = play(window, make_run(entry), job.seed, model_error=job.model_error)
            if job.entry.kind == "oracle":
                _append(trials, {"entry": key, "outcome": msgspec.to_builtins(known[key])})
        return known[key]

    if job.entry.kind != "oracle":
        return try_entry(job.entry)
    if "targets" in job.entry.settings:
        found = oracle.adjust(try_entry, Entry("schedule", job.entry.settings))
    else:
        found = oracle.find(try_entry, window, **job.entry.settings)
    return msgspec.structs.replace(found.outcome, targets=list(found.entry.settings["targets"]))


def run_all(
    jobs: Sequence[Job], windows: Windows, store: Store, processes: int, on_done: Callable[[Job, Outcome, int], None]
) -> list[Outcome]:
    """The outcomes of the jobs, in their order; known ones from the store. on_done: called with each that is new, and
    the number that are left."""
    new = [job for job in jobs if store.get(job) is None]
    for left, (job, outcome) in zip(
        range(len(new) - 1, -1, -1), _compute_all(new, windows, store, processes), strict=True
    ):
        store.put(job, outcome)
        on_done(job, outcome, left)
    found = [store.get(job) for job in jobs]
    assert all(outcome is not None for outcome in found)
    return [outcome for outcome in found if outcome is not None]


def _compute_all(jobs: Sequence[Job], windows: Windows, store: Store, processes: int) -> Iterator[tuple[Job, Outcome]]:
    """Jobs with their outcomes, as they are done."""
    chosen = [(windows[job.window][job.part == "scored"], job, store.trials(job)) for job in jobs]
    if processes == 1 or len(jobs) < 2:
        yield from ((each[1], compute(*each)) for each in chosen)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
        by_future = {pool.submit(compute, *each): each[1] for each in chosen}
        for future in as_completed(by_future):
            yield by_future[future], future.result()
