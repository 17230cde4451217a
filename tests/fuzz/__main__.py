"""Long runs of the fuzz targets: `python -m tests.fuzz --minutes N [--only NAME ...]`; of a running gateway's API:
`python -m tests.fuzz openapi --cases N`.

Each target in turn gets a slice of time with a seed of its own. A fault is printed with its smallest input, and kept
with its seed in .hypothesis/fuzz.jsonl; the next run begins with the seeds kept there. `--only NAME --seed N` repeats
one. The exit status is 1 if anything was found.
"""

import argparse
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.check import Target, check
from tests.fuzz.targets import TARGETS

KEPT = Path(__file__).resolve().parents[2] / ".hypothesis" / "fuzz.jsonl"
EXAMPLES = 500
"""Inputs of one seed."""
HANG_S = 60
"""Time after which one input counts as a hang, seconds."""


class Fault(msgspec.Struct, frozen=True):
    """Something that was found."""

    target: str
    seed: int
    error: str
    given: str
    """The smallest input, as Python writes it; empty where only its seed is known."""


class Hang(BaseException):
    """An input took longer than HANG_S."""


class Tried(NamedTuple):
    num_inputs: int
    fault: Fault | None


def try_seed(name: str, target: Target, number: int, num_examples: int) -> Tried:
    """Give a target the inputs of one seed. Only for the main thread, whose alarm ends a hang."""
    tried: list[Any] = []

    def run_all(run: Callable[[Any], None]) -> None:
        @seed(number)
        @settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(target.inputs)
        def one(given_input: Any) -> None:
            tried.append(given_input)
            signal.alarm(HANG_S)
            try:
                check(run, given_input, target.base_bytes)
            finally:
                signal.alarm(0)

        one()

    try:
        with target.open() as run:
            run_all(run)
    except (Exception, Hang) as error:  # noqa: BLE001 (whatever a parser raises is what is looked for)
        at = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
        return Tried(len(tried), Fault(name, number, what[:500], repr(tried[-1])[:4000] if tried else ""))
    return Tried(len(tried), None)


def kept(path: Path) -> list[Fault]:
    """Faults of earlier runs."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Fault) for line in path.read_bytes().splitlines()]


def keep(path: Path, fault: Fault) -> None:
    """Add a fault to those of earlier runs; of one target and seed there is one."""
    path.parent.mkdir(exist_ok=True)
    known = {(each.target, each.seed): each for each in [*kept(path), fault]}
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in known.values()))


def _stop_hang(_: int, __: FrameType | None) -> None:
    raise Hang(f"an input took longer than {HANG_S} s")


def main() -> int:
    if sys.argv[1:2] == ["openapi"]:
        from tests.fuzz import openapi  # noqa: PLC0415 (schemathesis takes a second that only this needs)

        return openapi.main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", nargs="+", default=list(TARGETS), choices=list(TARGETS), metavar="NAME")
    parser.add_argument("--seed", type=int, help="try this seed alone")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="inputs of a seed")
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, _stop_hang)
    begun_s = time.monotonic()
    rng = random.Random()
    plan = [(name, args.seed) for name in args.only] if args.seed is not None else []
    plan = plan or [(fault.target, fault.seed) for fault in kept(KEPT) if fault.target in args.only]
    counts, found = dict.fromkeys(args.only, 0), dict[str, Fault]()
    while True:
        if not plan:
            plan = [(name, rng.getrandbits(48)) for name in args.only]
        name, number = plan.pop(0)
        tried = try_seed(name, TARGETS[name], number, args.examples)
        counts[name] += tried.num_inputs
        if tried.fault is not None and name not in found:
            sys.stdout.write(f"{name}, seed {number}: {tried.fault.error}\n  {tried.fault.given[:1000]}\n")
            sys.stdout.flush()
        if tried.fault is not None:
            found.setdefault(name, tried.fault)
            keep(KEPT, tried.fault)
        is_over = time.monotonic() - begun_s > 60 * args.minutes if args.seed is None else not plan
        if is_over:
            break
    spent_s = time.monotonic() - begun_s
    sys.stdout.write(f"{sum(counts.values())} inputs in {spent_s:.0f} s: {counts}; {len(found)} targets failed\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
