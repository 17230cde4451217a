"""Batches beside requests that somebody waits for: does anybody notice? A pool of two replicas and two gateways.

    python -m bench.batches [--quick] [--demo]

Requests of one tenant arrive all the time, in an open loop, at 60 % of what the pool takes in a closed one. In every
other window another tenant's batch runs beside them: it is created at the window's beginning and cancelled at its end.
Measured is from when its first lines are done. Reported: time to first token of the requests beside a batch and
without one, in windows in turn (wanted: p90 at most 1.3 times that without); how much the batch gets; and what becomes
of a batch that loses the gateway that runs it, and then Redis (wanted: every line has one result, and counts once).

The replicas are timed ones (20 ms a step, 16 places each); with --demo they run the demo model, and nothing is lost.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import openai
from openai.types import Batch

from bench.support.batch_files import (
    WITHIN_S,
    Loss,
    TwoGateways,
    chat_line,
    create_batch,
    lose_in_the_middle,
    num_completed,
    two_gateways,
    wait_until_ended,
)
from bench.support.loopback import ChatClient, closed_loop, prompt
from bench.support.platform_process import timed_platform
from bench.support.report import Row, write_report
from bench.support.tenants import make_keys
from penstock.tenancy.tenants import Settings

GOAL = 1.3
"""Most that p90 of the time to first token may be beside a batch, as a multiple of that without."""
LOAD = 0.6
"""Rate of the requests, as a part of what the pool takes."""
ASKER, BATCHER = "asker", "batcher"
NUM_LINES = 500
"""Lines of the batch that loses its gateway; the others have at least as many."""
SETTLE_S = 2.0
"""Time after a batch's first result, or its end, before anything is measured."""


class Pool(NamedTuple):
    """What serves, and how long its requests and lines are."""

    config: str
    model: str
    num_places: int
    prompt_tokens: int
    answer_tokens: int
    window_s: float
    num_rounds: int
    """Windows with a batch, and as many without."""

    def quick(self) -> "Pool":
        return self._replace(window_s=self.window_s / 3, num_rounds=2)


TIMED = Pool(
    timed_platform(
        "max_num_seqs: 16, max_batched_tokens: 2048, timed: {base_s: 0.020, prefill_token_s: 0.00002, "
        "num_blocks: 40000}"
    ),
    "sim",
    num_places=32,
    prompt_tokens=100,
    answer_tokens=64,
    window_s=20.0,
    num_rounds=8,
)
DEMO = Pool(
    """
gateway: {{port: {port}}}
pools:
- {{name: demo, model: demo, served_names: [demo], replicas: 2, engine: {{threads: 1, max_num_seqs: 8}}}}
""",
    "demo",
    num_places=16,
    prompt_tokens=60,
    answer_tokens=32,
    window_s=45.0,
    num_rounds=6,
)


@dataclass
class Window:
    """What was measured with a batch, or without one."""

    ttft_s: list[float] = field(default_factory=list)
    """Time to first token of the requests that were sent in it, of those that were answered."""
    num_failed: int = 0
    num_lines: int = 0
    """Lines of batches that were done in it."""
    seconds: float = 0.0

    def quantile_ms(self, q: float) -> float:
        ordered = sorted(self.ttft_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]

    @property
    def lines_per_s(self) -> float:
        return self.num_lines / self.seconds


class Seen(NamedTuple):
    capacity: float
    """Answers a second that the pool gives to a closed loop."""
    alone: Window
    beside: Window
    faults: list[str]


class OpenLoop:
    """Requests that arrive at a steady mean rate, whatever becomes of those before, at the gateways in turn."""

    def __init__(self, clients: Sequence[ChatClient], pool: Pool, rate: float) -> None:
        self.window: Window | None = None
        """What requests that are sent now count for; None: nothing."""
        self._clients = clients
        self._pool = pool
        self._rate = rate
        self._rng = random.Random(1)

    async def run(self, stop: asyncio.Event) -> None:
        due_s, number = time.perf_counter(), 0
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                due_s += self._rng.expovariate(self._rate)
                await asyncio.sleep(due_s - time.perf_counter())
                number += 1
                content = prompt(self._rng, self._pool.prompt_tokens)
                tasks.create_task(self._ask(self._clients[number % len(self._clients)], content, self.window))

    async def _ask(self, client: ChatClient, content: str, window: Window | None) -> None:
        try:
            answer = await client.chat(content, self._pool.answer_tokens)
        except (RuntimeError, OSError, TimeoutError):
            if window is not None:
                window.num_failed += 1
        else:
            if window is not None:
                window.ttft_s.append(answer.ttft_s)


class Batches:
    """The batches of a tenant, one after another. num_lines: of each."""

    def __init__(self, client: openai.OpenAI, pool: Pool, num_lines: int) -> None:
        self._client = client
        self._pool = pool
        self._num_lines = num_lines
        self._rng = random.Random(2)

    async def begin(self) -> Batch:
        """A batch that has its first results. Raises TimeoutError."""
        pool, rng = self._pool, self._rng
        contents = [prompt(rng, pool.prompt_tokens) for _ in range(self._num_lines)]
        rows = [chat_line(number, pool.model, each, pool.answer_tokens) for number, each in enumerate(contents)]
        batch = await asyncio.to_thread(create_batch, self._client, rows)
        async with asyncio.timeout(WITHIN_S):
            while not await self.num_done(batch):  # noqa: ASYNC110 (the batch is in another process)
                await asyncio.sleep(0.1)
        return batch

    async def num_done(self, batch: Batch) -> int:
        return await asyncio.to_thread(num_completed, self._client, batch)

    async def end(self, batch: Batch) -> str:
        """Cancel the batch; returns what its status was before that."""
        before = await asyncio.to_thread(self._client.batches.retrieve, batch.id)
        if before.status == "in_progress":
            await asyncio.to_thread(self._client.batches.cancel, batch.id)
        await asyncio.to_thread(wait_until_ended, self._client, batch)
        return before.status


async def measure(gateways: TwoGateways, pool: Pool) -> Seen:
    keys = await make_keys(gateways.platform, {ASKER: Settings(), BATCHER: Settings()})
    extra = {"ignore_eos": True}
    clients = [ChatClient(url, pool.model, keys[ASKER], extra=extra) for url in gateways.urls]
    capacity = await measure_capacity(clients, pool)
    num_lines = max(NUM_LINES, int(2 * capacity * pool.window_s))
    batches = Batches(gateways.client(gateways.urls[0], keys[BATCHER]), pool, num_lines)
    loop, stop = OpenLoop(clients, pool, LOAD * capacity), asyncio.Event()
    running = asyncio.create_task(loop.run(stop))
    alone, beside, faults = Window(), Window(), list[str]()
    try:
        for number in range(pool.num_rounds):
            await asyncio.sleep(SETTLE_S)
            await _watch(loop, alone, pool.window_s)
            batch = await batches.begin()
            await asyncio.sleep(SETTLE_S)
            num_before = await batches.num_done(batch)
            await _watch(loop, beside, pool.window_s)
            beside.num_lines += await batches.num_done(batch) - num_before
            status = await batches.end(batch)
            if status != "in_progress":
                faults.append(f"The batch of window {number} was {status} before the window ended.")
            print(f"{number}: {_brief('alone', alone)}; {_brief('beside', beside)}", file=sys.stderr, flush=True)
    finally:
        stop.set()
        await running
    for client in clients:
        client.close()
    return Seen(capacity, alone, beside, faults)


async def measure_capacity(clients: Sequence[ChatClient], pool: Pool) -> float:
    """Answers a second to as many streams as there are places, spread over the gateways."""

    async def load(client: ChatClient, rounds: int, seed: int) -> int:
        streams = pool.num_places // len(clients)
        answers = await closed_loop(
            client,
            streams=streams,
            requests=rounds * streams,
            prompt_tokens=pool.prompt_tokens,
            max_tokens=pool.answer_tokens,
            seed=seed,
        )
        return len(answers)

    await asyncio.gather(*(load(client, 1, number) for number, client in enumerate(clients)))  # warm
    began_s = time.perf_counter()
    counts = await asyncio.gather(*(load(client, 6, 10 + number) for number, client in enumerate(clients)))
    return sum(counts) / (time.perf_counter() - began_s)


async def _watch(loop: OpenLoop, window: Window, seconds: float) -> None:
    """Have the requests of so many seconds counted."""
    began_s, loop.window = time.perf_counter(), window
    await asyncio.sleep(seconds)
    loop.window = None
    window.seconds += time.perf_counter() - began_s


def _brief(name: str, window: Window) -> str:
    return f"{name} p90 {window.quantile_ms(0.9):.1f} ms of {len(window.ttft_s)}"


def rows_of(seen: Seen, pool: Pool) -> list[Row]:
    alone, beside = seen.alone, seen.beside
    asked = len(beside.ttft_s) / beside.seconds
    return [
        *(
            Row(
                f"TTFT p{100 * q:g} beside a batch, beside that alone",
                beside.quantile_ms(q),
                alone.quantile_ms(q),
                "ms",
            )
            for q in (0.5, 0.9, 0.99)
        ),
        Row("requests, beside a batch and alone", len(beside.ttft_s), len(alone.ttft_s), ""),
        Row("of these not answered", beside.num_failed, alone.num_failed, ""),
        Row("answers to requests, of what a closed loop gets", asked, seen.capacity, "1/s"),
        Row("lines of the batch, of the same", beside.lines_per_s, seen.capacity, "1/s"),
        Row("output of the batch", beside.lines_per_s * pool.answer_tokens, None, "tokens/s"),
    ]


def rows_of_loss(loss: Loss) -> list[Row]:
    counts = [
        Row(f"through the losses: {kind}, charged, beside answered", loss.charged[kind], loss.answered[kind], "")
        for kind in loss.charged
    ]
    return [
        Row("through the losses: results, beside lines", len(loss.custom_ids), loss.num_lines, ""),
        Row("through the losses: lines with two results", loss.num_doubled, None, ""),
        Row("through the losses: lines done when the gateway was killed", loss.done_at_kill, None, ""),
        Row("through the losses: lines done when Redis was killed", loss.done_at_redis_kill, None, ""),
        *counts,
    ]


def faults_of(seen: Seen, loss: Loss | None) -> list[str]:
    faults = list(seen.faults)
    ratio = seen.beside.quantile_ms(0.9) / seen.alone.quantile_ms(0.9)
    if ratio > GOAL:
        faults.append(f"p90 of the time to first token is {ratio:.2f} times that without a batch; wanted: {GOAL}")
    if seen.beside.num_failed or seen.alone.num_failed:
        faults.append("requests were not answered")
    if loss is not None and not loss.is_exact:
        faults.append("through the losses a line has no result, or two, or does not count once")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short windows of each kind: their tails say little")
    parser.add_argument("--demo", action="store_true", help="the demo model; nothing is lost")
    args = parser.parse_args()
    pool = DEMO if args.demo else TIMED
    pool = pool.quick() if args.quick else pool
    loss = None
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        two_gateways(Path(folder), pool.config) as gateways,
    ):
        seen = asyncio.run(measure(gateways, pool))
        if not args.demo:
            rng = random.Random(3)
            contents = [prompt(rng, pool.prompt_tokens) for _ in range(NUM_LINES)]
            loss = lose_in_the_middle(
                gateways, [chat_line(number, pool.model, each, 12) for number, each in enumerate(contents)]
            )
    faults = faults_of(seen, loss)
    variant = [name for name, is_set in (("demo", args.demo), ("quick", args.quick)) if is_set]
    notes = [f"{pool.num_rounds} windows of {pool.window_s:.0f} s of each kind", *faults]
    rows = list(chain(rows_of(seen, pool), [] if loss is None else rows_of_loss(loss)))
    write_report("batches", rows, notes=notes, variant="_".join(variant))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
