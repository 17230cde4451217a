"""Checks and measures the engine on an NVIDIA GPU, step by step, the most telling first.

    make bench-gpu PYTHON=python3 WHEELS=FOLDER ARGS="--budget 9m --record FILE"

Needs Python 3.11 or 3.12, torch >= 2.11 for CUDA, Triton >= 3.6, pytest, and for what else is imported the wheels of
`make gpu-wheels`. Installs nothing, and needs neither network nor Ray, Redis or a model. Every step is a process with a
time limit; its rows are in the record at once. A later call with the same code on the same GPU goes on where this one
ended. Status 0: no step has failed. 1: some have. 2: there is nothing to check on, or to check with.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from bench.gpu import plan, wheels
from bench.gpu.record import digest_of_sources, open_record
from bench.gpu.rows import describe
from bench.gpu.runner import Surroundings, count_bad, run_steps

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "bench" / "gpu.json"
PROBE_S = 120
"""Longest time for importing torch and finding the GPU, seconds."""
VERSIONS = ("numpy", "transformers", "pytest", "vllm", "ray")
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


def main(arguments: Sequence[str] | None = None) -> int:
    begun_s = time.monotonic()
    options = parse(arguments)
    try:
        steps = plan.select(plan.STEPS, options.only)
    except ValueError as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 2
    if options.list:
        for step in steps:
            needs = f", needs {' and '.join(step.needs)}" if step.needs else ""
            print(f"{step.name}  ({step.group}, at most {step.limit_s:.0f} s{needs})")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="penstock-gpu-")))
        return _check(options, steps, folder, lambda: begun_s + options.budget - time.monotonic())


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _check(options: argparse.Namespace, steps: Sequence[plan.Step], folder: Path, left_s: Any) -> int:
    site = folder / "site"
    site.mkdir()
    try:
        unpacked = [] if options.wheels is None else wheels.unpack_missing(options.wheels, site)
    except (OSError, ValueError) as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 2
    environment = surrounding(folder, site, is_check=options.check)
    machine = probe(environment)
    problem = machine.get("error") or (None if options.check or machine["gpu"] else _NO_GPU)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    logs = options.logs or folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    path = options.record or (None if options.check else RECORD)
    record, sentence = open_record(path, about(options, machine, site, unpacked))
    print(f"{machine['gpu'] or 'the CPU, in the interpreter: these times mean nothing'}; torch {machine['torch']}, "
          f"Triton {machine['triton']}; {len(unpacked)} wheels unpacked. {sentence}", flush=True)  # fmt: skip
    if options.check:
        steps = [step for step in steps if step.is_checked]
    around = Surroundings(sys.executable, ROOT, environment, logs, options.check)
    has = partial(wheels.is_installed, path=[site])
    left = run_steps(steps, record, around, has, left_s, partial(print, flush=True))
    print()
    for step in steps:
        for row in record.steps[step.name].rows if step.name in record.steps else ():
            print(describe(row))
    wanted = [record.steps[step.name] for step in steps if step.name in record.steps]
    num_bad = count_bad(wanted)
    print(f"{len(wanted)} steps of {len(steps)}, {num_bad} failed"
          + (f"; the budget is over, {len(left)} are left: the same command goes on with them" if left else "")
          + ("" if path is None else f"; record: {path.name}"))  # fmt: skip
    return 1 if num_bad else 0


_NO_GPU = (
    "This needs an NVIDIA GPU and torch made for CUDA, and torch finds no GPU here: nothing was checked or measured. "
    "`--check` runs all of it, tiny, on the CPU."
)


def surrounding(folder: Path, site: Path, *, is_check: bool) -> dict[str, str]:
    """Environment of the steps. `penstock` is found also where the checkout came without its links."""
    source = folder / "src"
    source.mkdir(exist_ok=True)
    for name, place in (("penstock", "platform"), ("penstock_loadtest", "loadtest")):
        if not (source / name).exists():
            (source / name).symlink_to(ROOT / place)
    inherited = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = os.pathsep.join([str(source), str(ROOT), *before, str(site)])
    own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if is_check:
        own |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return inherited | own


def probe(environment: dict[str, str]) -> dict[str, Any]:
    """What `bench.gpu.probe` says; `error` where it can't."""
    command = [sys.executable, "-m", "bench.gpu.probe"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PROBE_S, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"error": f"torch can't be asked what machine this is: {error}"}
    return found


def about(options: argparse.Namespace, machine: dict[str, Any], site: Path, unpacked: list[str]) -> dict[str, Any]:
    """What the record says beside its rows."""
    sources = digest_of_sources(ROOT)
    return {
        "identity": {"sources": sources, "gpu": machine["gpu"], "torch": machine["torch"], "check": options.check},
        "commit": options.commit or _commit(),
        "hardware": {**machine, "cores": os.cpu_count() or 0},
        "versions": wheels.versions(VERSIONS, [site]),
        "wheels": unpacked,
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


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("bench.gpu: interrupted; the record has what was found, and the same command goes on", file=sys.stderr)
        sys.exit(130)
