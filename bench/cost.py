"""Whether all that replicas cost is accounted for: what requests cost and what nobody asked for, beside the time that
the replicas' processes lived.

    python -m bench.cost [--seconds 60] [--workers 6] [--timed-only]

One platform: a pool of timed replicas that speculate and serve an adapter, one of which is killed under load and one
of which the autoscaler drains at the end; and a pool that computes the demo model, where some requests make their step
fail. Clients ask for streams, leave some in the middle, ask for several choices, for drafts, and for the adapter. At
the end the receipts of all requests, the tenant's usage and the metric are compared with each other, and all accounts
together with the lives of the processes, as the kernel tells them, times the price.

The processes' lives begin when Ray makes them, and end when they are gone; so what a killed replica had not reported,
and what passes between a last report and the end, is missing from the accounts, and bounded here.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from safetensors.numpy import save

from bench.support.cpu import is_alive
from bench.support.marks import Marks, faulty_replicas
from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.report import Row, write_report
from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE

PRICES = {"timed": 2.5, "demo": 1.2}
"""Prices of an hour of a replica, by pool."""
BAD_BIAS = 668
GATEWAY = "gateway: {{port: {port}, max_receipts: 262144}}\npools:\n"
POOLS = {
    "timed": f"""
  - name: timed
    model: demo
    served_names: [timed]
    price_per_hour: {PRICES["timed"]}
    replicas: 2
    autoscale: {{{{min_replicas: 1, max_replicas: 2, window_s: 2.0, start_s: 3.0, scale_down_delay_s: 20.0}}}}
    engine:
      runner: timed
      max_num_seqs: 16
      speculation: {{{{method: ngram}}}}
      adapters: {{{{slots: 2}}}}
      timed: {{{{base_s: 0.01, row_s: 0.0005, prefill_token_s: 0.0001}}}}
""",
    "demo": f"""
  - name: demo
    model: demo
    served_names: [demo]
    price_per_hour: {PRICES["demo"]}
    engine: {{{{speculation: {{{{method: ngram}}}}, max_num_seqs: 4}}}}
""",
}
ADAPTER = "style"
KINDS = ("stream", "stream", "left", "choices", "again", "adapter", "bad")
WITHIN = 0.01
"""Part of the whole by which the sums may differ."""
START_S = 300.0
SETTLE_S = 6.0
"""Longest time until usage has what the last requests cost."""
DRAIN_S = 40.0
SAMPLE_S = 0.05


@dataclass
class Life:
    """A replica's process, by the kernel's account. Unix times, seconds."""

    pool: str
    made_s: float
    seen_s: float
    is_over: bool = False


class Watch:
    """Notes which replicas' processes there are, until it is stopped."""

    def __init__(self, platform: PlatformProcess) -> None:
        self.lives: dict[int, Life] = {}
        self._platform = platform
        self._processes: dict[int, psutil.Process] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._lookup_s = 0.0

    def start(self) -> None:
        self._look_up()
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            if time.time() - self._lookup_s > 1.0:
                self._look_up()
            self._sample()

    def _look_up(self) -> None:
        self._lookup_s = time.time()
        for pid in self._platform.replicas:
            if pid not in self.lives:
                self._note(pid)

    def _note(self, pid: int) -> None:
        try:
            process = psutil.Process(pid)
            title = " ".join(process.cmdline())
            made_s = process.create_time()
        except psutil.Error:
            return
        pool = next((name for name in PRICES if f"pool-{name}" in title), None)
        if pool is None:  # a process that ends has no title any more
            return
        self._processes[pid] = process
        self.lives[pid] = Life(pool, made_s, time.time())

    def _sample(self) -> None:
        for pid, life in self.lives.items():
            if life.is_over:
                continue
            if is_alive(self._processes[pid]):
                life.seen_s = time.time()
            else:
                life.is_over = True

    def seconds(self, pool: str) -> float:
        """Seconds that the pool's processes have lived, all together."""
        return sum(life.seen_s - life.made_s for life in self.lives.values() if life.pool == pool)


@dataclass
class Requests:
    """What clients did, and the ids of their requests by model."""

    ids: dict[str, list[str]]
    ends: dict[str, int] = field(default_factory=dict)

    def note(self, pool: str, kind: str, response: httpx.Response) -> None:
        self.ids[pool].append(response.headers["x-request-id"])
        end = kind if response.status_code == 200 else f"{kind} {response.status_code}"
        self.ends[end] = self.ends.get(end, 0) + 1


class Clients:
    """Clients of one platform, each asking one request after another."""

    def __init__(self, platform: PlatformProcess, http: httpx.AsyncClient, asked: Requests) -> None:
        self._platform = platform
        self._http = http
        self._asked = asked

    async def work(self, pool: str, worker: int, until_s: float) -> None:
        draw = random.Random(f"{pool} {worker}")
        while time.monotonic() < until_s:
            kind = draw.choice(KINDS)
            if pool == "timed" and kind == "bad":
                kind = "left"  # nothing is computed there that could fail
            if pool == "demo" and kind == "adapter":
                kind = "again"
            await self._ask(pool, kind, draw)

    async def _ask(self, pool: str, kind: str, draw: random.Random) -> None:
        body = _body(pool, kind, draw)
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                self._asked.note(pool, kind, response)
                num_left = draw.randrange(1, 12) if kind == "left" else 10**9
                async for line in response.aiter_lines():
                    num_left -= line.startswith("data:")
                    if num_left <= 0:
                        return
        except httpx.HTTPError:
            self._asked.ends["broken"] = self._asked.ends.get("broken", 0) + 1


def _body(pool: str, kind: str, draw: random.Random) -> dict[str, Any]:
    length = draw.randrange(8, 200 if pool == "timed" else 60)
    body: dict[str, Any] = {
        "model": ADAPTER if kind == "adapter" else pool,
        "prompt": [draw.randrange(1000, 40000) for _ in range(length)],
        "max_tokens": draw.randrange(4, 120 if pool == "timed" else 24),
        "stream": kind != "choices",
        "ignore_eos": True,
        "temperature": 0.7,
        "seed": draw.randrange(2**31),
    }
    if kind == "choices":
        body["n"] = 2
    elif kind == "again":
        body["prompt"] = [1234, 2345, 3456, 4567] * 12  # a prompt that is in the cache, and that drafts come from
        body["temperature"] = 0.0
    elif kind == "bad":
        body["logit_bias"] = {str(BAD_BIAS): 1}
    return body


async def bring_adapter(http: httpx.AsyncClient) -> None:
    config = json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]})
    name, ones = "base_model.model.model.layers.0.self_attn.q_proj", np.ones((1, 576), dtype=np.float32)
    weights = save({f"{name}.lora_A.weight": ones, f"{name}.lora_B.weight": ones.T.copy()})
    files = [("file", (CONFIG_FILE, config.encode())), ("file", (WEIGHTS_FILE, weights))]
    response = await http.post("/v1/adapters", data={"name": ADAPTER, "base_model": "timed"}, files=files)
    response.raise_for_status()


@dataclass
class Found:
    """What everybody says at the end. Costs in units, by pool."""

    asked: Requests
    accounts: dict[str, dict[str, float]]
    """The metric, by pool and kind."""
    receipts: dict[str, float]
    usage: dict[str, float]
    lived: dict[str, float]
    """Price of the processes' lives."""
    num_replicas: dict[str, int]
    num_resumed: int
    num_drafted: float


async def run(platform: PlatformProcess, watch: Watch, pools: Sequence[str], seconds: float, workers: int) -> Found:
    """The whole course, from the load to the comparison."""
    asked = Requests({pool: [] for pool in pools})
    headers = {"authorization": f"Bearer {platform.key}"}
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(
        base_url=platform.url, headers=headers, timeout=120, trust_env=False, limits=limits
    ) as http:
        await bring_adapter(http)
        clients = Clients(platform, http, asked)
        until_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for pool in pools:
                for worker in range(workers if pool == "timed" else max(1, workers // 3)):
                    tasks.create_task(clients.work(pool, worker, until_s))
            await asyncio.sleep(seconds / 3)
            os.kill(_timed_pid(watch), signal.SIGKILL)
        await _wait_for_drain(watch)
        await asyncio.sleep(SETTLE_S)
        return await _compare(platform, watch, http, asked)


def _timed_pid(watch: Watch) -> int:
    return next(pid for pid, life in watch.lives.items() if life.pool == "timed" and not life.is_over)


async def _wait_for_drain(watch: Watch) -> None:
    """Wait until the autoscaler has taken one of the timed replicas away."""
    until_s = time.monotonic() + DRAIN_S
    while time.monotonic() < until_s:
        if sum(life.pool == "timed" and not life.is_over for life in watch.lives.values()) == 1:
            return
        await asyncio.sleep(0.2)


async def _compare(platform: PlatformProcess, watch: Watch, http: httpx.AsyncClient, asked: Requests) -> Found:
    rows = (await http.get("/v1/usage")).raise_for_status().json()["data"]
    receipts, num_resumed = {}, 0
    for pool, ids in asked.ids.items():
        pages = [await http.get(f"/v1/receipts/{each}") for each in ids]
        found = [page.json() for page in pages if page.status_code == 200]
        receipts[pool] = sum(page["cost"] or 0.0 for page in found)
        num_resumed += sum(choice["attempts"] > 1 for page in found for choice in page["choices"])
    page = (await http.get(f"{platform.url}/metrics")).text
    lived = {pool: watch.seconds(pool) * PRICES[pool] / 3600 for pool in asked.ids}
    usage = dict.fromkeys(asked.ids, 0.0)
    for row in rows:
        usage["timed" if row["adapter"] else row["model"]] += row["cost"]
    return Found(
        asked,
        {pool: read_costs(page, pool) for pool in asked.ids},
        receipts,
        usage,
        lived,
        {pool: sum(life.pool == pool for life in watch.lives.values()) for pool in asked.ids},
        num_resumed,
        platform.metric("penstock_draft_tokens_total"),
    )


def read_costs(page: str, pool: str) -> dict[str, float]:
    """The metric's samples of a pool, by kind."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith("penstock_cost_total{") and f'pool="{pool}"' in line:
            kind = line.partition('kind="')[2].partition('"')[0]
            found[kind] = float(line.rpartition(" ")[2])
    return found


@contextmanager
def priced_platform(folder: Path, pools: Sequence[str]) -> Iterator[PlatformProcess]:
    config = GATEWAY + "".join(POOLS[pool] for pool in pools)
    with faulty_replicas(Marks(bias=BAD_BIAS)), running_platform(folder, config, start_s=START_S) as platform:
        yield platform


def play(folder: Path, pools: Sequence[str], seconds: float, workers: int) -> Found:
    with priced_platform(folder, pools) as platform:
        watch = Watch(platform)
        watch.start()
        try:
            return asyncio.run(run(platform, watch, pools, seconds, workers))
        finally:
            watch.stop()


def rows_of(found: Found) -> list[Row]:
    """Parts of the cost of the processes' lives, and where the sums agree."""
    rows: list[Row] = []
    for pool, lived in found.lived.items():
        accounts = found.accounts[pool]
        for kind, cost in accounts.items():
            rows.append(Row(f"{pool}: {kind}", 100 * cost / lived, None, "% of the replicas' lives"))
        rows.append(
            Row(f"{pool}: all accounts", 100 * sum(accounts.values()) / lived, 100.0, "% of the replicas' lives")
        )
        idle = sum(cost for kind, cost in accounts.items() if kind != "requests")
        whole = found.receipts[pool] + idle
        rows.append(Row(f"{pool}: receipts and the rest", 100 * whole / lived, 100.0, "% of the replicas' lives"))
        rows.append(Row(f"{pool}: receipts", found.receipts[pool] * 1e3, accounts["requests"] * 1e3, "thousandths"))
        rows.append(Row(f"{pool}: usage", found.usage[pool] * 1e3, accounts["requests"] * 1e3, "thousandths"))
    return rows


def faults_of(found: Found) -> list[str]:
    """What does not hold."""
    faults = [
        f"{row.name}: {row.ours:.4f} of {row.rival:.4f}"
        for row in rows_of(found)
        if row.ratio is not None and abs(row.ratio - 1) > WITHIN
    ]
    for kind in ("start", "requests", "idle"):  # who has nothing to do drains at once
        if not found.accounts["timed"].get(kind):
            faults.append(f"timed: nothing is in the account {kind}")
    if "demo" in found.accounts and not found.accounts["demo"].get("failed"):
        faults.append("demo: no step has failed")
    if not found.num_resumed:
        faults.append("no answer was resumed")
    if not found.num_drafted:
        faults.append("nothing was drafted")
    return faults


def notes_of(found: Found) -> list[str]:
    ends = ", ".join(f"{count} {end}" for end, count in sorted(found.asked.ends.items()))
    replicas = ", ".join(f"{count} of {pool}" for pool, count in found.num_replicas.items())
    return [
        f"requests: {ends}; {found.num_resumed} sequences resumed; {found.num_drafted:.0f} tokens drafted",
        f"replicas that lived: {replicas}, one killed, one drained; prices an hour: {PRICES}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the load")
    parser.add_argument("--workers", type=int, default=6, help="clients of the timed pool; the demo has a third")
    parser.add_argument("--timed-only", action="store_true", help="leave the pool out that computes")
    options = parser.parse_args(arguments)
    pools = ["timed"] if options.timed_only else list(POOLS)
    with tempfile.TemporaryDirectory(prefix="penstock-cost-") as folder:
        found = play(Path(folder), pools, options.seconds, options.workers)
    write_report("cost", rows_of(found), notes=notes_of(found), variant="timed" if options.timed_only else "")
    faults = faults_of(found)
    for fault in faults:
        print(fault)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
