"""Runs of entries on windows, by several processes, each kept in a file as soon as it is done: a bench that was broken
off goes on where it was.

A run is known by its entry, window, part, seed and the sources that it rests on, so that a change of the policy plays
ours anew and nobody else.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from bench.autoscaling.entries import Entry, make_run
from bench.autoscaling.play import Outcome, play
from bench.autoscaling.windows import Window

ROOT = Path(__file__).resolve().parents[2]
BASIS = ("platform/sim", "platform/router", "platform/perf", "bench/autoscaling/play.py", "bench/autoscaling/rivals")
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


class Store:
    """Outcomes by job, in a file of JSON lines. sources: their digests go into every key."""

    def __init__(self, path: Path, windows: Windows) -> None:
        self._path = path
        self._windows = windows
        self._basis, self._policy = digest(BASIS), digest(BASIS + POLICY)
        self._known: dict[str, Outcome] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                row = json.loads(line)
                self._known[row["key"]] = msgspec.convert(row["outcome"], Outcome)

    def get(self, job: Job) -> Outcome | None:
        return self._known.get(self._key(job))

    def put(self, job: Job, outcome: Outcome) -> None:
        key = self._key(job)
        self._known[key] = outcome
        line = {"key": key, "label": job.entry.label[:80], "outcome": msgspec.to_builtins(outcome)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _key(self, job: Job) -> str:
        sources = self._policy if job.entry.kind == "ours" else self._basis
        window = pick(self._windows, job)
        load = hashlib.sha256(repr(window).encode()).hexdigest()
        return hashlib.sha256(msgspec.json.encode([job, sources, load])).hexdigest()[:32]


def pick(windows: Windows, job: Job) -> Window:
    return windows[job.window][job.part == "scored"]


def digest(folders: Iterable[str]) -> str:
    """Digest of the Python files of these folders of the repository."""
    found = hashlib.sha256()
    for name in folders:
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(file.read_bytes())
    return found.hexdigest()


def run_all(
    jobs: Sequence[Job], windows: Windows, store: Store, processes: int, on_done: Callable[[Job, Outcome], None]
) -> dict[Job, Outcome]:
    """The outcome of each job, known ones from the store. on_done: called with each that is new."""
    raise NotImplementedError


def _unused() -> Iterator[Future[Outcome]]:
    yield from ()


__all__ = ["ProcessPoolExecutor", "make_run", "play"]
