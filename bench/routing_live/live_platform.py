"""The platform of this bench, and how the load tester plays a load against it.

Four timed replicas whose steps take what `bench.autoscaling.replicas` says, or less by a factor. Every run has a tenant
of its own: tenants share no cached block, so that a run finds the replicas' caches as if they were empty, whatever is
left in them.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import uvloop

from bench.autoscaling.replicas import BASE_S, ENGINE, PROMPT_TOKENS_S, ROW_S
from bench.routing_live.gateway import replace_gateway
from bench.support.cpu import process_seconds
from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.tenants import make_keys
from penstock.tenancy.tenants import Settings
from penstock_loadtest.client.client import Answer, Client, Clock
from penstock_loadtest.client.target import find_target
from penstock_loadtest.planned import Planned
from penstock_loadtest.results.records import Record
from penstock_loadtest.run.runner import run_load
from penstock_loadtest.scenario import Scenario

NUM_REPLICAS: Final = 4
MODEL: Final = "sim"
SETTLE_S: Final = 4.0
"""Pause before a run, for which nothing is asked: policies forget, and replicas end what was given up."""
CONFIG: Final = """
gateway: {port: PORT, ttft_target_s: 2.0}
pools:
  - name: live
    model: demo
    served_names: [sim]
    tier: edge
    replicas: REPLICAS
    engine:
      runner: timed
      max_num_seqs: ROWS
      max_batched_tokens: BATCHED
      timed: {base_s: BASE, row_s: ROW_S, prefill_token_s: PREFILL, num_blocks: BLOCKS, max_model_len: 32768,
        answers: words}
"""


class Run(NamedTuple):
    """What came of one run. cpu: parts of all cores that gateway, client and replicas took while it went on."""

    records: list[Record]
    turns_not_sent: int
    gateway_cpu: float
    client_cpu: float
    replicas_cpu: float


class LivePlatform:
    """A running platform whose gateway can be exchanged."""

    def __init__(self, process: PlatformProcess) -> None:
        self._process = process
        self._numbers = itertools.count()
        self.policy = ""

    def route_by(self, policy: str) -> None:
        """Have a fresh gateway route by a policy of `bench.routing_live.policies`."""
        replace_gateway(self._process, policy)
        self.policy = policy

    def play(self, scenario: Scenario, plan: Iterator[Planned]) -> Run:
        """Play a load as a tenant that nobody has seen. Raises RuntimeError if an answer was not whole: these replicas
        can answer everything."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._play(scenario, plan))

    async def _play(self, scenario: Scenario, plan: Iterator[Planned]) -> Run:
        tenant = f"run-{next(self._numbers)}"
        keys = await make_keys(self._process, {tenant: Settings()})
        target = await find_target(self._process.url, keys={"default": keys[tenant]}, model=MODEL, timeout_s=30.0)
        await asyncio.sleep(SETTLE_S)
        records: list[Record] = []
        client = Client(target, Clock())
        meter = _CpuMeter(self._process)

        def on_ended(answer: Answer) -> None:
            records.append(answer.record)

        try:
            facts = await run_load(
                scenario,
                plan,
                client,
                on_sent=lambda _: None,
                on_ended=on_ended,
                stop=asyncio.Event(),
                on_start=meter.start,
            )
        finally:
            await client.close()
        if facts.plan_error is not None:
            raise facts.plan_error
        return Run(records, facts.turns_not_sent, *meter.read())


class _CpuMeter:
    """CPU seconds of gateway, this process and replicas since `start`, as parts of what all cores have."""

    def __init__(self, process: PlatformProcess) -> None:
        self._pids = process.gateways, [os.getpid()], process.replicas
        self.start()

    def start(self) -> None:
        self._began_s = time.monotonic()
        self._before = self._sum()

    def read(self) -> list[float]:
        cores_s = (time.monotonic() - self._began_s) * (os.cpu_count() or 1)
        return [(now - before) / cores_s for now, before in zip(self._sum(), self._before, strict=True)]

    def _sum(self) -> list[float]:
        return [sum(map(process_seconds, pids)) for pids in self._pids]


@contextmanager
def live_platform(num_blocks: int = ENGINE.timed.num_blocks, speed: float = 1.0) -> Iterator[LivePlatform]:
    """A platform of this bench. num_blocks: KV blocks of each replica. speed: how many times as fast as they are
    simulated the replicas are."""
    values: dict[str, object] = {
        "REPLICAS": NUM_REPLICAS,
        "ROWS": ENGINE.max_num_seqs,
        "BATCHED": ENGINE.max_batched_tokens,
        "BASE": BASE_S / speed,
        "ROW_S": ROW_S / speed,
        "PREFILL": 1 / PROMPT_TOKENS_S / speed,
        "BLOCKS": num_blocks,
    }
    config = CONFIG.replace("{", "{{").replace("}", "}}").replace("PORT", "{port}")
    for name, value in values.items():
        config = config.replace(f": {name}", f": {value}")
    with TemporaryDirectory(prefix="penstock-bench-") as folder, running_platform(Path(folder), config) as process:
        yield LivePlatform(process)
