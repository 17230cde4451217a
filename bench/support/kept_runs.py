"""Outcomes of runs that take long, made by several processes and kept in a file as soon as each is done: a bench that
was broken off goes on where it was.

Not what a run is: that, and the key by which it is known, are the bench's. A key that holds the digest of the sources
that a run rests on makes it anew when they change.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

ROOT = Path(__file__).resolve().parents[2]

JobT = TypeVar("JobT")
OutcomeT = TypeVar("OutcomeT", bound=msgspec.Struct)


class KeptRuns(Generic[OutcomeT]):
    """Outcomes by key, in the file `path` of JSON lines."""

    def __init__(self, path: Path, kind: type[OutcomeT]) -> None:
        self._path = path
        self._known = {row["key"]: msgspec.convert(row["outcome"], kind) for row in read_lines(path)}

    def get(self, key: str) -> OutcomeT | None:
        return self._known.get(key)

    def put(self, key: str, label: str, outcome: OutcomeT) -> None:
        """Keep an outcome. label: what was run, for who reads the file."""
        self._known[key] = outcome
        append_line(self._path, {"key": key, "run": label, "outcome": msgspec.to_builtins(outcome)})


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The file's lines without those that were broken off; none where it is not there."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Add a line; the empty one before it ends what was broken off."""
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(row) + "\n")


def digest(names: Iterable[str]) -> str:
    """Digest of the Python files of these folders, and of these files, of the repository."""
    found = hashlib.sha256()
    for name in names:
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(file.read_bytes())
    return found.hexdigest()


def make_key(parts: Sequence[object]) -> str:
    """A key of what msgspec can write as JSON."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def compute_all(
    jobs: Sequence[JobT], calls: Sequence[Callable[[], OutcomeT]], processes: int
) -> Generator[tuple[JobT, OutcomeT], None, None]:
    """Jobs with their outcomes, as they are done. calls: computes each; what it is made of can be pickled. Calls that
    have not begun when the iterator is closed are not made."""
    if processes == 1 or len(jobs) < 2:
        for job, call in zip(jobs, calls, strict=True):
            yield job, call()
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
        by_future = {pool.submit(call): job for job, call in zip(jobs, calls, strict=True)}
        try:
            for future in as_completed(by_future):
                yield by_future[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
