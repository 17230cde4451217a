"""One step in a process of its own: `python -m bench.gpu.step MODULE --rows FILE [--parent PID] [--check] --
ARGUMENTS`.

Status 0: it holds. 1: something does not, and a row says what. Anything else is an exception or a signal.
"""

import argparse
import importlib
import sys
from pathlib import Path

from bench.gpu.processes import end_with
from bench.gpu.rows import Rows


def main() -> int:
    parser = argparse.ArgumentParser(description="One step of a GPU's check.")
    parser.add_argument("module", help="module of bench.gpu.steps")
    parser.add_argument("--rows", type=Path, help="file that rows are added to")
    parser.add_argument("--parent", type=int, help="process with which this one is to end")
    parser.add_argument("--check", action="store_true", help="tiny, on the CPU, in Triton's interpreter")
    end = sys.argv.index("--")
    own, arguments = sys.argv[1:end], sys.argv[end + 1 :]  # the step's own options are its own affair
    options = parser.parse_args(own)
    if options.parent is not None:
        end_with(options.parent)
    step = importlib.import_module(f"bench.gpu.steps.{options.module}")
    is_good: bool = step.run(Rows(options.rows), *arguments, is_check=options.check)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
