"""Alerts live: a platform under load, a Prometheus that scrapes it with the project's rules, and faults made one after
another.

    python -m bench.alerts [--light] [--scale 30] [--pictures] [--only FAULT ... --variant NAME]

Wanted: while nothing is wrong no alert fires; each fault raises the alerts that it should, and none else; and every
expression of the rules and dashboards has had data, but for those that ABSENT names with the reason. Windows and waits
of the rules are `--scale` times shorter than those in the chart, so "seconds until it fired" are of the shortened
rules: multiplied by the scale they bound what the true ones take. `--pictures` draws docs/dashboards.png from what
Prometheus holds at the end (Chromium). `--light` takes a gateway and a replica in one process instead of a platform
(`bench.support.gateway_process`), which start in seconds and have no autoscaler; its record is bench/alerts_light.json.
Needs Debian's package `prometheus`.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

import httpx

from bench.support.board_pictures import draw
from bench.support.free_ports import free_ports
from bench.support.gateway_process import HOST, SECRET, running_gateway
from bench.support.platform_process import running_platform
from bench.support.prometheus_server import Prometheus, running_prometheus
from bench.support.redis_servers import single
from bench.support.report import FOLDER, Row, write_report
from bench.support.tenants import make_keys
from deploy.dashboards import boards, promql, rules
from deploy.dashboards.alerts import ALERTS
from penstock.base.redis import connect
from penstock.tenancy.data_loss import MARKER
from penstock.tenancy.keys import create_key
from penstock.tenancy.tenants import Limits, Settings, Tenants

SCALE = 30.0
INTERVAL_S = 2.0
"""Seconds between scrapes, and between evaluations."""
START_S = 400.0
SETTLE_BEFORE_S = 8.0
"""Seconds of load before the first look, so that rates are of two scrapes or more."""
MOST_CROWD = 80
"""Clients of the crowd."""
QUIET_S = 25.0
LOOK_S = 0.25
SETTLE_S = 90.0
"""Longest wait after a fault until its alerts have ended."""
PICTURE = FOLDER.parent / "docs" / "dashboards.png"
RATE_WINDOW = "[15s]"
"""Window in which dashboards' queries are asked here."""
CONFIG = """
gateway: {{{{port: {{port}}, max_queue: 64, max_queue_share: 1.0, queue_timeout_s: 5.0, ttft_target_s: 3.0}}}}
telemetry: {{{{otlp_endpoint: "{other}", sample_ratio: 1.0}}}}
pools:
  - name: scaled
    model: demo
    served_names: [scaled, either]
    tier: edge
    price_per_hour: 1.0
    autoscale: {{{{min_replicas: 1, max_replicas: 1, window_s: 3.0, start_s: 3.0}}}}
    engine:
      runner: timed
      max_num_seqs: 8
      speculation: {{{{method: ngram}}}}
      timed: {{{{base_s: 0.03, prefill_token_s: 0.0001}}}}
providers:
  - {{{{name: far, base_url: "{other}/v1", model: large, served_names: [either], ttft_s: 0.05, \
input_price: 1.0, output_price: 2.0, breaker_failures: 3, breaker_open_s: 1.0}}}}
tariffs:
  - {{{{input: 1.0, output: 4.0}}}}
"""
TENANTS = {
    "far": Settings(tier_policy="cloud_first"),
    "limited": Settings(limits=Limits(requests_per_minute=1)),
}
ABSENT = {
    "penstock_autoscaler_is_leader": "only an autoscaler in Kubernetes has a Lease",
    "penstock_kubernetes_calls_total": "only an autoscaler in Kubernetes calls its API",
    "penstock_batch_lines_total": "no batch runs here",
    "penstock_budget_refusals_total": "no tenant has a budget here, no provider a cap",
    "penstock_budget_used_ratio": "no tenant has a budget here",
    "penstock_provider_cap_used_ratio": "no provider has a cap here",
    "penstock_ignored_fields_total": "no request here has such a field",
    "penstock_escalations_total": "no pool here escalates",
    "penstock_compiled_kernels_total": "no GPU here",
    "penstock_index_gaps_total": "a TCP stream loses no block event",
    **dict.fromkeys(
        ("penstock_adapter_uses_total", "penstock_adapter_loads_total", "penstock_adapter_evictions_total"),
        "no adapters here",
    ),
}
"""Metrics without data here, and why. Their alerts are tried on series that are made up
(tests/unit/deploy/test_rules.py)."""


LIGHT_ABSENT = dict.fromkeys(
    (
        "penstock_autoscale_target",
        "penstock_autoscale_decisions_total",
        "penstock_draft_tokens_total",
        "penstock_accepted_draft_tokens_total",
    ),
    "no autoscaler and no drafts without a platform",
) | dict.fromkeys(("penstock_cost_total", "penstock_charge_total"), "no pool has a price there, no model a tariff")


class Platform(Protocol):
    """What faults are made on: addresses, and process ids by part."""

    @property
    def url(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def redis_url(self) -> str: ...
    @property
    def gateways(self) -> list[int]: ...
    @property
    def replicas(self) -> list[int]: ...
    @property
    def autoscalers(self) -> list[int]: ...
    @property
    def redis(self) -> list[int]: ...


@dataclass(frozen=True)
class LightPlatform:
    """A gateway with a replica in its process, and a Redis."""

    url: str
    key: str
    redis_url: str
    gateways: list[int]
    redis: list[int]
    replicas: list[int] = field(default_factory=list)
    autoscalers: list[int] = field(default_factory=list)


class OutsideServer(ThreadingHTTPServer):
    """A provider of chats, which fails while `is_failing`, and a collector of spans, which takes everything."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.is_failing = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: OutsideServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        is_chat = self.path.startswith("/v1/chat")
        if is_chat and self.server.is_failing:
            self._answer(500, "application/json", b'{"error": {"message": "made to fail"}}')
        elif is_chat:
            events = [
                {"choices": [{"index": 0, "delta": {"content": "Far away."}, "finish_reason": None}]},
                {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
                {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}},
            ]
            lines = [*(json.dumps(event) for event in events), "[DONE]"]
            self._answer(200, "text/event-stream", "".join(f"data: {line}\n\n" for line in lines).encode())
        else:
            self._answer(200, "application/x-protobuf", b"")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def other_servers() -> Iterator[OutsideServer]:
    with OutsideServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Load:
    """Requests one after another of a few clients. `paused`: models that nobody asks for at the moment; `crowd`:
    clients that overload the scaled pool."""

    def __init__(self, platform: Platform, keys: dict[str, str]) -> None:
        self.paused: set[str] = set()
        self.crowd = 0
        self._keys = {"demo": platform.key, **keys}
        self._http = httpx.AsyncClient(
            base_url=platform.url,
            timeout=60,
            trust_env=False,
            verify=False,  # no certificates: loading them takes longer than asking
            limits=httpx.Limits(max_connections=400),
        )

    async def run(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            for tenant, model, pause_s in (
                ("demo", "scaled", 0.5),
                ("demo", "scaled", 1.0),
                ("far", "either", 0.5),
                ("limited", "scaled", 20.0),
            ):
                tasks.create_task(self._client(stop, tenant, model, pause_s))
            for number in range(MOST_CROWD):
                tasks.create_task(self._crowd(stop, number))
        await self._http.aclose()

    async def _client(self, stop: asyncio.Event, tenant: str, model: str, pause_s: float) -> None:
        prompt = list(range(100, 180))
        while not stop.is_set():
            if model not in self.paused:
                await self._ask(tenant, model, prompt, 8)
            await asyncio.sleep(pause_s)

    async def _crowd(self, stop: asyncio.Event, number: int) -> None:
        while not stop.is_set():
            if number < self.crowd:
                await self._ask("demo", "scaled", [number + 7] * 64, 96)
            await asyncio.sleep(1.0)  # refusals come at once, and are not to be the load

    async def _ask(self, tenant: str, model: str, prompt: list[int], max_tokens: int) -> None:
        headers = {"authorization": f"Bearer {self._keys[tenant]}"}
        fields = {"model": model, "max_tokens": max_tokens}
        chat = {"messages": [{"role": "user", "content": "How far is it?"}]}
        tokens = {"prompt": prompt, "ignore_eos": True}  # which a provider is not asked for
        path, body = ("chat/completions", chat) if model == "either" else ("completions", tokens)
        with suppress(httpx.HTTPError):  # a gateway that stands still answers nobody
            await self._http.post(f"/v1/{path}", json=fields | body, headers=headers)


@dataclass
class World:
    """All that a fault may be made on."""

    platform: Platform
    other: OutsideServer
    load: Load
    prometheus: Prometheus

    def signal(self, processes: list[int], number: signal.Signals) -> None:
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. make: called when it begins, with is_repeated again and again until the alerts fire;
    end: once after that."""

    name: str
    alerts: frozenset[str]
    make: Callable[[World], Awaitable[None]]
    end: Callable[[World], Awaitable[None]]
    within_s: float = 60.0
    is_repeated: bool = False
    settle_s: float = SETTLE_S
    """Longest wait after it until its alerts have ended; those of long windows go on, and count as left."""


async def _nothing(_: World) -> None:
    pass


async def _fail_provider(world: World) -> None:
    world.other.is_failing = True


async def _heal_provider(world: World) -> None:
    world.other.is_failing = False


async def _stop_autoscaler(world: World) -> None:
    world.signal(world.platform.autoscalers, signal.SIGSTOP)


async def _continue_autoscaler(world: World) -> None:
    world.signal(world.platform.autoscalers, signal.SIGCONT)


async def _kill_replicas(world: World) -> None:
    world.load.paused = {"scaled", "either"}
    world.signal(world.platform.replicas, signal.SIGKILL)


async def _let_replicas_come(world: World) -> None:
    world.load.paused = set()


async def _stop_redis(world: World) -> None:
    world.load.paused = {"scaled", "either"}
    world.signal(world.platform.redis, signal.SIGSTOP)


async def _continue_redis(world: World) -> None:
    world.signal(world.platform.redis, signal.SIGCONT)
    await asyncio.sleep(2.0)
    world.load.paused = set()


async def _lose_data(world: World) -> None:
    async with connect(world.platform.redis_url) as client:
        await client.delete(MARKER)


async def _crowd(world: World) -> None:
    world.load.crowd = MOST_CROWD


async def _disperse(world: World) -> None:
    world.load.crowd = 0


async def _stop_gateway(world: World) -> None:
    world.load.paused = {"scaled", "either"}
    world.signal(world.platform.gateways, signal.SIGSTOP)


async def _continue_gateway(world: World) -> None:
    world.signal(world.platform.gateways, signal.SIGCONT)
    world.load.paused = set()


async def _lose_replica(world: World) -> None:
    world.load.paused = {"scaled", "either"}
    world.signal(world.platform.gateways, signal.SIGUSR1)


async def _find_replica(world: World) -> None:
    world.signal(world.platform.gateways, signal.SIGUSR2)
    world.load.paused = set()


BURNS = frozenset({"PenstockSloBurnFast", "PenstockSloBurnSlow", "PenstockSloBurnLong"})
FAULTS = (
    Fault("nothing", frozenset(), _nothing, _nothing, QUIET_S),
    Fault("a provider fails", frozenset({"PenstockProviderBreakerOpen"}), _fail_provider, _heal_provider),
    Fault(
        "the autoscaler stands still", frozenset({"PenstockAutoscalerSilent"}), _stop_autoscaler, _continue_autoscaler
    ),
    Fault("Redis stands still", frozenset({"PenstockRedisAway"}), _stop_redis, _continue_redis),
    Fault("Redis has lost its data", frozenset({"PenstockRedisLostData"}), _lose_data, _nothing, settle_s=2.0),
    Fault(
        "a crowd comes to the one replica",
        frozenset({*BURNS, "PenstockAutoscalerAtMaximum", "PenstockQueueStays", "PenstockRefusing"}),
        _crowd,
        _disperse,
        100.0,
        settle_s=30.0,
    ),
    Fault(
        "all replicas of the pool are killed, again and again",
        frozenset({"PenstockNoReplica", "PenstockReplicasMissing"}),
        _kill_replicas,
        _let_replicas_come,
        is_repeated=True,
    ),
    Fault(
        "the gateway stands still",
        frozenset({"PenstockGatewayDown", "PenstockNoGateway"}),
        _stop_gateway,
        _continue_gateway,
    ),
)


CROWD = FAULTS[5]
LIGHT_FAULTS = (
    FAULTS[0],
    FAULTS[1],
    FAULTS[3],
    FAULTS[4],
    replace(CROWD, alerts=CROWD.alerts - {"PenstockAutoscalerAtMaximum"}),
    Fault(
        "the only replica is on no list any more",
        frozenset({"PenstockNoReplica", "PenstockReplicasMissing"}),
        _lose_replica,
        _find_replica,
    ),
    FAULTS[-1],
)
"""Faults that can be made without a platform."""


@dataclass
class Outcome:
    """What fired while a fault was there. fired_s: seconds since it was made, by alert; others: those that should not
    have; left: those that still fired of earlier faults when it began."""

    fault: Fault
    fired_s: dict[str, float] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    left: frozenset[str] = frozenset()
    quiet_s: float | None = None
    """Seconds from the end of the fault until its alerts had ended. None: some still fired after settle_s."""

    @property
    def faults(self) -> list[str]:
        """Ways in which it was not as wanted, as a few words each."""
        missing = self.fault.alerts - self.fired_s.keys()
        return [
            *(f"{self.fault.name}: {name} did not fire" for name in sorted(missing)),
            *(f"{self.fault.name}: {name} fired too" for name in sorted(self.others)),
        ]


async def watch(world: World, fault: Fault) -> Outcome:
    """Make the fault, look until its alerts fire, end it, and look until they have ended."""
    outcome = Outcome(fault, left=frozenset(await asyncio.to_thread(world.prometheus.firing)))
    began = time.monotonic()
    await fault.make(world)
    while time.monotonic() - began < fault.within_s and (not fault.alerts or fault.alerts - outcome.fired_s.keys()):
        if fault.is_repeated:
            await fault.make(world)
        firing = await asyncio.to_thread(world.prometheus.firing)
        now = time.monotonic() - began
        for name in firing.keys() & fault.alerts:
            outcome.fired_s.setdefault(name, now)
        outcome.others |= firing.keys() - fault.alerts - outcome.left
        await asyncio.sleep(LOOK_S)
    await fault.end(world)
    ended = time.monotonic()
    while time.monotonic() - ended < fault.settle_s:
        firing = await asyncio.to_thread(world.prometheus.firing)
        outcome.others |= firing.keys() - fault.alerts - outcome.left
        if not firing.keys() & fault.alerts - outcome.left:
            outcome.quiet_s = time.monotonic() - ended
            break
        await asyncio.sleep(LOOK_S)
    return outcome


def without_data(prometheus: Prometheus, start_s: float, end_s: float, absent: Mapping[str, str]) -> list[str]:
    """Places of expressions that had no data during the run, but for those of a metric that `absent` names. An alert's
    expression is empty while all is well, so each series that it names counts."""
    asked = {f"rule {each.name}": each.name for each in rules.RECORDS}
    for alert in ALERTS:
        for each in promql.series(alert.expression):
            asked[f"alert {alert.name}, {each.name}"] = each.name
    for board in boards.boards():
        for panel in boards.panels(board):
            for query in panel.queries:
                place = f"dashboard {board.name}, {panel.title}: {query.expression}"
                asked[place] = query.expression.replace(boards.RATE, RATE_WINDOW)
    return [
        place
        for place, expression in asked.items()
        if not prometheus.has_data(expression, start_s, end_s)
        and not any(each.name in absent for each in promql.series(expression))
    ]


@contextmanager
def whole_platform(folder: Path, other: OutsideServer) -> Iterator[tuple[Platform, dict[str, str]]]:
    """A platform, and a key of each of TENANTS."""
    config = CONFIG.format(other=other.url)
    with running_platform(folder, config, start_s=START_S) as platform:
        with ThreadPoolExecutor(1) as thread:
            keys = thread.submit(lambda: asyncio.run(make_keys(platform, TENANTS))).result()
        yield platform, keys


@contextmanager
def light_platform(folder: Path, other: OutsideServer) -> Iterator[tuple[Platform, dict[str, str]]]:
    """A gateway and a replica without Ray, and a key of each of TENANTS."""

    async def make() -> dict[str, str]:
        keys = {}
        async with connect(redis_url) as client:
            for name, settings in {"demo": Settings(), **TENANTS}.items():
                await Tenants(client).create(name, settings, time.time())
                keys[name] = await create_key(client, SECRET, name)
        return keys

    redis_port, port = free_ports(2)
    with (
        single(folder, redis_port) as (servers, redis_url),
        running_gateway(folder, redis_url, port, other.url) as pid,
    ):
        with ThreadPoolExecutor(1) as thread:
            keys = thread.submit(lambda: asyncio.run(make())).result()
        yield LightPlatform(f"http://{HOST}:{port}", keys["demo"], redis_url, [pid], [servers.pid(redis_port)]), keys


async def run(
    folder: Path, scale: float, faults: tuple[Fault, ...], picture: Path | None, *, is_light: bool = False
) -> tuple[list[Outcome], list[str]]:
    """Returns what fired at each fault, and what else was not as wanted."""
    (folder / "platform").mkdir()
    (folder / "prometheus").mkdir()
    outcomes = []
    start = light_platform if is_light else whole_platform
    absent = ABSENT | LIGHT_ABSENT if is_light else ABSENT | {"penstock_replicas_wanted": "the only pool is scaled"}
    with (
        other_servers() as other,
        start(folder / "platform", other) as (platform, keys),
        running_prometheus(
            folder / "prometheus", rules.render(1 / scale), platform.url.removeprefix("http://"), INTERVAL_S
        ) as prometheus,
    ):
        world = World(platform, other, Load(platform, keys), prometheus)
        stop = asyncio.Event()
        load = asyncio.create_task(world.load.run(stop))
        start_s = time.time()
        await asyncio.sleep(SETTLE_BEFORE_S)
        try:
            for fault in faults:
                outcome = await watch(world, fault)
                outcomes.append(outcome)
                print(describe(outcome), flush=True)
        finally:
            await _continue_gateway(world)
            await _continue_redis(world)
            await _continue_autoscaler(world)
            stop.set()
            await load
        empty = without_data(prometheus, start_s, time.time(), absent)
        if picture is not None:
            draw(prometheus.url, picture, time.time() - start_s)
        return outcomes, [*(f"no data: {place}" for place in empty), *prometheus.rule_faults()]


def describe(outcome: Outcome) -> str:
    fired = ", ".join(f"{name} after {at:.1f} s" for name, at in outcome.fired_s.items()) or "nothing fired"
    others = f"; also {', '.join(sorted(outcome.others))}" if outcome.others else ""
    return f"{outcome.fault.name}: {fired}{others}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--light", action="store_true", help="a gateway and a replica without Ray")
    parser.add_argument("--scale", type=float, default=SCALE, help="times that windows and waits are shorter")
    parser.add_argument("--only", nargs="*", help="beginnings of faults' names")
    parser.add_argument("--variant", default="", help="the record is bench/alerts_VARIANT.json")
    parser.add_argument("--pictures", action="store_true", help="draw docs/dashboards.png")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    known = LIGHT_FAULTS if given.light else FAULTS
    chosen = tuple(each for each in known if not given.only or each.name.startswith(tuple(given.only)))
    with tempfile.TemporaryDirectory(prefix="penstock-alerts-") as folder:
        picture = PICTURE if given.pictures else None
        outcomes, wrong = asyncio.run(run(Path(folder), given.scale, chosen, picture, is_light=given.light))
    found = [*(each for outcome in outcomes for each in outcome.faults), *wrong]
    rows = [
        Row(f"{outcome.fault.name}: {name}", at, None, "s until it fired")
        for outcome in outcomes
        for name, at in sorted(outcome.fired_s.items(), key=lambda item: item[1])
    ]
    rows += [
        Row(f"{outcome.fault.name}: alerts that should not fire", len(outcome.others), None, "alerts")
        for outcome in outcomes
    ]
    rows.append(Row("expressions without data that should have some", len(wrong), None, "expressions"))
    notes = [
        f"windows and waits of the rules are {given.scale:g} times shorter than the chart's; scraped and evaluated"
        f" every {INTERVAL_S:g} s",
        *(f"not here: {name}: {reason}" for name, reason in ABSENT.items()),
        *found,
    ]
    write_report("alerts", rows, notes=notes, variant=given.variant or ("light" if given.light else ""))
    for each in found:
        print(f"not as wanted: {each}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
