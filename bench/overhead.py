"""What the platform costs and adds: gateway, router, both ends of the stream and Redis, over timed replicas (10 ms a
step).

    python -m bench.overhead [--quick] [--interval-ms 5] [--sglang PYTHON --sim-engine sim_engine.py]

Reported: CPU of an answer by its length, its fit as fixed + per token, TTFT and inter-token time added over the same
engine called in-process under the same load. CPU is the scheduler's account of the gateway, replica and Redis
processes, without the engine's own thread; what the same processes and Ray's daemons spend while idle is measured and
shown, and the idle share is subtracted. The gateway's process alone is reported too: of the rival it is all that is
counted, since its engines' HTTP servers, which do what the stream's end in our replicas does, are simulated.

With a Python that has `sglang_router` and with an OpenAI-compatible simulated engine (--port, --model, --ttft-ms,
--itl-ms), SGLang's gateway is measured in the same run, level by level in turn with ours. PENSTOCK_BENCH_SGLANG and
PENSTOCK_BENCH_SIM_ENGINE name them too.
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

from bench.support.cpu import process_seconds
from bench.support.free_ports import free_port
from bench.support.in_process import in_process_load
from bench.support.loopback import Answer, ChatClient, closed_loop
from bench.support.platform_process import PlatformProcess, running_platform, timed_platform
from bench.support.report import Row, write_report

STEP_S = 0.010
DEFAULT_INTERVAL_S = 0.005


def make_config(interval_s: float = DEFAULT_INTERVAL_S) -> str:
    """Configuration of the platform. interval_s: `engine.stream_interval_s`, which older checkouts don't know."""
    interval = "" if interval_s == DEFAULT_INTERVAL_S else f"stream_interval_s: {interval_s}, "
    timed = "timed: {base_s: 0.010, num_blocks: 40000, max_model_len: 8192}"
    return timed_platform(f"max_num_seqs: 64, max_batched_tokens: 8192, {interval}{timed}")


class Level(NamedTuple):
    streams: int
    requests: int
    prompt_tokens: int
    max_tokens: int
    earlier_tokens: int = 0
    """Tokens of a turn before the prompt, one a stream, that was sent before."""

    @property
    def name(self) -> str:
        earlier = f" behind {self.earlier_tokens} seen before" if self.earlier_tokens else ""
        return f"{self.streams} streams, {self.prompt_tokens}-token prompts{earlier}, {self.max_tokens}-token answers"


class Rival(NamedTuple):
    url: str
    direct_url: str
    """Address of one of the rival's engines, without its gateway."""
    cpu_seconds: Callable[[], float]


class Measured(NamedTuple):
    cpu_ms: float
    """CPU milliseconds per answer, without the idle share."""
    ttft_s: list[float]
    gaps_s: list[float]
    gateway_ms: float = 0.0
    """The same of the gateway's process alone."""


def levels(quick: bool) -> list[Level]:
    counts = {1: 8, 16: 96, 64: 192} if quick else {1: 24, 16: 256, 64: 384}
    grid = [Level(streams, counts[streams], prompt, 64) for prompt in (100, 4000) for streams in (1, 16, 64)]
    seen = [Level(streams, counts[streams], 100, 64, 3900) for streams in (16, 64)]
    return grid + seen + [Level(16, counts[16], 100, answer) for answer in (16, 256)]


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def measure(
    client: ChatClient,
    level: Level,
    seed: int,
    cpu_seconds: Callable[[], float],
    idle_cores: float,
    loop: asyncio.Runner,
) -> Measured:
    before, began = cpu_seconds(), time.perf_counter()
    answers: list[Answer] = loop.run(
        closed_loop(
            client,
            streams=level.streams,
            requests=level.requests,
            prompt_tokens=level.prompt_tokens,
            max_tokens=level.max_tokens,
            seed=seed,
            earlier_tokens=level.earlier_tokens,
        )
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
def sglang(python: str, sim_engine: str) -> Iterator[Rival]:
    """SGLang's gateway over two simulated engines."""
    ports = [free_port() for _ in range(3)]
    router_port, *engine_ports = ports
    engines = [f"http://127.0.0.1:{p}" for p in engine_ports]
    sim = [python, sim_engine, "--model", "sim", "--ttft-ms", str(STEP_S * 1e3), "--itl-ms", str(STEP_S * 1e3)]
    route = [
        python,
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(router_port),
        "--policy",
        "cache_aware",
    ]
    route += ["--worker-urls", *engines, "--prometheus-port", str(free_port()), "--log-level", "error"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [
        subprocess.Popen([*sim, "--port", str(port)], **quiet)  # type: ignore[call-overload]
        for port in engine_ports
    ]
    processes.append(subprocess.Popen(route, **quiet))  # type: ignore[call-overload]
    try:
        _wait_for(f"http://127.0.0.1:{router_port}/v1/models")
        yield Rival(f"http://127.0.0.1:{router_port}", engines[0], lambda: process_seconds(processes[-1].pid))
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


class Sides(NamedTuple):
    """Measurements of both sides at one level, a Measured for each round."""

    ours: list[Measured]
    base: list[Measured]
    rival: list[Measured]
    rival_base: list[Measured]


def rows_of(level: Level, sides: Sides) -> list[Row]:
    def cpu(side: list[Measured]) -> float:
        return statistics.median(m.cpu_ms for m in side)

    def added(side: list[Measured], base: list[Measured], pick: Callable[[Measured], list[float]], q: float) -> float:
        return 1e3 * (quantile([v for m in side for v in pick(m)], q) - quantile([v for m in base for v in pick(m)], q))

    def added_row(what: str, pick: Callable[[Measured], list[float]], q: float) -> Row:
        rival = added(sides.rival, sides.rival_base, pick, q) if sides.rival else None
        return Row(f"{what}, {level.name}", added(sides.ours, sides.base, pick, q), rival, "ms")

    gateway_ms = statistics.median(m.gateway_ms for m in sides.ours)
    return [
        Row(f"CPU of an answer, {level.name}", cpu(sides.ours), cpu(sides.rival) if sides.rival else None, "ms"),
        Row(f"in the gateway alone, {level.name}", gateway_ms, cpu(sides.rival) if sides.rival else None, "ms"),
        added_row("added TTFT p50", lambda m: m.ttft_s, 0.5),
        added_row("added TTFT p99", lambda m: m.ttft_s, 0.99),
        added_row("added inter-token p50", lambda m: m.gaps_s, 0.5),
        added_row("added inter-token p99", lambda m: m.gaps_s, 0.99),
    ]


def fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Least squares of cpu_ms = fixed + per_token * tokens."""
    mean_x, mean_y = statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


class Bench:
    """A run that measures the platform and perhaps a rival, level by level, both sides in turn."""

    def __init__(self, platform: PlatformProcess, rival: Rival | None, loop: asyncio.Runner) -> None:
        self.parts: dict[str, Callable[[], float]] = {
            "gateway": lambda: sum(process_seconds(p) for p in platform.gateways),
            "replicas, stream only": lambda: sum(
                process_seconds(p, without_threads="engine") for p in platform.replicas
            ),
            "Redis": lambda: sum(process_seconds(p) for p in platform.redis),
        }
        self.loop, self.rival = loop, rival
        self.client = ChatClient(platform.url, "sim", platform.key, extra={"ignore_eos": True})
        self.rival_clients = [ChatClient(url, "sim") for url in (rival.url, rival.direct_url)] if rival else []
        warm = Level(4, 16, 100, 16)
        for client in (self.client, *self.rival_clients):
            measure(client, warm, 1, lambda: 0.0, 0, loop)
        self.idle = idle_cores(self.cpu_seconds)
        self.gateway_idle = idle_cores(self.parts["gateway"])
        self.daemons = idle_cores(lambda: sum(process_seconds(p) for p in platform.daemons))

    def cpu_seconds(self) -> float:
        return sum(part() for part in self.parts.values())

    def level(self, level: Level, rounds: int, seed: int) -> tuple[Sides, str]:
        """Measure one level; returns the measurements of both sides, and a line on where our CPU went."""
        sides = Sides([], [], [], [])
        share = level._replace(requests=max(level.streams, level.requests // rounds))
        spent = dict.fromkeys(self.parts, 0.0)
        if level.earlier_tokens:
            for client in (self.client, *self.rival_clients):
                measure(client, share._replace(requests=2 * level.streams), seed, lambda: 0.0, 0, self.loop)
        for _ in range(rounds):
            seed += 1
            sides.base.append(
                Measured(
                    0,
                    *in_process_load(
                        share.streams,
                        share.requests,
                        share.prompt_tokens + share.earlier_tokens,
                        share.max_tokens,
                        STEP_S,
                        seed,
                    ),
                )
            )
            before, began = {name: part() for name, part in self.parts.items()}, time.perf_counter()
            ours = measure(self.client, share, seed, self.cpu_seconds, self.idle, self.loop)
            taken = {name: part() - before[name] for name, part in self.parts.items()}
            gateway_s = taken["gateway"] - self.gateway_idle * (time.perf_counter() - began)
            sides.ours.append(ours._replace(gateway_ms=1e3 * gateway_s / share.requests))
            for name, seconds in taken.items():
                spent[name] += seconds
            if self.rival:
                gateway, direct = self.rival_clients
                sides.rival_base.append(measure(direct, share, seed, lambda: 0.0, 0, self.loop))
                sides.rival.append(measure(gateway, share, seed, self.rival.cpu_seconds, 0, self.loop))
        where = ", ".join(
            f"{name} {1e3 * seconds / (share.requests * rounds):.2f} ms" for name, seconds in spent.items()
        )
        return sides, f"{level.name}: {where} (idle share included)"

    def close(self) -> None:
        for client in (self.client, *self.rival_clients):
            client.close()


def run(platform: PlatformProcess, rival: Rival | None, plan: list[Level], rounds: int) -> tuple[list[Row], list[str]]:
    with asyncio.Runner() as loop:
        bench = Bench(platform, rival, loop)
        rows: list[Row] = []
        notes = [
            f"idle: our processes {1e3 * bench.idle:.1f} ms of CPU a second (subtracted), Ray's daemons "
            f"{1e3 * bench.daemons:.1f} (not counted)"
        ]
        points: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
        for number, level in enumerate(plan):
            sides, note = bench.level(level, rounds, 1000 * number)
            rows += rows_of(level, sides)
            notes.append(note)
            print(
                f"{rows[-6].name}: {rows[-6].ours:.2f} ms, {rows[-5].ours:.2f} in the gateway"
                + (f", rival {rows[-6].rival:.2f} ms" if rival else ""),
                file=sys.stderr,
                flush=True,
            )
            if (level.streams, level.prompt_tokens, level.earlier_tokens) == (16, 100, 0):
                points[False] += [(level.max_tokens, m.cpu_ms) for m in sides.ours]
                points[True] += [(level.max_tokens, m.cpu_ms) for m in sides.rival]
        rows += fit_rows(points[False], points[True])
        bench.close()
    return rows, notes


def fit_rows(ours: list[tuple[int, float]], rival: list[tuple[int, float]]) -> list[Row]:
    (fixed, slope), theirs = fit(ours), fit(rival) if rival else None
    return [
        Row("fit at 16 streams, 100-token prompts: fixed", fixed, theirs[0] if theirs else None, "ms"),
        Row("fit at 16 streams, 100-token prompts: a token", 1e3 * slope, 1e3 * theirs[1] if theirs else None, "us"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--rounds", type=int, default=3, help="slices of a level, both sides in turn")
    parser.add_argument(
        "--sglang", default=os.environ.get("PENSTOCK_BENCH_SGLANG"), help="Python that has sglang_router"
    )
    parser.add_argument(
        "--sim-engine", default=os.environ.get("PENSTOCK_BENCH_SIM_ENGINE"), help="simulated engine for the rival"
    )
    parser.add_argument("--interval-ms", type=float, default=1e3 * DEFAULT_INTERVAL_S, help="engine.stream_interval_s")
    args = parser.parse_args()
    plan = levels(args.quick)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_platform(Path(folder), make_config(args.interval_ms / 1e3)) as platform,
    ):
        if args.sglang and args.sim_engine:
            with sglang(args.sglang, args.sim_engine) as rival:
                rows, notes = run(platform, rival, plan, args.rounds)
        else:
            print("SGLang's gateway is not measured: --sglang and --sim-engine are not given", file=sys.stderr)
            rows, notes = run(platform, None, plan, args.rounds)
    variant = "" if args.interval_ms == 1e3 * DEFAULT_INTERVAL_S else f"{args.interval_ms:g}_ms"
    write_report("overhead", rows, notes=notes, variant=variant)


if __name__ == "__main__":
    main()
