"""Routing over real processes: `make bench-routing-live`.

    python -m bench.routing_live [--traces FOLDER] [--only contest|reuse|mooncake] [--load groups adapters]
        [--rounds 3] [--quick] [--record]

contest: ours beside the two best rivals of each load (by bench/routing.json), in turn, as the simulated contest has
them; 20 minutes. reuse: conversations routed by ours and pinned to replicas by hand; 9 minutes. mooncake: a window of
its conversations beside one cache of the replicas' total size; 4 minutes a round. FOLDER (or PENSTOCK_TEST_DATA) has
Mooncake's traces; what needs one is left out without it. `--record` writes bench/routing-live.json, where parts that
were not played stay as they are. Exit status 1 where a goal is missed. Nothing else may run on the machine.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.routing.contest import Cell
from bench.routing.loads import FILES, NAMES, load_loads
from bench.routing.summary import WANTED_RATIO, Verdict, estimate, format_cell, format_verdicts, judge, to_json
from bench.routing_live import contest, mooncake, reuse
from bench.routing_live.live_platform import NUM_REPLICAS, live_platform
from bench.routing_live.policies import OURS, PINNED
from bench.routing_live.rivals import read_rivals
from bench.routing_live.summary import Comparison, compare, read_reuse, show, word
from bench.support.report import FOLDER, commit, hardware
from bench.support.tables import print_cells
from penstock_loadtest.workload.plan import draw_plan

ROUNDS: Final = 3
SIMULATED_REPLICAS: Final = 8
"""Size of the simulated contest whose record names the rivals."""
RECORD: Final = FOLDER / "routing-live.json"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a part of the bench found."""

    is_met: bool
    figures: dict[str, Any]


def play_contest(options: argparse.Namespace) -> Part:
    loads, missing = load_loads(options.traces, options.load)
    for sentence in missing:
        _note(sentence)
    found = read_rivals(FOLDER / "routing.json", SIMULATED_REPLICAS, contest.PART)
    rivals = {load.name: found[load.name].names for load in loads}
    rows = [
        [
            name,
            ", ".join(f"{each} {found[name].goodput[each]:.2f}/s, {found[name].p90_s[each]:.2f} s" for each in names),
        ]
        for name, names in rivals.items()
    ]
    caption = f"the two best rivals of each load, simulated at {SIMULATED_REPLICAS} replicas"
    print_cells(caption, ["", "goodput and p90 of the TTFT there"], rows)
    seconds = contest.QUICK_LOAD_S if options.quick else contest.LOAD_S
    with live_platform(speed=contest.SPEED) as platform:
        outcomes, most_cpu = contest.hold(platform, loads, rivals, options.rounds, seconds, OURS, _note)
    cells = {Cell(name, NUM_REPLICAS, contest.PART): policies for name, policies in outcomes.items()}
    uneven = {load.name: load.is_uneven for load in loads}
    for cell, policies in cells.items():
        print_cells(*format_cell(cell, policies))
    print_cells(*format_verdicts(cells, uneven))
    print(f"gateway and client took {100 * most_cpu:.0f} % of the cores at the most")
    is_met = all(_is_won(judge(policies), is_uneven=uneven[cell.load]) for cell, policies in cells.items())
    return Part(
        is_met=is_met,
        figures={
            "speed": contest.SPEED,
            "seconds": seconds,
            "most_cpu": round(most_cpu, 3),
            "left_out": missing,
            "cells": to_json(cells, uneven),
        },
    )


def play_reuse(options: argparse.Namespace) -> Part:
    seconds = reuse.QUICK_LOAD_S if options.quick else reuse.LOAD_S
    runs: dict[tuple[str, int], list[Any]] = {(name, n): [] for name in (OURS, PINNED) for n in reuse.SHARED_TOKENS}
    with live_platform() as platform:
        for number in range(options.rounds):
            for policy in (OURS, PINNED) if number % 2 else (PINNED, OURS):
                platform.route_by(policy)
                for shared_tokens in reuse.SHARED_TOKENS:
                    scenario = reuse.make_scenario(shared_tokens, number, seconds)
                    run = platform.play(scenario, draw_plan(scenario))
                    found = read_reuse(run.records, run.turns_not_sent)
                    runs[policy, shared_tokens].append(found)
                    _note(
                        f"round {number + 1}, {shared_tokens} shared tokens, {policy}: {100 * found.cached:.2f} % from"
                        f" the cache, TTFT {1e3 * found.ttft_s:.1f} ms, gateway and client"
                        f" {100 * (run.gateway_cpu + run.client_cpu):.0f} % of the cores"
                    )
    compared = [compare(n, runs[OURS, n], runs[PINNED, n]) for n in reuse.SHARED_TOKENS]
    print_cells(
        "conversations: ours beside sessions pinned by hand",
        ["shared tokens", "share, ours", "pinned", "ours / pinned", "wanted", "TTFT, ours", "pinned", "ours / pinned",
         "wanted", ""],
        [_describe(each) for each in compared],
    )  # fmt: skip
    return Part(
        is_met=all(map(_is_met, compared)),
        figures={"seconds": seconds, "compared": msgspec.to_builtins([each._asdict() for each in compared])},
    )


def play_mooncake(options: argparse.Namespace) -> Part | None:
    if options.traces is None or not (options.traces / FILES["conversation"]).is_file():
        _note("mooncake needs the trace; name its folder as --traces, or set PENSTOCK_TEST_DATA")
        return None
    window = mooncake.read_window(options.traces, mooncake.QUICK_WINDOW_S if options.quick else mooncake.WINDOW_S)
    found = []
    with live_platform(window.num_blocks) as platform:
        for number in range(1 if options.quick else options.rounds):
            platform.route_by(OURS)
            run = mooncake.play_window(platform, window)
            found.append(read_reuse(run.records, run.turns_not_sent))
            _note(
                f"round {number + 1}: {100 * found[-1].cached:.2f} % from the caches, TTFT {found[-1].ttft_s:.2f} s,"
                f" {found[-1].not_finished} not finished"
            )
    share = estimate([run.cached for run in found])
    part = share.mean / window.one_cache
    is_met = part >= mooncake.WANTED and not any(run.not_finished for run in found)
    print_cells(
        f"Mooncake's conversations, {found[0].requests} requests, {NUM_REPLICAS} x {window.num_blocks} blocks",
        ["share from the caches", "one cache of their size", "an endless one", "ours / one cache", "wanted", ""],
        [[show(share, 4), f"{window.one_cache:.4f}", f"{window.endless:.4f}", f"{part:.3f}", f"{mooncake.WANTED}",
          word(is_met=is_met)]],
    )  # fmt: skip
    return Part(
        is_met=is_met,
        figures={
            "requests": found[0].requests,
            "num_blocks": window.num_blocks,
            "shares": [round(run.cached, 5) for run in found],
            "ttft_s": [round(run.ttft_s, 4) for run in found],
            "one_cache": round(window.one_cache, 5),
            "endless": round(window.endless, 5),
            "part": round(part, 4),
        },
    )


PARTS: Final[dict[str, Callable[[argparse.Namespace], Part | None]]] = {
    "contest": play_contest,
    "reuse": play_reuse,
    "mooncake": play_mooncake,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _read_options(arguments)
    record = json.loads(RECORD.read_bytes()) if RECORD.is_file() else {"name": "routing-live"}
    missed = []
    for name in options.only:
        part = PARTS[name](options)
        if part is None:
            continue
        if not part.is_met:
            missed.append(name)
        record[name] = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "hardware": hardware(),
            "rounds": options.rounds,
            "is_met": part.is_met,
            **part.figures,
        }
        if options.record:
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"goals that are missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


def _read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.routing_live", description=(__doc__ or "").partition("\n")[0])
    traces = os.environ.get("PENSTOCK_TEST_DATA")
    parser.add_argument("--traces", type=Path, default=traces and Path(traces))
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--load", nargs="+", choices=NAMES, default=list(NAMES), help="of the contest")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument(
        "--quick", action="store_true", help="short runs, one round: whether it works, not what it says"
    )
    parser.add_argument("--record", action="store_true", help="write bench/routing-live.json")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else ROUNDS)
    return options


def _is_won(verdict: Verdict, *, is_uneven: bool) -> bool:
    """Whether no rival's goodput is higher beyond the interval and, where prompts share unevenly, ours is that much
    quicker than the quickest."""
    return not verdict.better and (not is_uneven or verdict.p90_ratio <= WANTED_RATIO)


def _describe(each: Comparison) -> list[str]:
    return [
        f"{each.shared_tokens}",
        f"{100 * each.ours.cached:.2f} %",
        f"{100 * each.pinned.cached:.2f} %",
        show(each.share),
        f"{reuse.WANTED_SHARE}",
        f"{1e3 * each.ours.ttft_s:.1f} ms",
        f"{1e3 * each.pinned.ttft_s:.1f} ms",
        show(each.ttft),
        f"{reuse.WANTED_TTFT}",
        word(is_met=_is_met(each)),
    ]


def _is_met(each: Comparison) -> bool:
    return each.is_met(reuse.WANTED_SHARE, reuse.WANTED_TTFT)


def _note(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
