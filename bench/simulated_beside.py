"""The simulator beside the real platform: the same loads, played and simulated, and how far apart their figures are.

    python -m bench.simulated_beside [--runs 3] [--levels 0.6 0.9 1.2] [--only engine|timed] [--out FOLDER]

engine: one replica of the demo model, pinned to the second core; its step times are measured before anything is played,
by bench/support/step_table.py, with the machine else at rest. How much longer steps take while a gateway and a client
compute beside them is one factor, taken from a run that does not count. timed: two to eight timed replicas, the
autoscaler choosing; how long a replica takes to start is taken from the second of two runs that do not count. Nothing
is fitted on what is compared.

A level is a part of the knee: of the highest rate at which 95 % of the requests of a constant load are in target,
simulated. Each real run is of another seed, and the simulator plays each of these seeds; compared are medians over the
seeds. Bounds: p50 and p90 within 10 %, p99 within 15 % or what the real runs differ by, whichever is more,
replica-seconds within 10 %, attainment within 2 points. Exit status 1 where a bound is missed. Fifty minutes on two
cores; nothing else may run.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import yaml

from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.report import Row, write_report
from penstock.cli.config import load_platform
from penstock.cli.simulate import simulated_pools
from penstock.router.config import GatewayConfig
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.results import simulate
from penstock.workers.config import TimedConfig
from penstock_loadtest.results.summary import Distribution, Summary
from penstock_loadtest.scenario import load_scenario

ENGINE_CORE, OTHER_CORE = 1, 0
MOST = 8
KNEE_SHARE = 0.95
WARM_UP_SEED, FIRST_SEED = 99, 1
WARM_UP_LEVEL = 0.75
MOST_SLOWDOWN = 2.0
CALM_S, BURST_S, AFTER_S = 20.0, 80.0, 20.0
"""Seconds of the loads of scaled pools: before, during and after the rate that the level says."""
CALM_RATE = 1.5
STEADY_S = 90.0
SETTLE_S = 90.0
LOOK_S = 1.0
"""Seconds between two looks of the load tester at the number of replicas."""
BOUNDS = {"p50": 0.10, "p90": 0.10, "p99": 0.15}
REPLICA_SECONDS_BOUND, ATTAINMENT_BOUND = 0.10, 0.02
TARGETS = {"engine": {"ttft_s": 2.0, "tpot_s": 0.1}, "timed": {"ttft_s": 1.0, "tpot_s": 0.1}}
LENGTHS = {
    "engine": {"prompt": {"lognormal": [120, 400], "max": 450}, "output": {"uniform": [24, 72]}},
    "timed": {"prompt": {"lognormal": [240, 900], "max": 1500}, "output": {"uniform": [32, 96]}},
}
CONFIG = {
    "engine": """
gateway: {port: PORT}
pools:
  - name: beside
    served_names: [beside]
    replicas: 1
    engine: {threads: 1, max_num_seqs: 16, kv_memory_bytes: 500000000}
""",
    "timed": """
gateway: {port: PORT}
pools:
  - name: beside
    served_names: [beside]
    replicas: 2
    autoscale: {min_replicas: 2, max_replicas: 8, start_s: 6, window_s: 8, scale_down_delay_s: 15, ttft_target_s: 1.0}
    engine:
      runner: timed
      max_num_seqs: 16
      max_batched_tokens: 512
      timed: {base_s: 0.025, row_s: 0.001, prefill_token_s: 0.0005, kv_token_s: 0.0000005, num_blocks: 4096}
""",
}


class Figures(NamedTuple):
    """Figures of one run."""

    ttft_s: Distribution
    tpot_s: Distribution
    attainment: float
    replica_seconds: float


class Kind(NamedTuple):
    """What is compared: `engine` or `timed`, and how it is simulated."""

    name: str
    pools: list[SimulatedPool]
    simulation: SimulationConfig


def write_scenario(kind: str, rate: float, folder: Path) -> Path:
    """The load of a level, as a file of the load tester. rate: requests a second."""
    steady = {"process": "poisson", "rate": rate}
    spike = {"process": "spike", "rate": CALM_RATE, "to_rate": rate, "at_s": CALM_S, "length_s": BURST_S}
    tree = {
        "duration_s": STEADY_S if kind == "engine" else CALM_S + BURST_S + AFTER_S,
        "warmup_s": 5.0,
        "drain_s": 60.0,
        "timeout_s": 60.0,
        "arrivals": steady if kind == "engine" else spike,
        "kinds": [
            {
                "endpoint": "completions",
                "prompts": {"source": "tokens", "tokens": LENGTHS[kind]["prompt"]},
                "output_tokens": LENGTHS[kind]["output"],
                "ignore_eos": True,
            }
        ],
        "targets": TARGETS[kind],
    }
    path = folder / f"{kind}-{rate:.3f}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def play_simulated(kind: Kind, scenario: Path, seed: int, folder: Path) -> Figures:
    """Simulate the load with a seed; its run is left in the folder."""
    load = load_scenario(scenario, [f"seed={seed}"])
    settings = msgspec.structs.replace(kind.simulation, seed=seed)
    simulate(load, kind.pools, GatewayConfig(), settings, folder, plots=False)
    return read_figures(folder)


def play_real(platform: PlatformProcess, scenario: Path, seed: int, folder: Path) -> Figures:
    """Play the load with a seed against the platform. Raises RuntimeError where the load tester fails."""
    command = [sys.executable, "-m", "penstock_loadtest.main", "run", str(scenario), "--url", f"{platform.url}/v1"]
    done = subprocess.run(
        [*command, "--out", str(folder), "--set", f"seed={seed}"],
        env={"OPENAI_API_KEY": platform.key, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    if not (folder / "summary.json").exists():
        raise RuntimeError(f"the load tester ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return read_figures(folder)


def read_figures(folder: Path) -> Figures:
    """Figures of a run of the load tester or of the simulator."""
    summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
    load = json.loads((folder / "scenario.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / "observed.jsonl").read_text(encoding="utf-8").splitlines()]
    ready = [(line["t_s"], sum(line["replicas"].values())) for line in lines]
    return Figures(
        summary.ttft_s, summary.tpot_s, summary.goodput.share or 0.0, count_seconds(ready, load["duration_s"])
    )


def count_seconds(ready: Sequence[tuple[float, float]], until_s: float) -> float:
    """Seconds for which replicas were ready from 0 to `until_s`. ready: times, and the number from then on; before the
    first one its number."""
    times = [0.0, *(min(max(at_s, 0.0), until_s) for at_s, _ in ready[1:]), until_s]
    spans = zip(itertools.pairwise(times), ready, strict=True)
    return sum((end_s - begin_s) * count for (begin_s, end_s), (_, count) in spans)


def find_knee(kind: Kind, folder: Path) -> float:
    """Requests a second at which 95 % of a constant load are in target, simulated, to 2 %: of all replicas that the
    pool may have."""
    pools = [pool._replace(replicas=MOST if pool.autoscale else 1, autoscale=None) for pool in kind.pools]
    fixed = Kind(kind.name, pools, kind.simulation)

    def is_held(rate: float) -> bool:
        scenario = write_scenario(kind.name, rate, folder)
        steady = yaml.safe_load(scenario.read_text()) | {"arrivals": {"process": "poisson", "rate": rate}}
        scenario.write_text(yaml.safe_dump(steady | {"duration_s": 300.0}), encoding="utf-8")
        with tempfile.TemporaryDirectory() as run:
            return play_simulated(fixed, scenario, FIRST_SEED, Path(run) / "run").attainment >= KNEE_SHARE

    low, high = 0.1, 0.2
    while is_held(high):
        low, high = high, 2 * high
    while high > 1.02 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_held(middle) else (low, middle)
    return low


def measure_engine(settings: dict[str, Any]) -> TimedConfig:
    """The engine's step times on its core, as a table in a file."""
    command = [sys.executable, "-m", "bench.support.step_table", "demo", json.dumps(settings), str(ENGINE_CORE)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    path = Path(tempfile.mkdtemp()) / "table.json"
    path.write_text(json.dumps(found["table"]), encoding="utf-8")
    return TimedConfig(table=str(path), num_blocks=found["num_blocks"], max_model_len=found["max_model_len"])


def read_pools(name: str, folder: Path) -> list[SimulatedPool]:
    path = folder / f"{name}.yaml"
    path.write_text(CONFIG[name].replace("PORT", "8000"), encoding="utf-8")
    return simulated_pools(load_platform(path))


def measured_pools(name: str, folder: Path) -> list[SimulatedPool]:
    """The pools as they are simulated: where an engine computes, with its measured step times."""
    pools = read_pools(name, folder)
    if name == "timed":
        return pools
    settings = yaml.safe_load(CONFIG[name].replace("PORT", "8000"))["pools"][0]["engine"]
    timed = measure_engine(settings)
    return [pool._replace(engine=msgspec.structs.replace(pool.engine, runner="timed", timed=timed)) for pool in pools]


def pin(platform: PlatformProcess) -> None:
    """The replica on one core, everything else on the other."""
    replicas = set(platform.replicas)
    for process in psutil.Process(platform.pid).children(recursive=True):
        core = ENGINE_CORE if process.pid in replicas else OTHER_CORE
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})
    os.sched_setaffinity(0, {OTHER_CORE})


def wait_until_settled(platform: PlatformProcess, count: int) -> None:
    """Wait until the pool has so many replicas again."""
    end_s = time.monotonic() + SETTLE_S
    while platform.metric("penstock_replicas", pool="beside") != count:
        if time.monotonic() > end_s:
            raise RuntimeError(f"the pool does not come back to {count} replicas")
        time.sleep(1.0)


def measure_start(platform: PlatformProcess, scenario: Path, folder: Path) -> float:
    """Seconds from asking for a replica to its being ready, the mean of a run that does not count."""
    began_s = time.time()
    play_real(platform, scenario, WARM_UP_SEED, folder)
    journal = (platform.state / "autoscale.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [line for line in map(json.loads, journal) if line["unix_s"] >= began_s and line["target"] > line["was"]]
    observed = [json.loads(line) for line in (folder / "observed.jsonl").read_text(encoding="utf-8").splitlines()]
    load_began_s = (folder / "observed.jsonl").stat().st_mtime - observed[-1]["t_s"]  # the last line: written at once
    waits = [
        _first_s(observed, count, line["unix_s"] - load_began_s) - LOOK_S / 2
        for line in asked
        for count in range(line["was"] + 1, line["target"] + 1)
    ]
    if not waits:
        raise RuntimeError("no replica was asked for in the run that measures how long one takes to start")
    return statistics.mean(waits)


def measure_slowdown(kind: Kind, real: Figures, scenario: Path, folder: Path) -> float:
    """How many times as long as in the table steps took in a run: with so many, simulated TTFT and TPOT (p50 and p90)
    are on the mean those of the run."""

    def is_faster(slowdown: float) -> bool:
        with tempfile.TemporaryDirectory() as run:
            simulated = play_simulated(slowed(kind, slowdown, folder), scenario, WARM_UP_SEED, Path(run) / "run")
        pairs = [
            (getattr(getattr(figures, name), which) for figures in (simulated, real))
            for name in ("ttft_s", "tpot_s")
            for which in ("p50", "p90")
        ]
        return bool(math.prod(ours / theirs for ours, theirs in pairs) < 1.0)

    low, high = 1 / MOST_SLOWDOWN, MOST_SLOWDOWN
    while high > 1.005 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_faster(middle) else (low, middle)
    return low


def slowed(kind: Kind, slowdown: float, folder: Path) -> Kind:
    """The kind with step times so many times as long."""
    timed = kind.pools[0].engine.timed
    assert timed.table is not None
    table = json.loads(Path(timed.table).read_text(encoding="utf-8"))
    for grid in ("seconds", "short_seconds"):
        table[grid] = [[[slowdown * each for each in line] for line in plane] for plane in table[grid]]
    path = folder / f"table-{slowdown:.4f}.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    settings = msgspec.structs.replace(timed, table=str(path))
    pools = [pool._replace(engine=msgspec.structs.replace(pool.engine, timed=settings)) for pool in kind.pools]
    return kind._replace(pools=pools)


def _first_s(observed: Sequence[dict[str, Any]], count: int, asked_s: float) -> float:
    """Seconds from `asked_s` until so many replicas were ready."""
    there = (line["t_s"] for line in observed if line["t_s"] >= asked_s and sum(line["replicas"].values()) >= count)
    return float(next(there, observed[-1]["t_s"]) - asked_s)


def compare(
    kind: Kind, level: float, real: Sequence[Figures], simulated: Sequence[Figures]
) -> Iterator[tuple[Row, bool]]:
    """Rows of one level, simulated beside real, and whether each is within its bound."""
    for name in ("ttft_s", "tpot_s"):
        for which, bound in BOUNDS.items():
            theirs = [getattr(getattr(figures, name), which) for figures in real]
            ours = statistics.median(getattr(getattr(figures, name), which) for figures in simulated)
            middle = statistics.median(theirs)
            spread = (max(theirs) - min(theirs)) / middle
            allowed = max(bound, spread) if which == "p99" else bound
            row = Row(f"{kind.name}, {level:g} of the knee: {name[:4].upper()} {which}", 1e3 * ours, 1e3 * middle, "ms")
            yield row, abs(ours / middle - 1) <= allowed
    ours, middle = (statistics.median(each.attainment for each in side) for side in (simulated, real))
    row = Row(f"{kind.name}, {level:g} of the knee: in target", 100 * ours, 100 * middle, "%")
    yield row, abs(ours - middle) <= ATTAINMENT_BOUND
    ours, middle = (statistics.median(each.replica_seconds for each in side) for side in (simulated, real))
    row = Row(f"{kind.name}, {level:g} of the knee: replicas ready", ours, middle, "replica-seconds")
    yield row, abs(ours / middle - 1) <= REPLICA_SECONDS_BOUND


def run_kind(name: str, levels: Sequence[float], runs: int, out: Path) -> Iterator[tuple[Row, bool]]:
    """All levels of one kind."""
    out.mkdir(parents=True, exist_ok=True)
    kind = Kind(name, measured_pools(name, out), SimulationConfig())
    knee = find_knee(kind, out)
    text = CONFIG[name].replace("{", "{{").replace("}", "}}").replace("PORT", "{port}")
    seeds = range(FIRST_SEED, FIRST_SEED + runs)
    with running_platform(out, text) as platform:
        if name == "engine":
            pin(platform)
            play_real(platform, write_scenario(name, 0.5 * knee, out), WARM_UP_SEED, out / "warm-up")
            before = write_scenario(name, WARM_UP_LEVEL * knee, out)
            slowdown = measure_slowdown(kind, play_real(platform, before, WARM_UP_SEED, out / "before"), before, out)
            print(f"{name}: steps take {slowdown:.3f} times as long as in the table", flush=True)
            kind = slowed(kind, slowdown, out)
            knee = find_knee(kind, out)
        else:
            before = write_scenario(name, WARM_UP_LEVEL * knee, out)
            play_real(platform, before, WARM_UP_SEED, out / "warm-up")
            wait_until_settled(platform, kind.pools[0].replicas)
            start_s = measure_start(platform, before, out / "before")
            print(f"{name}: a replica starts in {start_s:.1f} s", flush=True)
            kind = kind._replace(simulation=SimulationConfig(start_s=start_s, start_jitter=0.1))
        print(f"{name}: the knee is at {knee:.2f} requests/s", flush=True)
        for level in levels:
            scenario = write_scenario(name, level * knee, out)
            real = []
            for seed in seeds:
                wait_until_settled(platform, kind.pools[0].replicas)
                real.append(play_real(platform, scenario, seed, out / f"real-{level:g}-{seed}"))
                print(f"{name}, {level:g} of the knee, seed {seed}: {brief(real[-1])}", flush=True)
            simulated = [play_simulated(kind, scenario, seed, out / f"simulated-{level:g}-{seed}") for seed in seeds]
            print(f"{name}, {level:g} of the knee, simulated: {brief(simulated[0])}", flush=True)
            yield from compare(kind, level, real, simulated)


def brief(figures: Figures) -> str:
    ttft, tpot = figures.ttft_s, figures.tpot_s
    shown = [f"{1e3 * (value or 0):.0f}" for value in (ttft.p50, ttft.p90, ttft.p99, tpot.p50, tpot.p99)]
    return (
        f"TTFT {'/'.join(shown[:3])} ms, TPOT {'/'.join(shown[3:])} ms, {100 * figures.attainment:.1f} % in target, "
        f"{figures.replica_seconds:.0f} replica-seconds"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--levels", type=float, nargs="+", default=[0.6, 0.9, 1.2])
    parser.add_argument("--only", choices=sorted(CONFIG), action="append")
    parser.add_argument("--out", type=Path, default=Path("simulated-beside"))
    options = parser.parse_args()
    out = options.out / time.strftime("%Y%m%d-%H%M%S")
    found = [
        each
        for name in options.only or sorted(CONFIG)
        for each in run_kind(name, options.levels, options.runs, out / name)
    ]
    missed = [row.name for row, is_within in found if not is_within]
    notes = [
        "ours: simulated; rival: the real platform; medians over the seeds",
        f"beyond its bound: {', '.join(missed) or 'nothing'}",
    ]
    write_report(
        "simulated-beside",
        [row for row, _ in found],
        notes=notes,
        folder=out if options.only else Path(__file__).parent,
    )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
