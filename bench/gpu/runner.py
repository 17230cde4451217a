"""Runs steps one after another, each in a process of its own with a time limit, within a budget.

Invariants: what a step has written is in the record within a second, whatever becomes of it; a step that fails, is
killed, or lacks a package leaves a row that says so, and the rest goes on; no process of a step outlives it, and no
temporary file.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench.gpu.plan import Step
from bench.gpu.processes import adopting, children, end_children
from bench.gpu.record import BAD, Record, StepResult
from bench.gpu.rows import read_rows

LEAST_S = 20.0
"""A step is not begun with less than this left of the budget, seconds."""
RESERVE_S = 3.0
"""Time left of the budget for ending a step and saving, seconds."""
POLL_S = 0.2
TAIL_LINES = 12
"""Last lines of a failed step's output that are shown."""
STOPPED = -1000
"""Stands for an exit status where the time was over."""


class Surroundings(NamedTuple):
    """What all steps run with."""

    python: str
    root: Path
    """The checkout."""
    environment: dict[str, str]
    folder: Path
    """Where output and rows go."""
    is_check: bool = False
    """Whether steps run tiny, in Triton's interpreter."""
    scratch: Path | None = None
    """Folder of the steps' own for temporary files, emptied after each; None: nothing is removed."""


def run_steps(
    steps: Sequence[Step],
    record: Record,
    surroundings: Surroundings,
    has: Callable[[str], bool],
    left_s: Callable[[], float],
    say: Callable[[str], None],
) -> list[Step]:
    """Run the steps that the record does not have yet, then those that have come to nothing before; returns those that
    the budget was too short for. has: whether what a step needs is there. left_s: seconds left of the budget."""
    is_first = True
    waiting = sorted(steps, key=lambda step: record.attempts(step.name))
    while waiting:
        step = waiting[0]
        heading = f"[{steps.index(step) + 1}/{len(steps)}] {step.name}"
        missing = [name for name in step.needs if not has(name)]
        if record.is_over(step.name):
            say(f"{heading}: {record.steps[step.name].status} already")
        elif missing:
            note = f"not run: {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"
            attempts = record.attempts(step.name)
            record.put(step.name, StepResult("missing", 0.0, note, [_empty_row(step, note)], attempts))
            say(f"{heading}: {note}")
        elif left_s() < LEAST_S:
            break
        else:
            say(f"{heading} ...")
            result = _run(step, record, surroundings, left_s() - RESERVE_S, is_first=is_first)
            is_first = False
            record.put(step.name, result)
            say(f"{heading}: {result.status} after {result.seconds:.0f} s{result.note and '; '}{result.note}")
        waiting.pop(0)
    was_cut = [step for step in steps if step.name in record.steps and record.steps[step.name].status == "cut"]
    return [*was_cut, *(step for step in waiting if step not in was_cut and not record.is_over(step.name))]


def _run(step: Step, record: Record, surroundings: Surroundings, left_s: float, *, is_first: bool) -> StepResult:
    """The step's result. One that the budget ends before its own limit is cut, and run again by the next call; where it
    had the whole budget, behind all others."""
    limit_s = min(step.limit_s, left_s)
    stem = "".join(character if character.isalnum() else "-" for character in step.name)
    rows_path, log_path = surroundings.folder / f"{stem}.rows", surroundings.folder / f"{stem}.log"
    rows_path.unlink(missing_ok=True)
    command = [surroundings.python, "-m", "bench.gpu.step", step.module, "--parent", str(os.getpid())]
    command += ["--rows", str(rows_path), *(["--check"] if surroundings.is_check else []), "--", *step.arguments]
    begun_s = time.monotonic()
    result = StepResult(attempts=record.attempts(step.name))

    def save() -> None:
        rows = read_rows(rows_path)
        if len(rows) != len(result.rows):
            result.rows, result.seconds = rows, round(time.monotonic() - begun_s, 1)
            record.put(step.name, result)

    status = _wait(command, surroundings, log_path, begun_s + limit_s, save)
    result.rows, result.seconds = read_rows(rows_path), round(time.monotonic() - begun_s, 1)
    if status == STOPPED and limit_s < step.limit_s:
        result.note = _note_of_cut(limit_s, step.limit_s, is_first=is_first)
        result.attempts += is_first
    elif status == STOPPED:
        result.status, result.note = "killed", f"killed after {limit_s:.0f} s, its limit"
    elif status:
        result.status, result.attempts = "failed", result.attempts + 1
        result.note = f"killed by {signal.Signals(-status).name}" if status < 0 else _last_line(log_path, status)
    else:
        result.status = "done"
    if result.status in BAD:
        result.rows.append(_empty_row(step, result.note))
        _show_tail(log_path)
    return result


def _note_of_cut(given_s: float, limit_s: float, *, is_first: bool) -> str:
    when = f", after the others: a budget of {limit_s + RESERVE_S:.0f} s is enough" if is_first else ""
    given = f"the budget ended it after {given_s:.0f} s of the {limit_s:.0f} s that it may take"
    return f"{given}; the next call runs it again{when}"


def _wait(
    command: list[str], surroundings: Surroundings, log_path: Path, end_s: float, save: Callable[[], None]
) -> int:
    """Exit status of the command, STOPPED if it had to be ended. Whatever happens, its processes and its temporary
    files are gone then."""
    process: subprocess.Popen[bytes] | None = None
    with log_path.open("wb") as log, adopting():
        others = children()
        try:
            process = subprocess.Popen(
                command,
                cwd=surroundings.root,
                env=surroundings.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            while process.poll() is None and time.monotonic() < end_s:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                save()
            return STOPPED if process.poll() is None else process.returncode
        finally:
            end_children(others)
            if process is not None:
                process.poll()
            _empty(surroundings.scratch)


def _empty(folder: Path | None) -> None:
    """Remove what is in the folder."""
    with suppress(OSError):
        for path in folder.iterdir() if folder is not None else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _empty_row(step: Step, note: str) -> dict[str, object]:
    return {"name": step.name, "ours": None, "rival": None, "unit": "", "ratio": None, "note": note}


def _last_line(path: Path, status: int) -> str:
    lines = _lines(path)
    return lines[-1][:300] if lines else f"ended with status {status}"


def _show_tail(path: Path) -> None:
    for line in _lines(path)[-TAIL_LINES:]:
        sys.stdout.write(f"    {line}\n")


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [line for line in text.splitlines() if line.strip()]


def count_bad(steps: Iterable[StepResult]) -> int:
    return sum(step.status in BAD for step in steps)
