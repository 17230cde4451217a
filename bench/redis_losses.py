"""Redis lost under load, by a whole platform over timed replicas: a failover by Sentinel, a node of a Cluster that dies
and comes back, and a server that comes back empty.

    python -m bench.redis_losses [--only sentinel cluster empty] [--seconds 10]

Twelve tenants with limits send short requests one after another each, before the loss, through it and after it. Wanted:
no request with a key that the gateway knows is refused, in none of the three. Where Redis comes back empty, the gateway
notices; a key that nobody has used before is refused until `penstock tenant apply` has brought back what `penstock
tenant export` wrote, and answers then. Reported also: how long Redis took no writes, how long requests took, and what
the tenants are charged beside what they received: a failover may lose its last second of writes, and an export has no
usage.
"""

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import redis.asyncio
from redis.exceptions import RedisError

from bench.support.free_ports import free_port
from bench.support.platform_process import PlatformProcess, penstock, running_platform, timed_platform
from bench.support.redis_servers import cluster, sentinels, single
from bench.support.report import Row, write_report
from bench.support.tenants import make_keys
from penstock.base.redis import connect
from penstock.tenancy.tenants import Limits, Settings

CONFIG = timed_platform("max_num_seqs: 64, timed: {base_s: 0.002, num_blocks: 8192, max_model_len: 1024}")
NUM_TENANTS = 12
LIMITS = Limits(requests_per_minute=1_000_000, tokens_per_minute=100_000_000)
UNUSED = "unused"
"""Tenant whose key no gateway has seen before the loss."""
ANSWER_TOKENS = 4
PAUSE_S = 0.05
WITHIN_S = 60.0
NOTICED_WITHIN_S = 20.0
"""Longest time until a gateway has noticed that Redis is empty; it looks every 5 s."""
KINDS = ("sentinel", "cluster", "empty")


class Place(NamedTuple):
    """A Redis, and how it is lost."""

    url: str
    lose: Callable[[], None]


@dataclass
class Seen:
    """What the tenants and Redis's own client saw. Times in seconds."""

    statuses: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    received_tokens: int = 0
    charged_tokens: int = 0
    away_s: float = 0.0
    """Longest time without a write to all of Redis."""
    noticed_s: float | None = None
    """Time from the loss until the gateway counted it as a loss of data; None: it did not."""
    applied_s: float | None = None
    """Time that `penstock tenant apply` took; None: there was no need."""
    unused: list[int] = field(default_factory=list)
    """Statuses of the unused key: while its tenant is lost, and when it is back."""
    back_s: float | None = None
    """Time from the end of `penstock tenant apply` until the unused key was answered."""

    @property
    def num_refused(self) -> int:
        """Requests with known keys that were not answered."""
        return self.statuses.total() - self.statuses["200"]

    def faults(self, kind: str) -> list[str]:
        """Ways in which it was not as wanted, each as a few words."""
        found = [f"{self.num_refused} requests with known keys: {dict(self.statuses)}"] if self.num_refused else []
        if (self.noticed_s is not None) is not (kind == "empty"):
            found.append("a loss of data was not noticed" if kind == "empty" else "a failover was taken for a loss")
        if kind == "empty" and self.unused != [401, 200]:
            found.append(f"the unused key was answered with {self.unused}")
        return found


@contextmanager
def place(kind: str, folder: Path) -> Iterator[Place]:
    """Servers of one kind."""
    if kind == "sentinel":
        with sentinels(folder) as (servers, master, url):
            yield Place(url, lambda: servers.kill(master))
    elif kind == "cluster":
        with cluster(folder) as (servers, ports, url):

            def lose_node() -> None:
                servers.kill(ports[1])
                time.sleep(1.0)
                servers.start_again(ports[1]).close()

            yield Place(url, lose_node)
    else:
        port = free_port()
        with single(folder, port) as (servers, url):

            def lose_all() -> None:
                servers.kill(port)
                shutil.rmtree(folder / str(port) / "appendonlydir", ignore_errors=True)
                (folder / str(port) / "appendonly.aof").unlink(missing_ok=True)
                time.sleep(1.0)
                servers.start_again(port).close()

            yield Place(url, lose_all)


class Load:
    """Requests of the tenants, and writes to every part of Redis."""

    def __init__(self, platform: PlatformProcess, client: redis.asyncio.Redis, keys: dict[str, str]) -> None:
        self.seen = Seen()
        self.is_writing = True
        """Whether Redis took the latest writes."""
        self.num_lost = 0
        """Rounds of writes that Redis did not take."""
        self._client = client
        self._keys = keys
        self._http = httpx.AsyncClient(
            base_url=platform.url,
            timeout=WITHIN_S,
            trust_env=False,
            verify=False,  # no certificates: loading them takes longer than asking
        )

    async def run(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(stop))
            for key in self._keys.values():
                tasks.create_task(self._send(key, stop))

    async def ask(self, key: str) -> int:
        """The status of one request; its tokens are counted."""
        body = {"model": "sim", "prompt": [5, 6, 7], "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        headers = {"authorization": f"Bearer {key}"}
        answer = await self._http.post("/v1/completions", json=body, headers=headers)
        if answer.status_code == 200:
            self.seen.received_tokens += answer.json()["usage"]["completion_tokens"]
        return answer.status_code

    async def read_charged(self) -> int:
        """Completion tokens that all tenants are charged."""
        pages = [
            (await self._http.get("/v1/usage", headers={"authorization": f"Bearer {key}"})).json()
            for key in self._keys.values()
        ]
        return sum(row["completion_tokens"] for page in pages for row in page["data"])

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, key: str, stop: asyncio.Event) -> None:
        while not stop.is_set():
            begun_s = time.monotonic()
            try:
                outcome = str(await self.ask(key))
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            self.seen.statuses[outcome] += 1
            self.seen.slowest_s = max(self.seen.slowest_s, time.monotonic() - begun_s)
            await asyncio.sleep(PAUSE_S)

    async def _write(self, stop: asyncio.Event) -> None:
        last_s = time.monotonic()
        while not stop.is_set():
            try:
                async with asyncio.timeout(5.0):
                    await asyncio.gather(*(self._client.set(f"probe:{{{each}}}", 1) for each in range(NUM_TENANTS)))
                self.is_writing = True
                now_s = time.monotonic()
                self.seen.away_s, last_s = max(self.seen.away_s, now_s - last_s), now_s
            except (RedisError, OSError, TimeoutError):
                self.num_lost += 1
                self.is_writing = False
            await asyncio.sleep(0.02)


async def measure(platform: PlatformProcess, kind: str, found: Place, seconds: float, folder: Path) -> Seen:
    """The load for so many seconds before the loss, through it, and for so many after Redis takes writes again."""
    tenants = {f"t{number}": Settings(limits=LIMITS) for number in range(NUM_TENANTS)} | {UNUSED: Settings()}
    keys = await make_keys(platform, tenants)
    unused = keys.pop(UNUSED)
    export = folder / "export.jsonl"
    await command(platform, "tenant", "export", "--output", str(export))
    async with connect(found.url) as client:
        load = Load(platform, client, keys)
        stop = asyncio.Event()
        running = asyncio.create_task(load.run(stop))
        try:
            await asyncio.sleep(seconds)
            lost_s = time.monotonic()
            await asyncio.to_thread(found.lose)
            async with asyncio.timeout(WITHIN_S):
                while not (load.num_lost and load.is_writing):  # noqa: ASYNC110 (Redis is another process)
                    await asyncio.sleep(0.05)
            load.seen.noticed_s = await when_noticed(platform, lost_s, NOTICED_WITHIN_S if kind == "empty" else seconds)
            if kind == "empty":
                await restore(platform, load, unused, export)
            await asyncio.sleep(seconds)
        finally:
            stop.set()
            await running
        await asyncio.sleep(3.0)  # what is charged is written every second
        load.seen.charged_tokens = await load.read_charged()
        await load.close()
    return load.seen


async def when_noticed(platform: PlatformProcess, lost_s: float, within_s: float) -> float | None:
    """Time from the loss until the gateway has counted one, None if it does not within so many seconds."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if await asyncio.to_thread(platform.metric, "penstock_redis_losses_total"):
            return time.monotonic() - lost_s
        await asyncio.sleep(0.1)
    return None


async def restore(platform: PlatformProcess, load: Load, unused: str, export: Path) -> None:
    """Bring back what was exported; the key of a tenant that is known again is answered."""
    load.seen.unused.append(await load.ask(unused))
    begun_s = time.monotonic()
    await command(platform, "tenant", "apply", str(export))
    applied_s = time.monotonic()
    load.seen.applied_s = applied_s - begun_s
    until_s = applied_s + WITHIN_S
    while (status := await load.ask(unused)) != 200 and time.monotonic() < until_s:  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.02)
    load.seen.back_s = time.monotonic() - applied_s
    load.seen.unused.append(status)


async def command(platform: PlatformProcess, *arguments: str) -> None:
    """Run `penstock`. Raises CalledProcessError."""
    line = penstock(*arguments, "--state", str(platform.state))
    await asyncio.to_thread(subprocess.run, line, check=True, capture_output=True, timeout=WITHIN_S)


def run(kind: str, folder: Path, seconds: float) -> Seen:
    servers, platform_folder = folder / "redis", folder / "platform"
    for each in (servers, platform_folder):
        each.mkdir()
    with place(kind, servers) as found:
        config = CONFIG + f'redis: {{{{url: "{found.url}"}}}}\n'
        with running_platform(platform_folder, config) as platform:
            return asyncio.run(measure(platform, kind, found, seconds, folder))


def rows_of(kind: str, seen: Seen) -> list[Row]:
    rows = [
        Row(f"{kind}: Redis takes no writes for", seen.away_s, None, "s"),
        Row(f"{kind}: requests with known keys", seen.statuses.total(), None, ""),
        Row(f"{kind}: of these not answered", seen.num_refused, None, ""),
        Row(f"{kind}: slowest of them", seen.slowest_s, None, "s"),
        Row(f"{kind}: charged, beside received", seen.charged_tokens, seen.received_tokens, "tokens"),
    ]
    if kind == "empty":
        rows += [
            Row("empty: noticed after", seen.noticed_s, None, "s"),
            Row("empty: penstock tenant apply", seen.applied_s, None, "s"),
            Row("empty: then an unused key is answered after", seen.back_s, None, "s"),
        ]
    return rows


def measure_all(kinds: Sequence[str], seconds: float) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            found[kind] = run(kind, Path(folder), seconds)
        print(f"{kind}: {found[kind]}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seconds", type=float, default=10.0, help="of load before and after the loss")
    args = parser.parse_args()
    found = measure_all(args.only, args.seconds)
    faults = [f"{kind}: {fault}" for kind, seen in found.items() for fault in seen.faults(kind)]
    write_report("redis-losses", [row for kind, seen in found.items() for row in rows_of(kind, seen)], notes=faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
