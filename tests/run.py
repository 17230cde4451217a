"""`make test` and `make test-slow`: unit tests on all cores, integration tests one after another, because they watch
clocks.

    python -m tests.run [--slow [--budget SECONDS]] [pytest's arguments]

Tests with the mark `slow` run with `--slow`, all others without it. With a budget no further file of the integration
tests begins after so many seconds; what is left is named, and another commit begins with another file. Arguments that
choose tests (a path, -k, -m) are pytest's own affair: one run, as asked, slow tests included. The exit status is the
first that is not 0.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CORES = str(os.cpu_count() or 1)
ALL = (
    ("tests/unit", "-m", "not slow", "-n", CORES, "--dist", "loadfile", "--no-loadscope-reorder"),
    ("tests/integration", "-m", "not slow"),
)
SLOW = (("tests/unit", "-m", "slow", "-n", CORES, "--dist", "load"), ("tests/integration", "-m", "slow"))
SLOW_OPTION, BUDGET_OPTION = "--slow", "--budget"
CHOOSING = ("-k", "-m", "--lf", "--last-failed", "--ff", "--sw", "--collect-only", "--co")


def runs(arguments: Sequence[str], now_s: float = 0.0, turn: int = 0) -> list[list[str]]:
    """Arguments of each call of pytest, in order. now_s: Unix time. turn: a number that is another one for each
    commit. Raises ValueError for a budget that is no number."""
    if SLOW_OPTION in arguments:
        rest = [argument for argument in arguments if argument != SLOW_OPTION]
        if BUDGET_OPTION not in rest:
            return [[*which, *rest] for which in SLOW]
        place = rest.index(BUDGET_OPTION)
        budget_s, rest = float("".join(rest[place + 1 : place + 2])), rest[:place] + rest[place + 2 :]
        unit, integration = ([*which, *rest] for which in SLOW)
        return [unit, [*integration, f"--until={now_s + budget_s}", f"--turn={turn}"]]
    is_chosen = any(argument.startswith(CHOOSING) or Path(argument.split("::")[0]).exists() for argument in arguments)
    return [list(arguments)] if is_chosen else [[*which, *arguments] for which in ALL]


def read_turn() -> int:
    """A number of the commit that is checked out; 0 where there is none."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return int(done.stdout[:8] or "0", 16)


def main() -> int:
    """Run pytest as the command line says; the first exit status that is not 0, or 0."""
    statuses = [
        subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode
        for arguments in runs(sys.argv[1:], time.time(), read_turn())
    ]
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
