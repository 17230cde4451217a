"""Whether anything leaves of requests that say `x-penstock-stay: edge`, under overload and faults, counted where it
would arrive.

    python -m bench.stay

A platform of timed replicas, two on the edge and one in the cloud, and a provider: a real HTTP server behind a relay
that counts connections and bytes. Half of the requests are of a tenant whose policy is cloud_first, the others of
edge_first and cheapest_within_target; they come by all four generating paths, half of them as streams, more at once
than the edge and the queue hold, while replicas of the edge are killed one after the other.

First all requests stay: then nothing at all may arrive. After that every second one does not, and the provider fails
now and then, so that its breaker opens and tries again: each prompt bears a mark, and no mark of one that stays may be
among the bytes received. The exit status is 0 only if nothing has left.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from bench.support.counting_relay import CountingRelay
from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.report import Row, write_report
from penstock.base.redis import connect
from penstock.cli.state import StateDir
from penstock.tenancy.keys import create_key
from penstock.tenancy.tenants import Settings, Tenants
from penstock_loadtest.fake.behaviour import Behaviour, Fault
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.scenario import Lengths

REQUESTS = 10_000
AT_ONCE = 128
MIXED_PART = 0.2
"""Requests of the second part, as a part of the first's."""
START_S = 300.0
KILL_EVERY_S = 6.0
PAUSE_S = 0.1
"""Wait of a client that was refused, seconds."""
STAY_MARK, GO_MARK = b"stay-", b"go-"
"""Beginnings of the marks that prompts bear."""
CONFIG = """
gateway: {{port: {port}, ttft_target_s: 0.2, max_queue: 48, queue_timeout_s: 3}}
pools:
- name: edge
  model: demo
  served_names: [chat]
  tier: edge
  replicas: 2
  price_per_hour: 1.0
  engine: &engine {{runner: timed, max_num_seqs: 12, timed: {{base_s: 0.01, row_s: 0.001, max_model_len: 2048}}}}
- name: cloud
  model: demo
  served_names: [chat]
  tier: cloud
  price_per_hour: 4.0
  engine: *engine
providers:
- {{name: upstream, base_url: "URL", model: large, served_names: [chat], ttft_s: 0.05, \
breaker_failures: 2, breaker_open_s: 0.5, input_price: 0.01, output_price: 0.01, extra_fields: [ignore_eos]}}
"""
POLICIES = ("cloud_first", "edge_first", "cloud_first", "cheapest_within_target")
"""Policies of requests, in turn."""
PROVIDER = Behaviour(
    models=["large"],
    ttft_s=Lengths(constant=0.02),
    gap_s=Lengths(constant=0.002),
    faults=[Fault(kind="status_500", share=0.3), Fault(kind="close_mid_stream", share=0.1)],
)


@dataclass
class Seen:
    """What clients saw of one part."""

    statuses: Counter[str] = field(default_factory=Counter)
    """Requests that stay by status, or the name of the client's error."""
    num_elsewhere: int = 0
    """Answers to requests that stay which name another tier than the edge, or do not repeat the header."""
    num_left: int = 0
    """Answers to others which name the cloud."""
    num_kills: int = 0

    def refused(self) -> int:
        return sum(count for status, count in self.statuses.items() if status != "200")


class Load:
    """Clients that ask in turn, each for the next request as soon as it has its answer."""

    def __init__(self, client: httpx.AsyncClient, keys: dict[str, str], seen: Seen) -> None:
        """keys: by policy."""
        self._client = client
        self._keys = keys
        self._seen = seen

    async def run(self, num_requests: int, *, all_stay: bool) -> None:
        numbers = iter(range(num_requests))
        await asyncio.gather(*(self._ask_in_turn(numbers, all_stay=all_stay) for _ in range(AT_ONCE)))

    async def _ask_in_turn(self, numbers: Iterator[int], *, all_stay: bool) -> None:
        for number in numbers:
            stays = all_stay or number // len(POLICIES) % 2 == 0
            if not await self._ask(number, stays=stays):
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, number: int, *, stays: bool) -> bool:
        """Whether the answer came."""
        path, body = make_request(number, f"{(STAY_MARK if stays else GO_MARK).decode()}{number:06d}")
        headers = {"authorization": f"Bearer {self._keys[POLICIES[number % len(POLICIES)]]}"}
        if stays:
            headers["x-penstock-stay"] = "edge"
        try:
            answer = await self._client.post(path, json=body, headers=headers)
        except httpx.HTTPError as error:
            self._note(type(error).__name__, None, stays=stays)
            return False
        self._note(str(answer.status_code), answer, stays=stays)
        return answer.status_code == httpx.codes.OK

    def _note(self, status: str, answer: httpx.Response | None, *, stays: bool) -> None:
        tier = None if answer is None else answer.headers.get("x-penstock-tier")
        if not stays:
            self._seen.num_left += tier == "cloud"
            return
        self._seen.statuses[status] += 1
        if answer is not None and status == "200":
            is_told = answer.headers.get("x-penstock-stay") == "edge"
            self._seen.num_elsewhere += tier != "edge" or not is_told


def make_request(number: int, mark: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request whose prompt bears a mark."""
    messages = [{"role": "user", "content": f"{mark} {'word ' * 20}"}]
    is_stream = number // 16 % 2 == 0
    path, fields = (
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "ignore_eos": True}),
        ("/v1/completions", {"prompt": mark, "max_tokens": 8, "ignore_eos": True}),
        ("/v1/messages", {"messages": messages, "max_tokens": 8}),
        ("/v1/responses", {"input": mark, "max_output_tokens": 8}),
    )[number // len(POLICIES) // 2 % 4]
    return path, {"model": "chat", "stream": is_stream, **fields}


async def make_keys(platform: PlatformProcess) -> dict[str, str]:
    """A tenant of each policy; keys by policy."""
    keys = {}
    async with connect(platform.redis_url) as client:
        for policy in dict.fromkeys(POLICIES):
            name = policy.replace("_", "-")
            await Tenants(client).create(name, Settings(tier_policy=policy), time.time())
            keys[policy] = await create_key(client, StateDir(platform.state).secret(), name)
    return keys


async def kill_in_turn(platform: PlatformProcess, seen: Seen) -> None:
    """Kill a replica of the edge again and again; Ray Serve starts another one each time."""
    while True:
        await asyncio.sleep(KILL_EVERY_S)
        found = await asyncio.to_thread(lambda: [pid for pid in platform.replicas if is_of_the_edge(pid)])
        for pid in found[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                seen.num_kills += 1


def is_of_the_edge(pid: int) -> bool:
    try:
        return "pool-edge" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


async def play(platform: PlatformProcess, keys: dict[str, str], num_requests: int, *, all_stay: bool) -> Seen:
    """One part of the load, with its faults."""
    seen = Seen()
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=platform.url, timeout=60, trust_env=False, limits=limits) as client:
        killing = asyncio.ensure_future(kill_in_turn(platform, seen))
        try:
            await Load(client, keys, seen).run(num_requests, all_stay=all_stay)
        finally:
            killing.cancel()
    return seen


def measure(folder: Path, num_requests: int, loop: asyncio.Runner) -> list[str]:
    """Play both parts and write the report. Returns what has gone wrong, in words."""
    stack = contextlib.AsyncExitStack()
    server = loop.run(stack.enter_async_context(FakeServer(PROVIDER)))
    relay = loop.run(stack.enter_async_context(CountingRelay(server.url)))
    try:
        with running_platform(folder, CONFIG.replace("URL", relay.url), start_s=START_S) as platform:
            keys = loop.run(make_keys(platform))
            alone = loop.run(play(platform, keys, num_requests, all_stay=True))
            arrived = Arrived(relay.num_connections, relay.num_bytes, count_cloud(platform))
            mixed = loop.run(play(platform, keys, round(MIXED_PART * num_requests), all_stay=False))
            opened = platform.metric("penstock_tier_decisions_total", reason="breaker_open")
    finally:
        loop.run(stack.aclose())
    write_report("stay", make_rows(alone, mixed, arrived, relay), notes=make_notes(alone, mixed, num_requests, opened))
    return find_faults(alone, mixed, arrived, relay)


class Arrived(NamedTuple):
    """What has come of requests of which all stay."""

    num_connections: int
    num_bytes: int
    num_in_cloud: int
    """Sequences that were sent to the pool of the cloud."""


def count_cloud(platform: PlatformProcess) -> int:
    return int(platform.metric("penstock_route_attempts_total", pool="cloud"))


def make_rows(alone: Seen, mixed: Seen, arrived: Arrived, relay: CountingRelay) -> list[Row]:
    return [
        Row("requests that stay", float(alone.statuses.total()), None, ""),
        Row("of those answered, by the edge", float(alone.statuses["200"] - alone.num_elsewhere), None, ""),
        Row("of those refused, or failed", float(alone.refused()), None, ""),
        Row("replicas killed meanwhile", float(alone.num_kills), None, ""),
        Row("connections that reached the provider", float(arrived.num_connections), None, ""),
        Row("bytes that reached the provider", float(arrived.num_bytes), None, "B"),
        Row("sequences that reached the cloud's pool", float(arrived.num_in_cloud), None, ""),
        Row("mixed: requests that stay", float(mixed.statuses.total()), None, ""),
        Row("mixed: of those answered, by the edge", float(mixed.statuses["200"] - mixed.num_elsewhere), None, ""),
        Row("mixed: their marks among the provider's bytes", float(relay.count(STAY_MARK)), None, ""),
        Row("mixed: marks of others among those", float(relay.count(GO_MARK)), None, ""),
        Row("mixed: bytes that reached the provider", float(relay.num_bytes), None, "B"),
    ]


def make_notes(alone: Seen, mixed: Seen, num_requests: int, opened: float) -> list[str]:
    return [
        f"{num_requests} requests, {AT_ONCE} at once, policies in turn: {', '.join(POLICIES)}; then {MIXED_PART:g}"
        " times as many, of which every second one stays",
        f"statuses of those that stay: {dict(alone.statuses)}; mixed: {dict(mixed.statuses)}",
        f"mixed: {mixed.num_kills} replicas killed, {mixed.num_left} of the others answered by the cloud, {opened:.0f}"
        " decisions for want of a breaker that lets through",
    ]


def find_faults(alone: Seen, mixed: Seen, arrived: Arrived, relay: CountingRelay) -> list[str]:
    """What is not as it must be: something left, or the way out was not open, or nothing made anybody leave."""
    faults = []
    if any(arrived):
        faults.append(f"of requests that stay, {arrived} left")
    if alone.num_elsewhere or mixed.num_elsewhere:
        faults.append(f"{alone.num_elsewhere + mixed.num_elsewhere} answers name another tier, or forget the header")
    if relay.count(STAY_MARK):
        faults.append(f"{relay.count(STAY_MARK)} marks of requests that stay reached the provider")
    if not relay.count(GO_MARK) or not mixed.num_left:
        faults.append("no other request left either: the way out was not open")
    if not alone.num_kills or not alone.refused() or not alone.statuses["200"]:
        faults.append("no replica was killed, nothing was refused or nothing was answered: there was no pressure")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether anything leaves of requests that stay on the edge.")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"of the first part; default {REQUESTS}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, asyncio.Runner() as loop:
        faults = measure(Path(folder), options.requests, loop)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
