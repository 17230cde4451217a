"""What the platform costs and adds: gateway, router, both ends of the stream and Redis, over timed replicas (10 ms a step).

    python -m bench.overhead [--quick] [--sglang PYTHON --sim-engine sim_engine.py]

Reported: CPU of an answer by its length, its fit as fixed + per token, TTFT and inter-token time added over the same engine called
in-process under the same load. CPU is the scheduler's account of the gateway, replica and Redis processes, without the engine's own
thread; what the same processes and Ray's daemons spend while idle is measured and shown, and the idle share is subtracted.

With a Python that has `sglang_router` and with an OpenAI-compatible simulated engine (--port, --model, --ttft-ms, --itl-ms), SGLang's
gateway is measured in the same run, level by level in turn with ours. PENSTOCK_BENCH_SGLANG and PENSTOCK_BENCH_SIM_ENGINE name them too.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.cpu import process_seconds
from bench.in_process import in_process_load
from bench.loopback import Answer, ChatClient, closed_loop
from bench.platform_process import PlatformProcess, free_port, running_platform
from bench.report import Row, write_report

STEP_S = 0.010
CONFIG = """
gateway: {{port: {port}}}
pools:
  - name: timed
    model: demo
    served_names: [sim]
    tier: edge
    replicas: 2
    engine:
      runner: timed
      max_num_seqs: 64
      max_batched_tokens: 8192
      timed: {{base_s: 0.010, num_blocks: 40000, max_model_len: 8192}}
"""


class Level(NamedTuple):
    streams: int
    requests: int
    prompt_tokens: int
    max_tokens: int

    @property
    def name(self) -> str:
        return f"{self.streams} streams, {self.prompt_tokens}-token prompts, {self.max_tokens}-token answers"


class Measured(NamedTuple):
    cpu_ms: float
    """Per answer, idle share subtracted."""
    ttft_s: list[float]
    gaps_s: list[float]


def levels(quick: bool) -> list[Level]:
    counts = {1: 8, 16: 96, 64: 192} if quick else {1: 24, 16: 256, 64: 384}
    grid = [Level(streams, counts[streams], prompt, 64) for prompt in (100, 4000) for streams in (1, 16, 64)]
    return grid + [Level(16, counts[16], 100, answer) for answer in (16, 256)]


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def measure(client: ChatClient, level: Level, seed: int, cpu_seconds: Callable[[], float], idle_cores: float, loop: asyncio.Runner) -> Measured:
    before, began = cpu_seconds(), time.perf_counter()
    answers: list[Answer] = loop.run(
        closed_loop(client, streams=level.streams, requests=level.requests, prompt_tokens=level.prompt_tokens, max_tokens=level.max_tokens, seed=seed)
    )
    spent = cpu_seconds() - before - idle_cores * (time.perf_counter() - began)
    wrong = [a.usage for a in answers if a.usage.get("completion_tokens") != level.max_tokens]
    if wrong:
        raise RuntimeError(f"{len(wrong)} answers of {level.name} have another length: {wrong[0]}")
    return Measured(1e3 * spent / level.requests, [a.ttft_s for a in answers], [g for a in answers for g in a.gaps_s])


def idle_cores(cpu_seconds: Callable[[], float], seconds: float = 5) -> float:
    before = cpu_seconds()
    time.sleep(seconds)
    return (cpu_seconds() - before) / seconds


@contextmanager
def sglang(python: str, sim_engine: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """SGLang's gateway over two simulated engines: its URL, and what its process has spent."""
    ports = [free_port() for _ in range(3)]
    router_port, *engine_ports = ports
    engines = [f"http://127.0.0.1:{p}" for p in engine_ports]
    sim = [python, sim_engine, "--model", "sim", "--ttft-ms", str(STEP_S * 1e3), "--itl-ms", str(STEP_S * 1e3)]
    route = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(router_port), "--policy", "cache_aware"]
    route += ["--worker-urls", *engines, "--prometheus-port", str(free_port()), "--log-level", "error"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen([*sim, "--port", str(p)], **quiet) for p in engine_ports]  # type: ignore[call-overload]
    processes.append(subprocess.Popen(route, **quiet))  # type: ignore[call-overload]
    try:
        _wait_for(f"http://127.0.0.1:{router_port}/v1/models")
        yield f"http://127.0.0.1:{router_port}", lambda: process_seconds(processes[-1].pid)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(10)


def _wait_for(url: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{url} did not answer within {seconds:.0f} s")


def rows_of(level: Level, ours: list[Measured], base: list[Measured], rival: list[Measured]) -> list[Row]:
    def cpu(side: list[Measured]) -> float | None:
        return statistics.median(m.cpu_ms for m in side) if side else None

    def added(side: list[Measured], pick: Callable[[Measured], list[float]], q: float) -> float | None:
        return 1e3 * (quantile([v for m in side for v in pick(m)], q) - quantile([v for m in base for v in pick(m)], q)) if side else None

    def row(what: str, unit: str, value: Callable[[list[Measured]], float | None]) -> Row:
        mine = value(ours)
        assert mine is not None
        return Row(f"{what}, {level.name}", mine, value(rival), unit)

    return [
        row("CPU of an answer", "ms", cpu),
        row("added TTFT p50", "ms", lambda side: added(side, lambda m: m.ttft_s, 0.5)),
        row("added TTFT p99", "ms", lambda side: added(side, lambda m: m.ttft_s, 0.99)),
        row("added inter-token p50", "ms", lambda side: added(side, lambda m: m.gaps_s, 0.5)),
        row("added inter-token p99", "ms", lambda side: added(side, lambda m: m.gaps_s, 0.99)),
    ]


def fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Least squares of cpu_ms = fixed + per_token * tokens."""
    mean_x, mean_y = statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def run(platform: PlatformProcess, rival: tuple[str, Callable[[], float]] | None, plan: list[Level], rounds: int) -> tuple[list[Row], list[str]]:
    parts: dict[str, Callable[[], float]] = {
        "gateway": lambda: sum(process_seconds(p) for p in platform.gateways),
        "replicas, stream only": lambda: sum(process_seconds(p, without_threads="engine") for p in platform.replicas),
        "Redis": lambda: sum(process_seconds(p) for p in platform.redis),
    }

    def ours() -> float:
        return sum(part() for part in parts.values())

    rows: list[Row] = []
    notes: list[str] = []
    with asyncio.Runner() as loop:
        mine = ChatClient(platform.url, "sim", platform.key, extra={"ignore_eos": True})
        theirs = ChatClient(rival[0], "sim") if rival else None
        warm = Level(4, 16, 100, 16)
        measure(mine, warm, 1, ours, 0, loop)
        if theirs and rival:
            measure(theirs, warm, 1, rival[1], 0, loop)
        idle = idle_cores(ours)
        daemons = idle_cores(lambda: sum(process_seconds(p) for p in platform.daemons))
        notes.append(f"idle: our processes {1e3 * idle:.1f} ms of CPU a second (subtracted), Ray's daemons {1e3 * daemons:.1f} (not counted)")
        by_length: dict[int, list[float]] = {}
        for number, level in enumerate(plan):
            got, base, other = [], [], []
            before = {name: part() for name, part in parts.items()}
            for turn in range(rounds):
                share = level._replace(requests=max(level.streams, level.requests // rounds))
                seed = 1000 * number + turn
                base.append(Measured(0, *in_process_load(share.streams, share.requests, share.prompt_tokens, share.max_tokens, STEP_S, seed)))
                got.append(measure(mine, share, seed, ours, idle, loop))
                if theirs and rival:
                    other.append(measure(theirs, share, seed, rival[1], 0, loop))
            spent = {name: 1e3 * (part() - before[name]) / (share.requests * rounds) for name, part in parts.items()}
            rows += rows_of(level, got, base, other)
            notes.append(f"{level.name}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in spent.items()) + " (idle included)")
            print(f"done: {level.name}: {statistics.median(m.cpu_ms for m in got):.2f} ms", file=sys.stderr, flush=True)
            if (level.streams, level.prompt_tokens) == (16, 100):
                by_length.setdefault(level.max_tokens, []).extend(m.cpu_ms for m in got)
        fixed, slope = fit([(tokens, ms) for tokens, values in by_length.items() for ms in values])
        rows.append(Row("fit at 16 streams, 100-token prompts: fixed", fixed, None, "ms"))
        rows.append(Row("fit at 16 streams, 100-token prompts: a token", 1e3 * slope, None, "us"))
        mine.close()
        if theirs:
            theirs.close()
    return rows, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--rounds", type=int, default=3, help="slices of a level, both sides in turn")
    parser.add_argument("--sglang", default=os.environ.get("PENSTOCK_BENCH_SGLANG"), help="Python that has sglang_router")
    parser.add_argument("--sim-engine", default=os.environ.get("PENSTOCK_BENCH_SIM_ENGINE"), help="simulated engine for the rival")
    args = parser.parse_args()
    plan = levels(args.quick)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, running_platform(Path(folder), CONFIG) as platform:
        if args.sglang and args.sim_engine:
            with sglang(args.sglang, args.sim_engine) as rival:
                rows, notes = run(platform, rival, plan, args.rounds)
        else:
            print("SGLang's gateway is not measured: --sglang and --sim-engine are not given", file=sys.stderr)
            rows, notes = run(platform, None, plan, args.rounds)
    write_report("overhead", rows, notes=notes)


if __name__ == "__main__":
    main()
