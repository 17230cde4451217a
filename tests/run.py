"""`make test`: the unit tests on all cores, then the integration tests one after another, because they watch clocks.

    python -m tests.run [pytest's arguments]

Arguments that choose tests (a path, -k, -m) are pytest's own affair: one run, as asked. The exit status is the first
that is not 0.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ALL = (
    ("tests/unit", "-n", str(os.cpu_count() or 1), "--dist", "loadfile", "--no-loadscope-reorder"),
    ("tests/integration",),
)
CHOOSING = ("-k", "-m", "--lf", "--last-failed", "--ff", "--sw", "--collect-only", "--co")


def runs(arguments: Sequence[str]) -> list[list[str]]:
    """What pytest is called with, a call each."""
    is_chosen = any(argument.startswith(CHOOSING) or Path(argument.split("::")[0]).exists() for argument in arguments)
    return [list(arguments)] if is_chosen else [[*which, *arguments] for which in ALL]


def main() -> int:
    statuses = [
        subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode
        for arguments in runs(sys.argv[1:])
    ]
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
