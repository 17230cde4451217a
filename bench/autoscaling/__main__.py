"""Autoscalers compared in the simulator: `make bench-autoscale`.

    python -m bench.autoscaling --traces FOLDER [--quick] [--only ours static oracle] [--window conv step]
        [--seeds 5] [--processes 2] [--set target_utilisation=0.65] [--model-error 1.3] [--earlier] [--record]

FOLDER (or PENSTOCK_TEST_DATA) has the traces, see `windows`. Tunes the rivals on earlier windows, freezes them, scores
everybody on later ones; every request that comes counts, refused and late ones as missed. Runs that were made are kept
in bench/autoscaling.cache and not made again, so a bench that was broken off goes on. `--record` writes
bench/autoscaling.json and the pictures of PICTURES into docs; all of them are in the cache's folder with the page.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.autoscaling.contest import NAMES, Contest, Plan, hold_contest
from bench.autoscaling.decision_cost import measure_decision_ms
from bench.autoscaling.frontier import write_frontier
from bench.autoscaling.play import Outcome
from bench.autoscaling.runs import Job, Store, Windows, describe
from bench.autoscaling.summary import format_tables, to_json
from bench.autoscaling.windows import NAMES as WINDOWS
from bench.autoscaling.windows import load_windows
from bench.support.report import FOLDER, commit, hardware
from bench.support.tables import print_cells
from penstock.base.errors import ConfigError

CACHE = FOLDER / "autoscaling.cache"
PICTURES = ("conv", "small")
"""Windows whose frontiers are kept in docs."""
QUICK_WINDOWS = ("step",)
QUICK_ORACLE = {"num_halvings": 2, "num_trims": 1}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _read_options(arguments)
    try:
        windows = load_windows(options.traces, tuple(options.window))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    options.cache.mkdir(parents=True, exist_ok=True)
    if options.earlier:
        windows = {name: (earlier, earlier) for name, (earlier, _) in windows.items()}
    plan = make_plan(options)
    contest = hold_contest(plan, windows, Store(options.cache / "runs.jsonl", windows), options.processes, _tell)
    cost_ms = measure_decision_ms()
    for caption, heads, rows in format_tables(contest, windows):
        print_cells(caption, heads, rows)
    print(f"a decision at 64 replicas and 8 gateways: {cost_ms:.3f} ms of CPU")
    page = write_frontier(contest, windows, options.cache)
    report = options.cache / "autoscaling.json"
    described = _describe(plan, contest, windows, cost_ms) | ({"scored": "earlier windows"} if options.earlier else {})
    report.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    if options.record:
        shutil.copy(report, FOLDER)
        for name in set(PICTURES).intersection(windows):
            shutil.copy(options.cache / f"frontier_{name}.png", FOLDER.parent / "docs")
    print(report, page)
    return 0


def make_plan(options: argparse.Namespace) -> Plan:
    """What the options ask for."""
    return Plan(
        ours=dict(options.set),
        names=options.only,
        windows=options.window,
        num_seeds=options.seeds,
        num_tries=2 if options.quick else options.tries,
        has_frontier=not options.no_frontier,
        oracle=QUICK_ORACLE if options.quick else {},
        model_error=options.model_error,
    )


def _read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.autoscaling", description=(__doc__ or "").partition("\n")[0])
    traces = os.environ.get("PENSTOCK_TEST_DATA")
    parser.add_argument("--traces", type=Path, default=traces and Path(traces), required=traces is None)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="WHO", help=", ".join(NAMES))
    parser.add_argument("--window", nargs="+", choices=WINDOWS, help="default: all")
    parser.add_argument("--seeds", type=int, help="default: 5")
    parser.add_argument("--tries", type=int, default=8, help="settings that a rival may try on each window")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="KEY=VALUE", help="of ours")
    parser.add_argument("--model-error", type=float, default=1.0, help="factor on the costs that replicas report")
    parser.add_argument("--no-frontier", action="store_true", help="only what was frozen")
    parser.add_argument("--quick", action="store_true", help="one window, one seed, two tries: a minute")
    parser.add_argument(
        "--earlier", action="store_true", help="score on the windows on which rivals are tuned, which favours those"
    )
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--record", action="store_true", help="write bench/autoscaling.json")
    options = parser.parse_args(arguments)
    if options.earlier and options.record:
        parser.error("--record is for the later windows, on which nobody's settings were chosen")
    options.window = options.window or list(QUICK_WINDOWS if options.quick else WINDOWS)
    options.seeds = options.seeds or (1 if options.quick else 5)
    return options


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE with a number, true or false") from None


def _tell(job: Job, outcome: Outcome, left: int) -> None:
    print(
        f"{left:4} left  {describe(job)[:100]}: {100 * outcome.attained:.2f} % in target, {outcome.hours:.2f} hours",
        flush=True,
    )


def _describe(plan: Plan, contest: Contest, windows: Windows, cost_ms: float) -> dict[str, Any]:
    return {
        "name": "autoscaling",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "seeds": plan.num_seeds,
        "tries": plan.num_tries,
        "model_error": plan.model_error,
        "decision_ms": round(cost_ms, 4),
        **to_json(contest, windows),
    }


if __name__ == "__main__":
    sys.exit(main())
