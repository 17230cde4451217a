"""Routing policies compared in the simulator: `make bench-routing`.

    python -m bench.routing [--traces FOLDER] [--quick] [--load groups adapters] [--only ours Ray] [--replicas 8 64]
        [--parts 0.5 0.7 0.9] [--seeds 5] [--processes 2] [--minutes 5] [--floor] [--record]

FOLDER (or PENSTOCK_TEST_DATA) has Mooncake's traces; the loads that need one are left out without it. Every request
counts, refused ones as missed. Runs that were made are kept in bench/routing.cache and not made again, so a bench that
was broken off, or that `--minutes` ended, goes on; its figures are then of the seeds that every policy has played.
`--floor` says beside each cell's p90 TTFT what no routing can go below.
`--record` writes bench/routing.json and docs/routing_contest.png; otherwise both stay in the cache's folder with the
page.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from bench.routing.contest import Plan, Store, hold_contest, list_jobs
from bench.routing.floor import find_floors, format_floors
from bench.routing.loads import NAMES, Load, load_loads, mean_work_s
from bench.routing.pictures import NAME, write_page
from bench.routing.play import Job, Outcome
from bench.routing.rivals import POLICIES
from bench.routing.summary import MOST_SEEDS, OURS, format_cell, format_verdicts, to_json
from bench.support.report import FOLDER, commit, hardware
from bench.support.tables import print_cells

CACHE = FOLDER / "routing.cache"
PARTS = (0.5, 0.7, 0.9)
QUICK_SECONDS = 40.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _read_options(arguments)
    loads, missing = load_loads(options.traces, options.load)
    for sentence in missing:
        print(sentence, file=sys.stderr)
    if not loads:
        return 2
    options.cache.mkdir(parents=True, exist_ok=True)
    plan = make_plan(options)
    store = Store(options.cache / "runs.jsonl", loads)
    limit_s = None if options.minutes is None else 60 * options.minutes
    contest = hold_contest(plan, loads, store, options.processes, _Progress(), limit_s)
    left = sum(store.get(job) is None for job in list_jobs(plan, loads))
    if not contest:
        print("no cell has been played by every policy yet; call again to go on", file=sys.stderr)
        return 1
    uneven = {load.name: load.is_uneven for load in loads}
    for cell, policies in contest.items():
        print_cells(*format_cell(cell, policies))
    print_cells(*format_verdicts(contest, uneven))
    floors = find_floors(contest, loads, plan.seconds) if options.floor else {}
    if floors:
        print_cells(*format_floors(floors))
    page = write_page(contest, uneven, options.cache)
    report = options.cache / "routing.json"
    record = _describe(plan, loads, missing, left) | {
        "cells": to_json(contest, uneven),
        "floors": {label: floor._asdict() for label, floor in floors.items()},
    }
    report.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.record:
        shutil.copy(report, FOLDER)
        shutil.copy(options.cache / f"{NAME}.png", FOLDER.parent / "docs")
    print(report, page, f"{left} runs are left" if left else "all runs are made")
    return 0


def make_plan(options: argparse.Namespace) -> Plan:
    """What the options ask for. Ours always plays."""
    only = [name for name in POLICIES if name in options.only or name == OURS]
    return Plan(options.replicas, only, options.parts, options.seeds, QUICK_SECONDS if options.quick else None)


def _read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.routing", description=(__doc__ or "").partition("\n")[0])
    traces = os.environ.get("PENSTOCK_TEST_DATA")
    parser.add_argument("--traces", type=Path, default=traces and Path(traces))
    parser.add_argument("--load", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--only", nargs="+", choices=list(POLICIES), default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--replicas", nargs="+", type=int, choices=(8, 64), help="default: 8 64")
    parser.add_argument("--parts", nargs="+", type=float, help="rates, as parts of the capacity")
    parser.add_argument("--seeds", type=int, choices=range(1, MOST_SEEDS + 1), help="default: 5")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, help="stop after so long; call again to go on")
    parser.add_argument("--quick", action="store_true", help="8 replicas, one rate, two seeds, short runs: a minute")
    parser.add_argument("--floor", action="store_true", help="the p90 that no routing can go below, too: some minutes")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--record", action="store_true", help="write bench/routing.json and docs/routing_contest.png")
    options = parser.parse_args(arguments)
    if set(options.only) <= {OURS}:
        parser.error(f"--only: name a policy beside {OURS}, which always plays")
    options.replicas = options.replicas or ([8] if options.quick else [8, 64])
    options.parts = options.parts or ([0.7] if options.quick else list(PARTS))
    options.seeds = options.seeds or (2 if options.quick else 5)
    return options


class _Progress:
    """Prints each run that is done, with an estimate of the time that is left."""

    def __init__(self) -> None:
        self._begin_s, self._done = monotonic(), 0

    def __call__(self, job: Job, outcome: Outcome, left: int) -> None:
        self._done += 1
        left_s = (monotonic() - self._begin_s) / self._done * left
        print(
            f"{left:4} left, about {left_s / 60:.0f} min  {job.label}: {outcome.goodput:.2f} of {outcome.rate:.2f} "
            f"requests/s in target, TTFT p90 {outcome.p90_s:.2f} s",
            flush=True,
        )


def _describe(plan: Plan, loads: Sequence[Load], missing: Sequence[str], left: int) -> dict[str, Any]:
    return {
        "name": "routing",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "simulated": True,
        "seeds": plan.num_seeds,
        "runs_left": left,
        "left_out": list(missing),
        "work_s": {load.name: round(mean_work_s(load), 4) for load in loads},
    }


if __name__ == "__main__":
    sys.exit(main())
