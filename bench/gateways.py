"""What several gateways cost beside one, and whether they serve as one: platforms with 1, 2 and 4 gateways over two
timed replicas each, under the same load, in turn.

    python -m bench.gateways [--quick] [--rounds 6] [--counts 1 2 4] [--streams 64] [--step-ms 10] [--interval-ms 5]

The platforms run at the same time; in each round every one of them is measured, in another order each time. Connections
are placed as a Service of Kubernetes places them, each at random, and kept. Reported: CPU of an answer of gateways,
replicas (without the engine's thread) and Redis, with and without what they spend while idle; the share of the answers
that the fullest gateway gave, beside the mean; and what a limit of requests and one of tokens let in through all
gateways, beside the limit. The share of the prompt tokens that came from the cache, where prompts share their
beginnings, is measured on platforms of their own, whose replicas take time for each prompt token. Beyond four gateways
only the spreading of connections is simulated, by the gateways' own rule, and the rows say so.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.overhead import idle_cores
from bench.support.cpu import process_seconds
from bench.support.loopback import Answer, ChatClient, closed_loop, prompt
from bench.support.more_gateways import start_gateways
from bench.support.platform_process import PlatformProcess, running_platform, timed_platform
from bench.support.report import Row, write_report
from bench.support.tenants import make_keys
from penstock.router.transport.connection_balance import Spread
from penstock.tenancy.tenants import Limits, Settings

COUNTS = (1, 2, 4)
PROMPT_TOKENS, MAX_TOKENS = 100, 64
REQUESTS = 384
"""Requests of a slice."""
GROUPS, SHARED_TOKENS = 64, 1800
"""Prompts of the cache's load: groups, and the tokens that one shares. All of them fill the caches of both replicas."""
CACHE_REQUESTS, CACHE_STREAMS = 640, 24
PREFILL_TOKEN_S = 0.0001
"""What a prompt token takes in the cache's load, as at a model of 8B; where it takes nothing, a replica that holds the
prompt is no better than another one."""
CACHE_ROUNDS = 3
MAX_REQUESTS_A_MINUTE = 100
MAX_TOKENS_A_MINUTE = 10_000
TOKENS_A_REQUEST = 100
SIMULATED = ((4, 64), (8, 128), (16, 256), (64, 1024))
"""Gateways, and the connections that are placed over them: 16 for each."""
MOST_CPU, MOST_SHARE, LEAST_CACHED = 1.05, 1.2, 0.97
"""Goals: CPU of an answer at 4 gateways beside 1, the fullest gateway's answers beside the mean, the share from the
cache at 4 beside 1."""


class Load(NamedTuple):
    """What CPU is counted under."""

    streams: int = 64
    step_s: float = 0.010
    interval_s: float = 0.005
    """`engine.stream_interval_s`."""
    prefill_token_s: float = 0.0

    @property
    def config(self) -> str:
        """Configuration of a platform whose two replicas have room for it."""
        return timed_platform(
            f"max_num_seqs: {max(64, self.streams)}, max_batched_tokens: 8192, stream_interval_s: {self.interval_s}, "
            f"timed: {{base_s: {self.step_s}, prefill_token_s: {self.prefill_token_s}, num_blocks: 4000, "
            "max_model_len: 8192}"
        )


DEFAULT_LOAD = Load()


@dataclass
class Fleet:
    """A platform, its gateways, and what was measured of it."""

    platform: PlatformProcess
    urls: list[str]
    """Base addresses of its gateways."""
    client: ChatClient
    load: Load
    idle: float = 0.0
    """Cores that it keeps busy while idle."""
    cpu_ms: list[float] = field(default_factory=list)
    """CPU of an answer in each slice, idle share subtracted."""
    whole_cpu_ms: list[float] = field(default_factory=list)
    """The same with the idle share."""
    fullest: list[float] = field(default_factory=list)
    """The fullest gateway's answers beside the mean, in each slice."""
    num_cached: int = 0
    num_prompt: int = 0
    requests_let_in: int = 0
    tokens_let_in: int = 0

    @property
    def count(self) -> int:
        return len(self.urls)

    @property
    def cached_share(self) -> float:
        return self.num_cached / self.num_prompt

    def cpu_seconds(self) -> float:
        platform = self.platform
        whole = sum(process_seconds(pid) for pid in (*platform.gateways, *platform.redis))
        return whole + sum(process_seconds(pid, without_threads="engine") for pid in platform.replicas)


@contextmanager
def running_fleet(folder: Path, count: int, load: Load) -> Iterator[Fleet]:
    """A platform with so many gateways."""
    folder.mkdir()
    with running_platform(folder, load.config) as platform:
        urls = [platform.url, *(start_gateways(platform, count - 1) if count > 1 else ())]
        client = ChatClient(
            urls[0], "sim", platform.key, extra={"ignore_eos": True}, others=urls[1:], rng=random.Random(count)
        )
        yield Fleet(platform, urls, client, load)


def measure_slice(fleet: Fleet, requests: int, seed: int, loop: asyncio.Runner) -> None:
    """One slice of the load that CPU is counted under, over connections of its own that its first requests have
    opened."""
    streams = fleet.load.streams
    load = {"streams": streams, "prompt_tokens": PROMPT_TOKENS, "max_tokens": MAX_TOKENS}
    fleet.client.close()
    loop.run(closed_loop(fleet.client, requests=2 * streams, seed=seed, **load))
    fleet.client.num_answers.clear()
    before, began = fleet.cpu_seconds(), loop.get_loop().time()
    loop.run(closed_loop(fleet.client, requests=requests, seed=seed + 1, **load))
    spent, seconds = fleet.cpu_seconds() - before, loop.get_loop().time() - began
    fleet.whole_cpu_ms.append(1e3 * spent / requests)
    fleet.cpu_ms.append(1e3 * (spent - fleet.idle * seconds) / requests)
    fleet.fullest.append(max(fleet.client.num_answers.values()) * fleet.count / requests)


def measure_cache(fleet: Fleet, requests: int, seed: int, loop: asyncio.Runner) -> None:
    """Prompts that share their beginnings by groups, the groups in any order."""
    rng = random.Random(seed)
    shared = [prompt(rng, SHARED_TOKENS) for _ in range(GROUPS)]
    chosen = iter([(shared[rng.randrange(GROUPS)], prompt(rng, 60)) for _ in range(requests)])
    answers: list[Answer] = []

    async def stream() -> None:
        for system, content in chosen:
            answers.append(await fleet.client.chat(content, 16, system=system))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CACHE_STREAMS):
                tasks.create_task(stream())

    loop.run(main())
    fleet.num_cached += sum(answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    fleet.num_prompt += sum(answer.usage["prompt_tokens"] for answer in answers)


async def measure_limits(fleet: Fleet) -> None:
    """More requests at all gateways at once than two tenants' limits allow, one limit of each kind."""
    keys = await make_keys(
        fleet.platform,
        {
            "by-requests": Settings(limits=Limits(requests_per_minute=MAX_REQUESTS_A_MINUTE)),
            "by-tokens": Settings(limits=Limits(tokens_per_minute=MAX_TOKENS_A_MINUTE)),
        },
    )
    fleet.requests_let_in = await _flood(fleet.urls, keys["by-requests"], 2 * MAX_REQUESTS_A_MINUTE)
    let_in = await _flood(fleet.urls, keys["by-tokens"], 2 * MAX_TOKENS_A_MINUTE // TOKENS_A_REQUEST)
    fleet.tokens_let_in = let_in * TOKENS_A_REQUEST


async def _flood(urls: Sequence[str], key: str, requests: int) -> int:
    """Requests of TOKENS_A_REQUEST tokens each, in turn at every address, 32 at once; returns how many were let in.
    Raises RuntimeError for another answer than 200 and 429."""
    slots, statuses = asyncio.Semaphore(32), list[int]()
    body = {"model": "sim", "max_tokens": 10, "ignore_eos": True}

    async def ask(http: httpx.AsyncClient, number: int) -> None:
        tokens = [1000 + number, *range(2000, 2000 + TOKENS_A_REQUEST - 11)]
        async with slots:
            answer = await http.post(f"{urls[number % len(urls)]}/v1/completions", json={**body, "prompt": tokens})
        statuses.append(answer.status_code)

    async with httpx.AsyncClient(
        headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False, verify=False
    ) as http:
        await asyncio.gather(*(ask(http, number) for number in range(requests)))
    if set(statuses) - {200, 429}:
        raise RuntimeError(f"answers have the statuses {sorted(set(statuses))}")
    return statuses.count(200)


def run(
    folder: Path, counts: Sequence[int], rounds: int, requests: int, cache_requests: int, load: Load = DEFAULT_LOAD
) -> list[Fleet]:
    """Measure platforms with so many gateways, in turn."""
    with asyncio.Runner() as loop, ExitStack() as stack:
        fleets = [stack.enter_context(running_fleet(folder / str(count), count, load)) for count in counts]
        for fleet in fleets:
            loop.run(measure_limits(fleet))
        for fleet in fleets:
            measure_slice(fleet, fleet.load.streams, 1, loop)
            for measured in (fleet.cpu_ms, fleet.whole_cpu_ms, fleet.fullest):
                measured.clear()
        for fleet in fleets:
            fleet.idle = idle_cores(fleet.cpu_seconds)
        for number in range(rounds):
            first = number % len(fleets)
            for fleet in fleets[first:] + fleets[:first]:
                measure_slice(fleet, requests, 1000 * (number + 1), loop)
                said = f"{fleet.cpu_ms[-1]:.2f} ms an answer, the fullest {fleet.fullest[-1]:.2f} of the mean"
                print(f"round {number + 1}, gateways {fleet.count}: {said}", file=sys.stderr, flush=True)
        for fleet in fleets:
            fleet.client.close()
    measure_shares(folder / "cache", fleets, cache_requests, load)
    return fleets


def measure_shares(folder: Path, fleets: Sequence[Fleet], requests: int, load: Load) -> None:
    """Measure the share from the cache on platforms with as many gateways as those of `fleets`, and note it there."""
    folder.mkdir()
    load = load._replace(prefill_token_s=PREFILL_TOKEN_S)
    with asyncio.Runner() as loop, ExitStack() as stack:
        others = [stack.enter_context(running_fleet(folder / str(fleet.count), fleet.count, load)) for fleet in fleets]
        for number in range(CACHE_ROUNDS):
            for other in others:
                measure_cache(other, requests, 1 + number, loop)
        for fleet, other in zip(fleets, others, strict=True):
            fleet.num_cached, fleet.num_prompt = other.num_cached, other.num_prompt
            other.client.close()


def simulate_spread(num_gateways: int, num_connections: int, seconds: int = 10, seed: int = 0) -> tuple[float, float]:
    """Connections placed at random, each always with a request under way: the fullest gateway's beside the mean, after
    so many seconds of the gateways' rule and as they were placed. A mean over 50 placements."""
    rng, after, before = random.Random(seed), 0.0, 0.0
    for _ in range(50):
        places = rng.choices(range(num_gateways), k=num_connections)
        before += _fullest(places, num_gateways)
        gateways = [Spread() for _ in range(num_gateways)]
        for _ in range(seconds):
            for number, gateway in enumerate(gateways):
                gateway.num_underway = places.count(number)
            samples = [gateway.sample() for gateway in gateways]
            for number, gateway in enumerate(gateways):
                gateway.compare(samples[:number] + samples[number + 1 :])
            places = [rng.randrange(num_gateways) if gateways[place].take() else place for place in places]
        after += _fullest(places, num_gateways)
    return after / 50, before / 50


def _fullest(places: Sequence[int], num_gateways: int) -> float:
    return max(Counter(places).values()) * num_gateways / len(places)


def ratio(fleet: Fleet, one: Fleet) -> float:
    """CPU of an answer beside that with one gateway: the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(fleet.cpu_ms, one.cpu_ms, strict=True))


def rows_of(fleets: Sequence[Fleet]) -> list[Row]:
    one, rows = fleets[0], list[Row]()
    for fleet in fleets:
        name = f"{fleet.count} gateway{'s' if fleet.count > 1 else ''}"
        base = None if fleet is one else one
        cpu, whole = statistics.median(fleet.cpu_ms), statistics.median(fleet.whole_cpu_ms)
        rows += [
            Row(f"{name}: CPU of an answer", cpu, statistics.median(base.cpu_ms) if base else None, "ms"),
            Row(f"{name}: with what idle costs", whole, statistics.median(base.whole_cpu_ms) if base else None, "ms"),
            Row(f"{name}: idle", 1e3 * fleet.idle, 1e3 * base.idle if base else None, "ms/s"),
            Row(f"{name}: answers of the fullest, of the mean", statistics.median(fleet.fullest), None, ""),
            Row(f"{name}: requests let in, of the limit", fleet.requests_let_in, MAX_REQUESTS_A_MINUTE, ""),
            Row(f"{name}: tokens let in, of the limit", fleet.tokens_let_in, MAX_TOKENS_A_MINUTE, ""),
            Row(
                f"{name}: share from the cache",
                100 * fleet.cached_share,
                100 * base.cached_share if base else None,
                "%",
            ),
        ]
    for num_gateways, num_connections in SIMULATED:
        after, before = simulate_spread(num_gateways, num_connections)
        name = f"simulated, {num_gateways} gateways, {num_connections} connections: the fullest, of the mean"
        rows.append(Row(f"{name}; as placed", after, before, ""))
    return rows


def faults(fleets: Sequence[Fleet]) -> list[str]:
    """Goals that the last fleet misses beside the first, each as a sentence."""
    one, most = fleets[0], fleets[-1]
    found = [
        f"{fleet.count} gateways let in {fleet.requests_let_in} requests and {fleet.tokens_let_in} tokens"
        for fleet in fleets
        if (fleet.requests_let_in, fleet.tokens_let_in) != (MAX_REQUESTS_A_MINUTE, MAX_TOKENS_A_MINUTE)
    ]
    if ratio(most, one) > MOST_CPU:
        found.append(f"an answer takes {ratio(most, one):.3f} of the CPU that it takes with one gateway")
    if statistics.median(most.fullest) > MOST_SHARE:
        found.append(f"the fullest gateway gives {statistics.median(most.fullest):.2f} of the mean's answers")
    if most.cached_share < LEAST_CACHED * one.cached_share:
        found.append(f"{most.cached_share:.3f} of the prompts come from the cache, {one.cached_share:.3f} with one")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds, fewer requests")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--counts", type=int, nargs="+", default=COUNTS, help="gateways of each platform; the first is 1"
    )
    parser.add_argument("--streams", type=int, default=DEFAULT_LOAD.streams)
    parser.add_argument("--step-ms", type=float, default=1e3 * DEFAULT_LOAD.step_s, help="step of the timed replicas")
    parser.add_argument(
        "--interval-ms", type=float, default=1e3 * DEFAULT_LOAD.interval_s, help="engine.stream_interval_s"
    )
    args = parser.parse_args()
    load = Load(args.streams, args.step_ms / 1e3, args.interval_ms / 1e3)
    variant = "" if load == DEFAULT_LOAD else f"{load.streams}_streams_{1e3 * load.interval_s:g}_ms"
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        if args.quick:
            fleets = run(Path(folder), args.counts, 2, REQUESTS // 2, CACHE_REQUESTS // 2, load)
        else:
            fleets = run(Path(folder), args.counts, args.rounds, max(REQUESTS, 2 * load.streams), CACHE_REQUESTS, load)
    ratios = [
        f"{fleet.count} gateways: CPU of an answer {ratio(fleet, fleets[0]):.3f} of one's (median of the rounds', "
        f"{min(pairs):.2f} to {max(pairs):.2f})"
        for fleet in fleets[1:]
        for pairs in [[a / b for a, b in zip(fleet.cpu_ms, fleets[0].cpu_ms, strict=True)]]
    ]
    found = faults(fleets)
    notes = [
        f"{load.streams} streams, {1e3 * load.step_s:g} ms a step, {1e3 * load.interval_s:g} ms between messages",
        f"share from the cache: {CACHE_STREAMS} streams, {1e3 * PREFILL_TOKEN_S:g} ms a prompt token",
        *ratios,
        *(f"missed: {fault}" for fault in found),
    ]
    write_report("gateways", rows_of(fleets), notes=notes, variant=variant)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
