"""Limits to the token, and usage to the token: what tenants were given against what they may have and what they are
charged.

    python -m bench.limits [--minutes 5] [--seconds 30]

First the limits: four gateways' limiters, each a process, on one real Redis, and 200 clients that ask for 20 to 60
tokens and use half to all of them, of a tenant with 10,000 tokens a minute; midway one gateway is killed, while it has
requests under way. No window of a minute, wherever it begins, may hold more than the limit, and the windows are to be
97 % full on average. What a killed gateway had let in counts as reserved: nobody knows what of it was used.

Then the usage, on a whole platform with real engines (`bench.poison`): streams that end, streams that their clients
leave, answers with several choices, and requests with which steps raise, while two of three replicas are killed one
after the other; at the end the gateway itself is killed among streams. `/v1/usage` is compared with the tokens that
were received.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from bench.poison import BIAS_MARK, MODEL, STREAM, tiny_platform, wait_for_replicas
from bench.support.limit_worker import Admitted, Event, Settings
from bench.support.platform_process import PlatformProcess
from bench.support.report import Row, write_report
from bench.support.tenants import make_keys
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.router.completions.admission import USAGE_EVERY_S
from penstock.tenancy import tenants, window
from penstock.tenancy.usage import FLUSH_S

LIMIT = 10_000
NUM_GATEWAYS, NUM_CLIENTS = 4, 200
FULL = 0.97
START_S, STOP_S = 60.0, 30.0
NUM_STREAMS = 8
QUARANTINED = b"when they were lost; it is not tried on another one"
LEFT_TOKENS = 128
"""Tokens that a stream may be charged beyond what its client had read when it left, on average: what was under way, and
lay in the connection of a client that reads late. Without an end at the departure it would be 250."""
UNWRITTEN_S = USAGE_EVERY_S + FLUSH_S + 1.0
"""Time whose tokens a killed gateway may not have written, seconds."""
WITHIN_S = 60.0


# limits


class Charge(NamedTuple):
    """Tokens that a request was given at some moment between two times, seconds."""

    begun_s: float
    ended_s: float
    tokens: int


@dataclass(frozen=True)
class LimitResult:
    """What the clients of all gateways were given."""

    num_admitted: int
    fullest: int
    """Most tokens in any window."""
    mean_share: float
    """Tokens in a window, as a part of the limit, on average over all windows."""
    num_unsettled: int
    """Requests of the killed gateway that were under way."""
    num_alone: int = 0
    """Times that a gateway had no answer of Redis in time and decided alone, by its share of the limit: then a window
    may hold up to twice the limit."""


def read_charges(paths: Sequence[Path]) -> tuple[list[Charge], int]:
    """Charges of all gateways, and how many were never settled: those count with all that they had reserved."""
    admitted: list[Admitted] = []
    settled: set[str] = set()
    for path in paths:
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue  # the last one of a killed process
            event = msgspec.json.decode(line, type=Event)
            if isinstance(event, Admitted):
                admitted.append(event)
            else:
                settled.add(event.id)
    charges = [
        Charge(each.begun_s, each.ended_s, each.used if each.id in settled else each.reserved) for each in admitted
    ]
    return sorted(charges), len(admitted) - len(settled)


def fullest_window(charges: Sequence[Charge], window_s: float) -> int:
    """Most tokens of any window, of requests that lie in it for certain. O(charges squared)."""
    return max(
        (
            sum(each.tokens for each in charges if each.begun_s >= first.begun_s and each.ended_s <= end_s)
            for first in charges
            for end_s in [first.begun_s + window_s]
        ),
        default=0,
    )


def mean_share(charges: Sequence[Charge], window_s: float, limit: int, end_s: float) -> float:
    """Tokens of a window as a part of the limit, on average over all windows between the first charge and the end."""
    begin_s = min(each.ended_s for each in charges)
    latest_s = end_s - window_s
    overlaps = (
        each.tokens * max(0.0, min(each.ended_s, latest_s) - max(each.ended_s - window_s, begin_s)) for each in charges
    )
    return sum(overlaps) / ((latest_s - begin_s) * limit)


def run_limits(folder: Path, bucket_ms: int, num_buckets: int, seconds: float) -> LimitResult:
    """Clients at four gateways for so many seconds; one gateway is killed midway."""
    sockets = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    server = EmbeddedRedis(executable=find_executable(), data_dir=folder / "redis", socket_dir=sockets)
    server.start()
    paths = [folder / f"gateway-{number}.jsonl" for number in range(NUM_GATEWAYS)]
    share = NUM_CLIENTS // NUM_GATEWAYS
    settings = [
        Settings(server.url, path.stem, NUM_GATEWAYS, share, LIMIT, bucket_ms, num_buckets, seconds, str(path))
        for path in paths
    ]
    processes = [_start_worker(each) for each in settings]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        begun_s = time.monotonic()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        time.sleep(seconds / 2)
        _wait_until_it_grows(paths[0], seconds / 2)
        processes[0].kill()
        for process in processes[1:]:
            process.wait(seconds + STOP_S)
    finally:
        for process in processes:
            process.kill()
        said = [process.communicate()[1] for process in processes]
        server.stop()
        sockets.rmdir()
    charges, num_unsettled = read_charges(paths)
    window_s = bucket_ms * num_buckets / 1000
    share_used = mean_share(charges, window_s, LIMIT, begun_s + seconds)
    num_alone = sum(lines.count(b"limits_alone") for lines in said)
    return LimitResult(len(charges), fullest_window(charges, window_s), share_used, num_unsettled, num_alone)


def _wait_until_it_grows(path: Path, within_s: float) -> None:
    """Wait until a gateway lets somebody in, at most so many seconds."""
    size, until_s = path.stat().st_size, time.monotonic() + within_s
    while path.stat().st_size == size and time.monotonic() < until_s:
        time.sleep(0.001)


def _start_worker(settings: Settings) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "bench.support.limit_worker", msgspec.json.encode(settings).decode()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


# usage


@dataclass
class Account:
    """What one tenant has received, and what it is charged."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Output tokens as they were read, with the time of the monotonic clock."""
    prompt_tokens: int = 0
    """Prompt tokens of the requests that count."""
    num_requests: int = 0
    faults: list[str] = field(default_factory=list)
    num_quarantined: int = 0
    """Streams that ended because they were on both replicas that were killed."""
    charged_prompt: int = 0
    charged_output: int = 0

    @property
    def delivered(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def overshoot(self) -> int:
        """Output tokens that were charged and not received; below 0: received and not charged."""
        return self.charged_output - self.delivered

    def delivered_since(self, at_s: float) -> int:
        return sum(count for arrived_s, count in self.arrivals if arrived_s >= at_s)


class Tenant:
    """A client of one tenant, which keeps its account."""

    def __init__(self, platform: PlatformProcess, key: str) -> None:
        self.account = Account()
        self.http = httpx.AsyncClient(
            base_url=platform.url,
            headers={"authorization": f"Bearer {key}"},
            timeout=WITHIN_S,
            trust_env=False,
            verify=False,  # no certificates: loading them takes longer than asking
        )

    async def stream(self, rng: random.Random, max_tokens: int, leave_after: int | None = None) -> None:
        """One stream; leave_after: events after which the client hangs up."""
        body = _body(rng, max_tokens) | STREAM
        self.account.num_requests += 1
        pieces: list[tuple[float, bytes]] = []
        num_events, fault = 0, ""
        try:
            async with self.http.stream("POST", "/v1/completions", json=body) as response:
                async for piece in response.aiter_raw():
                    pieces.append((time.monotonic(), piece))
                    num_events += piece.count(b"data: {")
                    if leave_after is not None and num_events >= leave_after:
                        break
        except httpx.HTTPError as error:
            fault = type(error).__name__
        arrivals, is_ended = count_tokens(pieces)
        self.account.arrivals += arrivals
        num_tokens = sum(count for _, count in arrivals)
        if num_tokens:
            self.account.prompt_tokens += len(body["prompt"])
        is_quarantined = any(QUARANTINED in piece for _, piece in pieces)
        self.account.num_quarantined += is_quarantined
        is_whole = is_ended and num_tokens == max_tokens
        if leave_after is None and not (is_whole or is_quarantined):
            self.account.faults.append(f"{num_tokens} tokens, {fault or pieces[-1:]}"[:300])

    async def whole(self, rng: random.Random) -> None:
        """One answer of two choices."""
        body = _body(rng, 60) | {"n": 2, "ignore_eos": True, "return_token_ids": True}
        answer = await self.http.post("/v1/completions", json=body)
        self.account.num_requests += 1
        if answer.status_code != 200:
            self.account.faults.append(f"{answer.status_code} {answer.text[:200]}")
            return
        count = sum(len(choice["token_ids"]) for choice in answer.json()["choices"])
        self.account.arrivals.append((time.monotonic(), count))
        self.account.prompt_tokens += len(body["prompt"])

    async def fail(self, rng: random.Random) -> None:
        """One request with which a step raises: its prompt is charged."""
        body = _body(rng, 20) | {"logit_bias": {str(BIAS_MARK): 1}}
        answer = await self.http.post("/v1/completions", json=body)
        self.account.num_requests += 1
        self.account.prompt_tokens += len(body["prompt"])
        if answer.status_code != 500:
            self.account.faults.append(f"{answer.status_code} {answer.text[:200]}")

    async def read_usage(self) -> None:
        """Read what is charged, when it has been the same for longer than a gateway takes to write it."""
        same_since_s = time.monotonic()
        while time.monotonic() - same_since_s < UNWRITTEN_S:
            found = (self.account.charged_prompt, self.account.charged_output)
            page = await self.http.get("/v1/usage")
            rows = page.json()["data"] if page.status_code == 200 else []
            self.account.charged_prompt = sum(row["prompt_tokens"] for row in rows)
            self.account.charged_output = sum(row["completion_tokens"] for row in rows)
            if found != (self.account.charged_prompt, self.account.charged_output):
                same_since_s = time.monotonic()
            await asyncio.sleep(0.3)


def count_tokens(pieces: Sequence[tuple[float, bytes]]) -> tuple[list[tuple[float, int]], bool]:
    """Tokens of a stream's whole events by the time at which they had come, and whether its end had."""
    arrivals: list[tuple[float, int]] = []
    rest, is_ended = b"", False
    for at_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            is_ended |= line == b"data: [DONE]"
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices", [])
                arrivals.append((at_s, sum(len(choice["token_ids"]) for choice in choices)))
    return arrivals, is_ended


def _body(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    prompt = [rng.randrange(1000, 40_000) for _ in range(rng.randint(4, 60))]
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.8, "seed": 5}


@dataclass(frozen=True)
class UsageResult:
    """The accounts of the tenants, each with one kind of request."""

    accounts: dict[str, Account]
    num_lost: int
    """Replicas that were killed."""
    num_resumed: int
    unwritten: int
    """Tokens received in the time that a killed gateway may not have written, by the tenant `cut`."""

    def faults(self) -> list[str]:
        """Ways in which the accounts are wrong, each as a few words; none if they are right."""
        found = [
            f"{name}: {fault}" for name, each in self.accounts.items() if name != "cut" for fault in each.faults[:3]
        ]
        for name, account in self.accounts.items():
            most = {"left": LEFT_TOKENS * account.num_requests, "cut": LEFT_TOKENS * account.num_requests}.get(name, 0)
            least = -self.unwritten if name == "cut" else 0
            if not least <= account.overshoot <= most:
                found.append(f"{name}: {account.delivered} received, {account.charged_output} charged")
            if name != "cut" and name != "left" and account.charged_prompt != account.prompt_tokens:
                found.append(f"{name}: prompts of {account.prompt_tokens}, {account.charged_prompt} charged")
        return found


KINDS = ("ended", "left", "choices", "failing", "cut")


def run_usage(folder: Path, seconds: float) -> UsageResult:
    """All kinds of requests for so many seconds, beside two kills of replicas; then streams whose gateway is killed."""

    async def main(platform: PlatformProcess) -> UsageResult:
        keys = await make_keys(platform, dict.fromkeys(KINDS, tenants.Settings()))
        clients = {name: Tenant(platform, key) for name, key in keys.items()}
        replicas = await wait_for_replicas(platform, 3)
        num_lost = await _run_kinds(platform, clients, seconds)
        num_resumed = int(await asyncio.to_thread(platform.metric, "penstock_route_attempts_total", reason="resume"))
        assert replicas != set(platform.replicas)
        for name in KINDS[:-1]:
            await clients[name].read_usage()
        unwritten = await _cut(platform, clients["cut"])
        for client in clients.values():
            await client.http.aclose()
        accounts = {name: client.account for name, client in clients.items()}
        return UsageResult(accounts, num_lost, num_resumed, unwritten)

    with tiny_platform(folder, 3) as (platform, _):
        return asyncio.run(main(platform))


async def _run_kinds(platform: PlatformProcess, clients: dict[str, Tenant], seconds: float) -> int:
    """Every kind but the last for so many seconds; returns how many replicas were killed."""
    until_s = time.monotonic() + seconds

    async def repeat(seed: str, send: Callable[[random.Random], Any]) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until_s:
            await send(rng)

    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_STREAMS):
            tasks.create_task(repeat(f"a{number}", lambda rng: clients["ended"].stream(rng, rng.randint(20, 300))))
            tasks.create_task(
                repeat(f"b{number}", lambda rng: clients["left"].stream(rng, 300, leave_after=rng.randint(1, 100)))
            )
        tasks.create_task(repeat("c", clients["choices"].whole))
        tasks.create_task(repeat("d", clients["failing"].fail))
        for _ in range(2):
            await asyncio.sleep(seconds / 3)
            os.kill(min(platform.replicas), signal.SIGKILL)
    return 2


async def _cut(platform: PlatformProcess, client: Tenant) -> int:
    """Streams whose gateway is killed; returns the tokens that it may not have written."""
    streams = [asyncio.create_task(client.stream(random.Random(number), 1500)) for number in range(NUM_STREAMS)]
    await asyncio.sleep(1.5 * UNWRITTEN_S)
    (gateway,) = platform.gateways
    os.kill(gateway, signal.SIGKILL)
    killed_s = time.monotonic()
    await asyncio.gather(*streams)
    unwritten = client.account.delivered_since(killed_s - UNWRITTEN_S)
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                if (await client.http.get("/v1/usage")).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
    await client.read_usage()
    return unwritten


def rows_of(limits: LimitResult, usage: UsageResult) -> list[Row]:
    rows = [
        Row("limits: requests let in", limits.num_admitted, None, ""),
        Row("limits: most tokens in any minute, beside the limit", limits.fullest, LIMIT, "tokens"),
        Row("limits: a minute's tokens on average, of the limit", 100 * limits.mean_share, None, "%"),
        Row("limits: requests of the killed gateway that stay reserved", limits.num_unsettled, None, ""),
        Row("limits: times that Redis did not answer in time", limits.num_alone, None, ""),
        Row("usage: replicas killed", usage.num_lost, None, ""),
        Row("usage: answers that went on elsewhere", usage.num_resumed, None, ""),
        Row("usage: streams on both, which end", sum(a.num_quarantined for a in usage.accounts.values()), None, ""),
    ]
    for name, account in usage.accounts.items():
        rows += [
            Row(f"usage, {name}: requests", account.num_requests, None, ""),
            Row(f"usage, {name}: charged, beside received", account.charged_output, account.delivered, "tokens"),
        ]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of the limits")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the usage")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        limits = run_limits(folder, window.MINUTE.bucket_ms, window.MINUTE.num_buckets, 60 * args.minutes)
        usage = run_usage(folder, args.seconds)
    left, cut = usage.accounts["left"], usage.accounts["cut"]
    notes = [
        f"left: {left.overshoot / max(1, left.num_requests):.1f} tokens charged beyond what was read, a client",
        f"cut: {-cut.overshoot} tokens received and not charged, of {usage.unwritten} in the last {UNWRITTEN_S:g} s",
        *usage.faults(),
    ]
    write_report("limits", rows_of(limits, usage), notes=notes)
    is_well = limits.fullest <= LIMIT and limits.mean_share >= FULL and not usage.faults()
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
