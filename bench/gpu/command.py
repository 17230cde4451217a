"""Checks and measures the engine on an NVIDIA GPU, step by step, the most telling first.

    make bench-gpu PYTHON=python3 WHEELS=FOLDER ARGS="--budget 9m --record FILE"

Needs Python 3.11 or newer, torch >= 2.11 for CUDA, Triton >= 3.6, pytest, and for what else is imported the wheels of
`make gpu-wheels`. Installs nothing, and needs neither network nor Ray, Redis or a model. Every step is a process with a
time limit; its rows are in the record at once. A later call with the same code on the same GPU goes on where this one
ended. Status 0: no step has failed. 1: some have. 2: there is nothing to check on, or to check with.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from bench.gpu import plan, probe, wheels
from bench.gpu.environment import ROOT, cache_folder, inherited_path, scratch, surrounding
from bench.gpu.record import Record, digest_of_sources, open_record
from bench.gpu.rows import describe
from bench.gpu.runner import Surroundings, count_bad, run_steps

RECORD = ROOT / "bench" / "gpu.json"
VERSIONS = ("numpy", "transformers", "pytest", "vllm", "ray")
"""Distributions whose versions the record has, beside those of torch and Triton."""
INTERRUPTED = 130
HANG_UPS = (signal.SIGTERM, signal.SIGHUP)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def seconds(text: str) -> float:
    """A time such as 540, 90s or 9m, in seconds. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no time; write 540, 90s or 9m")
    return float(found[1]) * _UNITS[found[2]]


def _budget(text: str) -> float:
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=_budget, default=float("inf"), help="time for this call: 540, 90s, 9m")
    parser.add_argument("--record", type=Path, help=f"file of the record ({RECORD.relative_to(ROOT)}; none in a check)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels, for what is not installed")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="steps, or groups: tests, figures")
    parser.add_argument("--logs", type=Path, help="folder for the steps' output (a temporary one)")
    parser.add_argument("--commit", help="the commit, where this is no git repository")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    parser.add_argument("--check", action="store_true", help="all of it tiny, on the CPU; its times mean nothing")
    return parser.parse_args(arguments)


class Prepared(NamedTuple):
    """All that steps are run with."""

    record: Record
    surroundings: Surroundings
    has: Callable[[str], bool]
    """Whether a package is there, in the version that a line such as `ray>=2.60` asks."""
    dependencies: list[str]
    """Packages of the whole platform, such lines."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its status."""
    begun_s = time.monotonic()
    options = parse(arguments)
    try:
        steps = plan.select(plan.STEPS, options.only)
    except ValueError as error:
        return _refuse(error)
    if options.list:
        _list(steps)
        return 0
    try:
        with ExitStack() as cleanup:
            cleanup.enter_context(_ending_on_signals())
            try:
                # the name is short for the sake of sockets, see environment.scratch
                folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="gpu-")))
                prepared = _prepare(options, folder)
            except (OSError, ValueError) as error:
                return _refuse(error)
            return _run(options, steps, prepared, lambda: begun_s + options.budget - time.monotonic())
    except OSError as error:
        return _refuse(f"the record can't be kept: {error}")
    except KeyboardInterrupt:
        print("bench.gpu: interrupted; the record has what was found, and the same command goes on", file=sys.stderr)
        return INTERRUPTED


def _refuse(reason: object) -> int:
    print(f"bench.gpu: {reason}", file=sys.stderr)
    return 2


def _list(steps: Sequence[plan.Step]) -> None:
    for step in steps:
        needs = f", needs {' and '.join(step.needs)}" if step.needs else ""
        print(f"{step.name}  ({step.group}, at most {step.limit_s:.0f} s{needs})")


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP where nohup does not ignore it, end the steps as Ctrl-C does: an ssh connection that is lost
    leaves nothing running."""
    numbers = [number for number in HANG_UPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    for number in HANG_UPS:
        signal.signal(number, signal.SIG_IGN)  # what is running is ended in peace
    raise KeyboardInterrupt


def _prepare(options: argparse.Namespace, folder: Path) -> Prepared:
    """Raises OSError and ValueError where there is nothing to check on, or to check with."""
    site = folder / "site"
    site.mkdir()
    unpacked, has, dependencies = _unpack(options.wheels, site)
    path = options.record or (None if options.check else RECORD)
    path = path and path.absolute()
    environment = surrounding(folder, site, cache_folder(path, folder, is_check=options.check), is_check=options.check)
    machine = probe.ask(sys.executable, ROOT, environment)
    problem = probe.refusal(machine, is_check=options.check)
    if problem:
        raise ValueError(problem)
    logs = options.logs or folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    record, sentence = open_record(path, about(options, machine, site, unpacked))
    record.save()  # a folder that can't be written to is found out before anything is measured
    print(f"{machine['gpu'] or 'the CPU, in the interpreter: these times mean nothing'}; Python {machine['python']}, "
          f"torch {machine['torch']}, Triton {machine['triton']}; {len(unpacked)} wheels unpacked. {sentence}",
          flush=True)  # fmt: skip
    surroundings = Surroundings(sys.executable, ROOT, environment, logs, options.check, scratch(folder))
    return Prepared(record, surroundings, has, dependencies)


def _run(
    options: argparse.Namespace, wanted: Sequence[plan.Step], prepared: Prepared, left_s: Callable[[], float]
) -> int:
    """Status of the command. Raises OSError where the record can't be kept."""
    record, surroundings, has, dependencies = prepared
    checked = [step for step in wanted if step.is_checked or not options.check]
    steps = plan.with_dependencies(checked, dependencies)
    left = run_steps(steps, record, surroundings, has, left_s, partial(print, flush=True))
    return _say_end(steps, record, left)


def _say_end(steps: Sequence[plan.Step], record: Record, left: Sequence[plan.Step]) -> int:
    """Print all rows and what is left; returns the status."""
    print()
    wanted = [record.steps[step.name] for step in steps if step.name in record.steps]
    for result in wanted:
        for row in result.rows:
            print(describe(row))
    num_bad = count_bad(wanted)
    print(f"{len(wanted)} steps of {len(steps)}, {num_bad} failed"
          + (f"; the budget is over, {len(left)} are left: the same command goes on with them" if left else "")
          + ("" if record.path is None else f"; record: {record.path.name}"))  # fmt: skip
    return 1 if num_bad else 0


def _unpack(folder: Path | None, site: Path) -> tuple[list[str], Callable[[str], bool], list[str]]:
    """The wheels that were unpacked below `site`, by their file names; whether a package is there, in the version that
    is asked; and what a platform needs. Raises ValueError where packages are missing or do not fit together."""
    if not wheels.is_installed("pytest"):
        raise ValueError(f"{sys.executable} has no pytest, which this needs beside torch and Triton")
    from bench.gpu import versions  # noqa: PLC0415 (it needs what comes with pytest)

    names = wheels.listed(wheels.LIST.read_text(encoding="utf-8"))
    unpacked = [] if folder is None else wheels.unpack_missing(folder, site)
    lacking = wheels.lacking(names, [site])
    if lacking:
        there = "" if folder is None else f", nor has {folder} their wheels"
        raise ValueError(
            f"{sys.executable} has no {', '.join(lacking)}{there}; `make gpu-wheels WHEELS=FOLDER`, where there is a "
            "network, downloads them"
        )
    project = versions.pyproject(ROOT)
    places = [*inherited_path(), str(site), *sys.path]
    find = partial(versions.conflicts, names, versions.ranges(project, [*names, "pytest"]), places)
    if folder is not None and (found := find()):
        unpacked += wheels.unpack_named(folder, site, {conflict.name for conflict in found})
    if found := find():
        raise ValueError("; ".join(conflict.sentence for conflict in found))
    dependencies = [str(requirement) for requirement in versions.project_requirements(project)]
    return unpacked, partial(versions.has, look_up=versions.installed(places)), dependencies


def about(
    options: argparse.Namespace, machine: Mapping[str, Any], site: Path, unpacked: Sequence[str]
) -> dict[str, Any]:
    """What the record says beside its rows."""
    made_with = {name: machine[name] for name in ("gpu", "python", "torch", "triton")}
    return {
        "identity": {"sources": digest_of_sources(ROOT), **made_with, "check": options.check},
        "commit": options.commit or _commit(),
        "hardware": {**machine, "cores": os.cpu_count() or 0},
        "versions": wheels.versions(VERSIONS, [site]),
        "wheels": list(unpacked),
        "command": "python -m bench.gpu",
        "notes": ["a check of the steps on the CPU: these times mean nothing"] if options.check else [],
    }


def _commit() -> str:
    """Hash of the checkout's commit, with `-dirty` where tracked files differ; `unknown` outside a repository."""
    try:
        head, changed = (
            subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for arguments in (
                ("rev-parse", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "--", ".", ":(top,exclude)bench/*.json"),
            )
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("-dirty" if changed else "")
