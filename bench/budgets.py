"""Budgets and a cap to the last part: what tenants are charged, and what a provider costs, against what they may.

    python -m bench.budgets [--seconds 120] [--requests 3000] [--cap-requests 1500]

First the ledger: four gateways' limiters, each a process, on one real Redis, and 200 clients that reserve up to twice
what they come to, until the budget is spent; Redis is killed twice on the way, and a gateway once.

Then a platform with four gateways over two timed replicas and a provider (a server that only plays one, and keeps the
truth of each request). 200 clients ask without a pause, at gateways in turn, some hanging up in the middle of their
answers: those of a tenant with a budget that holds so many of their requests, until they are told that it is spent.
Midway Redis is killed, and later a gateway, among streams. No more may be charged than the budget, nor received than
it pays for, and at least 97 % of it.

At last those of a tenant whose requests go to the provider first, which may cost no more than a cap; a gateway is
killed among them too. What the provider counts may not exceed the cap; 97 % of the cap must be used, as the ledger has
it, where what the killed gateway had reserved stays counted, and of an answer that was left the prompt by our own
tokenizer; from then on requests are answered at the edge.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httpx
import msgspec
import redis.asyncio

from bench.support import budget_worker
from bench.support.free_ports import free_port
from bench.support.more_gateways import start_gateways
from bench.support.platform_process import PlatformProcess, running_platform, timed_platform
from bench.support.report import Row, write_report
from bench.support.tenants import make_keys
from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.tenancy.charges import SET_ASIDE, month_name
from penstock.tenancy.limit_script import read_spent
from penstock.tenancy.tariffs import TariffRule, charge_nano, most_nano
from penstock.tenancy.tenants import Limits, Settings, tenant_key
from penstock.tenancy.usage import Used
from penstock.tenancy.window import MINUTE
from penstock.wire.money import NANO, shown
from penstock_loadtest.fake.behaviour import Behaviour
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.scenario import Lengths

NUM_GATEWAYS, NUM_CLIENTS = 4, 200
PROMPT_WORDS, MAX_TOKENS = 40, 48
FULL = 0.97
LEAVE_PART = 0.2
"""Part of the requests whose clients hang up in the middle."""
TARIFF = TariffRule(model="sim", input=1.0, cached=0.25, output=4.0)
INPUT_PRICE, OUTPUT_PRICE = 2.0, 8.0
EXPECTED_TOKENS = 40
"""Output tokens of a request on average, by which budget and cap are sized."""
MOST_NANO = 1_000_000
"""Most that a request of the ledger's clients comes to; 9/16 of it on average."""
CAP_LEDGER = "*providers"
"""Ledger of the cap of all providers together."""
STOP_S = 30.0
UNREPORTED_S = 1.0
"""Time whose charges a killed gateway may not have reported, while Redis is there."""
SETTLED_S = 90.0
"""Time after which nothing can be reserved any more: leases have ended twice, those of what was set aside too."""
ENGINE = "max_num_seqs: 64, timed: {base_s: 0.010, num_blocks: 4000, max_model_len: 8192}"
PROVIDER = """
providers:
  - name: up
    base_url: http://127.0.0.1:{port}/v1
    model: large
    served_names: [sim]
    ttft_s: 0.02
    max_concurrency: 64
    extra_fields: [ignore_eos]
    input_price: {input}
    output_price: {output}
tariffs:
  - model: sim
    input: {tariff.input}
    cached: {tariff.cached}
    output: {tariff.output}
"""


@dataclass(frozen=True)
class LedgerResult:
    """What the clients of all limiters were charged."""

    budget_nano: int
    spent_nano: int
    """Sum that the ledger holds in the end."""
    held_nano: int
    """Part of it that the killed gateway had set aside, and that may not have come back yet."""
    charged_nano: int
    """Sum of what was settled, but for the killed gateway's last moment, which it may not have reported."""
    unreported_nano: int
    """Sum of that last moment."""
    num_requests: int

    @property
    def faults(self) -> list[str]:
        found = []
        if max(self.spent_nano, self.charged_nano) > self.budget_nano:
            found.append(f"ledger: {self.spent_nano} spent and {self.charged_nano} charged of {self.budget_nano}")
        if self.held_nano > self.budget_nano // (SET_ASIDE * NUM_GATEWAYS):
            found.append(f"ledger: {self.held_nano} are still held")
        if self.spent_nano - self.held_nano > self.charged_nano + self.unreported_nano:
            found.append(f"ledger: {self.spent_nano} are spent, and nobody was charged all of it")
        if self.spent_nano < FULL * self.budget_nano:
            found.append(f"ledger: only {self.spent_nano} spent of {self.budget_nano}")
        return found


def run_ledger(folder: Path, num_requests: int, seconds: float, lease_ms: int = MINUTE.lease_ms) -> LedgerResult:
    """Limiters of four gateways spend a budget of so many requests, or for so many seconds; Redis is killed twice, and
    a gateway once."""
    sockets = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    server = EmbeddedRedis(executable=find_executable(), data_dir=folder / "redis", socket_dir=sockets)
    server.start()
    paths = [folder / f"gateway-{number}.jsonl" for number in range(NUM_GATEWAYS)]
    budget_nano, share = num_requests * MOST_NANO, NUM_CLIENTS // NUM_GATEWAYS
    settings = [
        budget_worker.Settings(
            server.url, path.stem, NUM_GATEWAYS, share, budget_nano, MOST_NANO, lease_ms, seconds, str(path)
        )
        for path in paths
    ]
    processes = [_start_worker(each) for each in settings]
    killed_s = 0.0
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        ends_s = time.monotonic() + seconds
        for part in (0.15, 0.5):
            _wait_for_lines(paths, part * num_requests, ends_s)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
        _wait_for_lines(paths, 0.8 * num_requests, ends_s)
        processes[0].kill()
        killed_s = time.monotonic()
        for process in processes[1:]:
            process.wait(seconds + STOP_S)
        spent_nano, held_nano = asyncio.run(_read_ledger(server.url))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        server.stop()
        sockets.rmdir()
    charges = [[msgspec.json.decode(line, type=budget_worker.Charged) for line in _lines(path)] for path in paths]
    reported = [each for each in charges[0] if each.at_s < killed_s - UNREPORTED_S]
    charged_nano = sum(each.nano for each in [*reported, *(each for some in charges[1:] for each in some)])
    unreported_nano = sum(each.nano for each in charges[0]) - sum(each.nano for each in reported)
    return LedgerResult(budget_nano, spent_nano, held_nano, charged_nano, unreported_nano, sum(map(len, charges)))


def _start_worker(settings: budget_worker.Settings) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "bench.support.budget_worker", msgspec.json.encode(settings).decode()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _wait_for_lines(paths: Sequence[Path], count: float, ends_s: float) -> None:
    while sum(len(_lines(path)) for path in paths) < count and time.monotonic() < ends_s:
        time.sleep(0.05)


async def _read_ledger(url: str) -> tuple[int, int]:
    """What is spent or reserved, and what of it is reserved."""
    month = month_name(time.time())
    async with connect(url) as client:
        spent_nano = await read_spent(client, budget_worker.TENANT, month)
        return spent_nano, await read_spent(client, budget_worker.TENANT, f"{month}:open")


@dataclass
class Given:
    """What clients were given."""

    nano: int = 0
    """Least that it must have been charged, by the tokens that arrived."""
    num_answers: int = 0
    num_left: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    """Answers by status, and by code where it is an error."""
    tiers: Counter[str] = field(default_factory=Counter)
    """Whole answers by tier and reason."""


class Clients:
    """All clients of one tenant. gateways: base addresses."""

    def __init__(self, gateways: Sequence[str], key: str) -> None:
        self._gateways = itertools.cycle(gateways)
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"},
            timeout=60,
            trust_env=False,
            verify=False,  # no certificates: loading them takes longer than asking
            limits=httpx.Limits(max_connections=2 * NUM_CLIENTS, max_keepalive_connections=2 * NUM_CLIENTS),
        )
        self.given = Given()

    async def run(self, until: Callable[[], bool]) -> None:
        """Ask until it is so."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_CLIENTS):
                tasks.create_task(self._ask_on(random.Random(number), until))

    async def _ask_on(self, rng: random.Random, until: Callable[[], bool]) -> None:
        while not until():
            try:
                await (self._leave(rng) if rng.random() < LEAVE_PART else self._ask(rng))
            except httpx.HTTPError as error:
                self.given.statuses[type(error).__name__] += 1
                await asyncio.sleep(0.2)

    async def _ask(self, rng: random.Random) -> None:
        answer = await self._http.post(f"{next(self._gateways)}/v1/chat/completions", json=_body(rng))
        if answer.status_code != 200:
            await self._note_refusal(answer.status_code, answer.json()["error"]["code"])
            return
        usage = answer.json()["usage"]
        used = Used(
            1,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
        )
        self.given.nano += charge_nano(TARIFF.tariff, used)
        self.given.num_answers += 1
        self.given.statuses["200"] += 1
        self.given.tiers[f"{answer.headers['x-penstock-tier']}: {answer.headers['x-penstock-tier-reason']}"] += 1

    async def _leave(self, rng: random.Random) -> None:
        """A stream whose client hangs up after some events."""
        num_events, leave_after = 0, rng.randint(1, MAX_TOKENS)
        url = f"{next(self._gateways)}/v1/chat/completions"
        async with self._http.stream("POST", url, json=_body(rng) | {"stream": True}) as response:
            if response.status_code != 200:
                code = msgspec.json.decode(await response.aread())["error"]["code"]
                await self._note_refusal(response.status_code, code)
                return
            async for piece in response.aiter_raw():
                num_events += piece.count(b'"content"')
                if num_events >= leave_after:
                    break
        self.given.num_left += 1
        self.given.statuses["left"] += 1

    async def _note_refusal(self, status: int, code: str) -> None:
        self.given.statuses[f"{status} {code}"] += 1
        await asyncio.sleep(0.3)

    async def read_usage(self) -> dict[str, object]:
        """The page /v1/usage, when it can be read."""
        async with asyncio.timeout(60):
            while True:
                try:
                    answer = await self._http.get(f"{next(self._gateways)}/v1/usage")
                    if answer.status_code == 200:
                        return dict(answer.json())
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.5)


def _body(rng: random.Random) -> dict[str, object]:
    words = " ".join(f"w{rng.randrange(10_000)}" for _ in range(PROMPT_WORDS))
    return {
        "model": "sim",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": rng.randint(MAX_TOKENS // 2, MAX_TOKENS),
        "ignore_eos": True,
    }


@dataclass
class BudgetResult:
    """What came of a budget."""

    amount: float
    given: Given
    spent: float
    """Sum that the ledger holds in the end."""
    charged: float
    """Sum of the usage."""
    seconds: float

    @property
    def faults(self) -> list[str]:
        found = []
        if self.spent > self.amount:
            found.append(f"{self.spent} are spent of {self.amount}")
        if self.charged > self.amount:
            found.append(f"{self.charged} are charged of {self.amount}")
        if shown(self.given.nano) > self.amount:
            found.append(f"answers that come to {shown(self.given.nano)} were given for {self.amount}")
        if self.spent < FULL * self.amount:
            found.append(f"only {self.spent} are spent of {self.amount}")
        return found


@dataclass
class CapResult:
    """What came of a cap."""

    amount: float
    given: Given
    counted: float
    """Cost of all that the provider has sent, at its prices."""
    spent: float
    """Sum that the ledger holds in the end."""
    held: float
    """Part of it that the killed gateway had reserved."""
    num_calls: int
    seconds: float

    @property
    def faults(self) -> list[str]:
        found = []
        if self.counted > self.amount:
            found.append(f"the provider has counted {self.counted}, the cap is {self.amount}")
        if self.counted > self.spent or self.spent > self.amount:
            found.append(f"the cap of {self.amount} has {self.spent} spent, the provider has counted {self.counted}")
        if self.spent < FULL * self.amount:
            found.append(f"only {self.spent} of the cap of {self.amount} are spent")
        if not self.given.tiers["edge: provider_cap"]:
            found.append("nothing went to the edge when the cap was reached")
        return found


async def measure_budget(
    platform: PlatformProcess, gateways: Sequence[str], num_requests: int, seconds: float
) -> BudgetResult:
    """Clients of a tenant whose budget holds so many requests; Redis and a gateway are killed on the way."""
    tariff = TARIFF.tariff
    each_nano = most_nano(tariff, 3 * PROMPT_WORDS, EXPECTED_TOKENS)
    amount = num_requests * each_nano / NANO
    settings = Settings(limits=Limits(budget=amount), tier_policy="edge_only")
    clients = Clients(gateways, (await make_keys(platform, {"budgeted": settings}))["budgeted"])
    given, began_s = clients.given, time.monotonic()

    def is_over() -> bool:
        refused = given.statuses["429 insufficient_quota"]
        return refused > 10 * NUM_CLIENTS or time.monotonic() - began_s > seconds

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(clients.run(is_over))
        tasks.create_task(_kill_at(lambda: given.num_answers > num_requests // 6 or is_over(), platform.redis))
        tasks.create_task(_kill_at(lambda: given.num_answers > num_requests // 3 or is_over(), platform.gateways[1:2]))
    took_s = time.monotonic() - began_s
    await _wait_for_leases(clients.read_usage)
    page = await clients.read_usage()
    budget, rows = page["budget"], page["data"]
    assert isinstance(budget, dict)
    assert isinstance(rows, list)
    charged = sum(row["charge"] for row in rows)
    return BudgetResult(amount, given, budget["spent"], charged, took_s)


async def measure_cap(
    platform: PlatformProcess, gateways: Sequence[str], server: FakeServer, amount: float, seconds: float
) -> CapResult:
    """Clients of a tenant that is answered by the provider while the cap lasts; a gateway is killed on the way."""
    settings = Settings(tier_policy="cloud_first")
    clients = Clients(gateways, (await make_keys(platform, {"capped": settings}))["capped"])
    given, began_s = clients.given, time.monotonic()
    last = {"num": 0, "at_s": began_s}

    def is_over() -> bool:
        if len(server.truths) != last["num"]:
            last.update(num=len(server.truths), at_s=time.monotonic())
        has_ended = bool(given.tiers["edge: provider_cap"]) and time.monotonic() - last["at_s"] > SETTLED_S / 2
        return has_ended or time.monotonic() - began_s > seconds

    def counted() -> float:
        return sum(t.prompt_tokens * INPUT_PRICE + t.sent_tokens * OUTPUT_PRICE for t in server.truths) / 1e6

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(clients.run(is_over))
        tasks.create_task(_kill_at(lambda: counted() > amount / 2 or is_over(), platform.gateways[2:3]))
    took_s = time.monotonic() - began_s
    async with connect(platform.redis_url) as client:
        spent_nano = await read_spent(client, CAP_LEDGER, month_name(time.time()))
        held_nano = sum(await _read_owed(client))
    return CapResult(amount, given, counted(), shown(spent_nano), shown(held_nano), len(server.truths), took_s)


async def _read_owed(client: redis.asyncio.Redis) -> list[int]:
    """What is counted of calls of the cap that nobody has settled, but for what gateways have set aside."""
    owed = await cast("Awaitable[dict[bytes, bytes]]", client.hgetall(tenant_key(CAP_LEDGER, "limits:owed")))
    return [int(entry.split(b":")[1]) for call, entry in owed.items() if not call.startswith(b"aside:")]


async def _kill_at(is_time: Callable[[], bool], pids: Sequence[int]) -> None:
    while not is_time():  # noqa: ASYNC110 (counts of many tasks)
        await asyncio.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


async def _wait_for_leases(read: Callable[[], Awaitable[dict[str, object]]]) -> None:
    """Wait until the budget stays the same: what dead gateways reserved comes back when somebody asks."""
    ends_s = time.monotonic() + SETTLED_S
    while time.monotonic() < ends_s:
        await read()
        await asyncio.sleep(2.0)


async def run(folder: Path, num_requests: int, cap_requests: int, seconds: float) -> tuple[BudgetResult, CapResult]:
    """Both, on one platform."""
    port = free_port()
    amount = cap_requests * (2 * PROMPT_WORDS * INPUT_PRICE + EXPECTED_TOKENS * OUTPUT_PRICE) / 1e6
    provider = PROVIDER.format(port=port, input=INPUT_PRICE, output=OUTPUT_PRICE, tariff=TARIFF)
    config = timed_platform(ENGINE, f"provider_cap: {amount}, ttft_target_s: 60.0") + provider
    behaviour = Behaviour(models=["large"], ttft_s=Lengths(constant=0.05), gap_s=Lengths(constant=0.01))
    with running_platform(folder, config) as platform:
        gateways = [platform.url, *start_gateways(platform, NUM_GATEWAYS - 1)]
        async with FakeServer(behaviour, port=port) as server:
            budget = await measure_budget(platform, gateways, num_requests, seconds)
            cap = await measure_cap(platform, gateways, server, amount, seconds)
    return budget, cap


def rows_of(ledger: LedgerResult, budget: BudgetResult, cap: CapResult) -> list[Row]:
    return [
        Row("ledger: requests", ledger.num_requests, None, ""),
        Row("ledger: spent in the end, beside the budget", shown(ledger.spent_nano), shown(ledger.budget_nano), ""),
        Row("ledger: of the killed gateway's last second", shown(ledger.unreported_nano), None, ""),
        Row("ledger: charged, beside the budget", shown(ledger.charged_nano), shown(ledger.budget_nano), ""),
        Row("budget: whole answers", budget.given.num_answers, None, ""),
        Row("budget: clients that hung up", budget.given.num_left, None, ""),
        Row("budget: spent in the end, beside the budget", 1e3 * budget.spent, 1e3 * budget.amount, "1e-3"),
        Row("budget: sum of the usage, beside the budget", 1e3 * budget.charged, 1e3 * budget.amount, "1e-3"),
        Row("budget: whole answers come to", 1e3 * shown(budget.given.nano), 1e3 * budget.amount, "1e-3"),
        Row("cap: calls of the provider", cap.num_calls, None, ""),
        Row("cap: what it counts, beside the cap", 1e3 * cap.counted, 1e3 * cap.amount, "1e-3"),
        Row("cap: spent in the end, beside the cap", 1e3 * cap.spent, 1e3 * cap.amount, "1e-3"),
        Row("cap: of that reserved by the killed gateway", 1e3 * cap.held, None, "1e-3"),
        Row("cap: answers of the edge because of it", cap.given.tiers["edge: provider_cap"], None, ""),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="longest time of each part")
    parser.add_argument("--requests", type=int, default=3000, help="that the budget holds")
    parser.add_argument("--cap-requests", type=int, default=1500, help="that the cap holds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        ledger = run_ledger(Path(name), args.requests, args.seconds)
        budget, cap = asyncio.run(run(Path(name), args.requests, args.cap_requests, args.seconds))
    faults = [*ledger.faults, *budget.faults, *cap.faults]
    notes = [
        f"budget: {budget.seconds:.0f} s, {dict(budget.given.statuses)}",
        f"cap: {cap.seconds:.0f} s, {dict(cap.given.statuses)}, {dict(cap.given.tiers)}",
        *faults,
    ]
    write_report("budgets", rows_of(ledger, budget, cap), notes=notes)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
