"""`make test` and `make test-slow`: unit tests on all cores, integration tests one after another, because they watch
clocks.

    python -m tests.run [--slow] [pytest's arguments]

Tests with the mark `slow` run with `--slow`, all others without it. Arguments that choose tests (a path, -k, -m) are
pytest's own affair: one run, as asked, slow tests included. The exit status is the first that is not 0.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CORES = str(os.cpu_count() or 1)
ALL = (
    ("tests/unit", "-m", "not slow", "-n", CORES, "--dist", "loadfile", "--no-loadscope-reorder"),
    ("tests/integration", "-m", "not slow"),
)
SLOW = (("tests/unit", "-m", "slow", "-n", CORES, "--dist", "load"), ("tests/integration", "-m", "slow"))
SLOW_OPTION = "--slow"
CHOOSING = ("-k", "-m", "--lf", "--last-failed", "--ff", "--sw", "--collect-only", "--co")


def runs(arguments: Sequence[str]) -> list[list[str]]:
    """Arguments of each call of pytest, in order."""
    if SLOW_OPTION in arguments:
        return [[*which, *(argument for argument in arguments if argument != SLOW_OPTION)] for which in SLOW]
    is_chosen = any(argument.startswith(CHOOSING) or Path(argument.split("::")[0]).exists() for argument in arguments)
    return [list(arguments)] if is_chosen else [[*which, *arguments] for which in ALL]


def main() -> int:
    """Run pytest as the command line says; the first exit status that is not 0, or 0."""
    statuses = [
        subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode
        for arguments in runs(sys.argv[1:])
    ]
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
