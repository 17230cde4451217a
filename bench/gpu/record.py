"""The record of a GPU's check: what each step found, in one JSON file that grows from call to call.

Invariants: the file is whole at every moment, since it is replaced and never rewritten; a record is continued by the
same sources on the same GPU, with the same Python, torch and Triton only, else it is set aside.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FINAL = frozenset({"done", "killed"})
"""Results after which a step is not run again: it has ended well, or had all the time that it may take. The others are
`failed`, which is tried again MOST_FAILURES times in all, `missing`, a package of which is looked for again by every
call, and `cut`, which the budget ended."""
BAD = frozenset({"failed", "killed"})
MOST_FAILURES = 2
"""Times that a step fails before it is not run again: the first may be the fault of what was there at the time."""
SOURCES = ("platform", "bench/gpu", "tests/gpu")
"""Folders whose files make what is measured."""

RowData = dict[str, Any]
"""A row: `name`, `ours`, `rival` and `unit` as in `bench.support.report`, and a `note`."""


@dataclass
class StepResult:
    """What a step found, so far."""

    status: str = "cut"
    """`done`, `killed`, `failed`, `missing` or `cut`."""
    seconds: float = 0.0
    note: str = ""
    """Why it failed or is missing: one line."""
    rows: list[RowData] = field(default_factory=list)
    attempts: int = 0
    """Runs that have failed, or had a whole budget and were cut."""


class Record:
    """Results by the step's name, and what they were found with."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        """path: None keeps nothing. about: what goes into the file beside the steps; `identity` decides whether another
        call may continue."""
        self.path = path
        self.about = dict(about)
        self.steps: dict[str, StepResult] = {}

    def is_over(self, name: str) -> bool:
        """Whether the step needs no other run."""
        if name not in self.steps:
            return False
        found = self.steps[name]
        return found.status in FINAL or (found.status == "failed" and found.attempts >= MOST_FAILURES)

    def attempts(self, name: str) -> int:
        """Runs of the step that have come to nothing."""
        return self.steps[name].attempts if name in self.steps else 0

    def put(self, name: str, result: StepResult) -> None:
        """Note what a step has found and save the record."""
        self.steps[name] = result
        self.save()

    def save(self) -> None:
        """Write the file. Raises OSError."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        beside.write_text(json.dumps(self.data(), indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)

    def data(self) -> dict[str, Any]:
        """The record as it is saved: the rows of all steps, as every benchmark's file has them, then the steps."""
        rows = [{**row, "step": name} for name, step in self.steps.items() for row in step.rows]
        steps = {name: {key: value for key, value in asdict(step).items() if key != "rows"}
                 for name, step in self.steps.items()}  # fmt: skip
        saved = datetime.now(UTC).isoformat(timespec="seconds")
        return {"name": "gpu", "time": saved, **self.about, "rows": rows, "steps": steps}


def open_record(path: Path | None, about: Mapping[str, Any]) -> tuple[Record, str]:
    """The record at `path`, to be continued, or a new one; and a sentence that says which. A record of other sources or
    another GPU is renamed to NAME.previous.json, or NAME.previous-2.json and so on. Raises OSError."""
    record = Record(path, about)
    if path is None or not path.exists():
        return record, "A new record."
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        is_same = found["identity"] == about["identity"]
        steps = {name: StepResult(**step) for name, step in found["steps"].items()}
        for row in found["rows"]:
            steps[row["step"]].rows.append({key: value for key, value in row.items() if key != "step"})
    except (ValueError, KeyError, TypeError, AttributeError):
        is_same, steps = False, {}
    if is_same:
        record.steps = steps
        num_over = sum(record.is_over(name) for name in steps)
        return record, f"The record of {path.name} is continued: {num_over} steps are over and not run again."
    aside = _free_name(path)
    path.replace(aside)
    return record, f"{path.name} is of other sources or another machine: it is now {aside.name}."


def _free_name(path: Path) -> Path:
    """NAME.previous.json, or with the first number from 2 on that is not taken."""
    names = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    places = (path.with_name(f"{path.stem}.previous{name}{path.suffix}") for name in names)
    return next(place for place in places if not place.exists())


def digest_of_sources(root: Path, folders: Iterable[str] = SOURCES) -> str:
    """SHA-256 over the Python files of these folders below `root`, names and contents: the same for the same code,
    whether there is a repository or not."""
    state = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_bytes()
            state.update(f"{path.relative_to(root)} {len(text)}\n".encode() + text)
    return state.hexdigest()
