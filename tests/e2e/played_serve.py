"""A Serve that is played, and gateways' reports of it: replicas live on ready pods, drain before they end, and note
when a pod is taken from under them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import redis.asyncio

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.kubernetes.mirror import Mirror
from penstock.autoscale.kubernetes.resources import Pod
from penstock.autoscale.scaler import ScaledPool
from penstock.wire.frames import Load, StepCosts
from penstock.wire.scaling import (
    GATEWAYS_KEY,
    LAPSE_MS,
    REPORT_S,
    GatewayReport,
    PoolFlow,
    PoolReport,
    ReplicaReport,
    encode,
    report_key,
)
from penstock.wire.serve_agent import AppPlaces, Place
from tests.e2e.ray_objects import APP
from tests.e2e.recorded import MAX_ROWS, SETTINGS, Players

POOL = "a"
COSTS = StepCosts(base_s=0.02, row_s=0.001)
DRAIN_S = 0.3
AT_ONCE = ScaledPool(POOL, APP, 64, AutoscaleConfig(window_s=0.5, start_s=1.0, scale_down_delay_s=0.0))
AS_RECORDED = ScaledPool(POOL, APP, MAX_ROWS, SETTINGS)


@dataclass
class Replica:
    name: str
    state: str = "STARTING"
    address: str | None = None
    since_s: float = 0.0


@dataclass
class PlayedServe:
    """One application. Its own choice, on the way down, are replicas that still start, then the newest."""

    pods: Mirror[Pod]
    target: int
    replicas: list[Replica] = field(default_factory=list)
    robbed: list[str] = field(default_factory=list)
    """Replicas whose pod went while they were neither drained nor about to be."""
    victims: list[str] = field(default_factory=list)
    """Names of the pods of those that were told to go, in order."""
    num_made: int = 0

    async def locate(self) -> list[AppPlaces]:
        return [
            AppPlaces(
                APP, self.target, [Place(replica.name, replica.state, replica.address) for replica in self.replicas]
            )
        ]

    async def set_target(self, name: str, target: int) -> None:
        assert name == APP
        self.target = target
        for replica in sorted(self.alive, key=lambda replica: replica.state != "STARTING")[
            : max(0, len(self.alive) - target)
        ]:
            self._stop(replica)

    async def step_down(self, name: str, victims: tuple[str, ...], target: int) -> bool:
        found = [replica for replica in self.replicas if replica.name in victims and replica.state == "RUNNING"]
        if name != APP or self.target != target + len(victims) or len(found) != len(victims):
            return False
        self.target = target
        for replica in found:
            self._stop(replica)
        return True

    @property
    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state != "STOPPING"]

    @property
    def running(self) -> list[str]:
        """Names: r and a number, from 1 in the order in which they were made."""
        return [replica.name for replica in self.replicas if replica.state == "RUNNING"]

    @property
    def num_running(self) -> int:
        return len(self.running)

    def turn(self) -> None:
        by_address = {pod.address: pod for pod in self.pods.objects.values() if pod.is_ready and not pod.is_ending}
        for replica in list(self.replicas):
            is_over = replica.state == "STOPPING" and time.monotonic() - replica.since_s > DRAIN_S
            if not is_over and replica.address is not None and replica.address not in by_address:
                self.robbed.append(replica.name)
            if is_over or (replica.address is not None and replica.address not in by_address):
                self.replicas.remove(replica)
        while len(self.alive) < self.target:
            self.num_made += 1
            self.replicas.append(Replica(f"r{self.num_made}"))
        free = [address for address in by_address if address not in {replica.address for replica in self.replicas}]
        for replica in self.replicas:
            if replica.state == "STARTING" and free:
                replica.address, replica.state = free.pop(), "RUNNING"

    def _stop(self, replica: Replica) -> None:
        if replica.address is None:
            self.replicas.remove(replica)
            return
        self.victims += [pod.name for pod in self.pods.objects.values() if pod.address == replica.address]
        replica.state, replica.since_s = "STOPPING", time.monotonic()


class Gateways(Protocol):
    """The gateways that report the load of that pool."""

    @property
    def scaled(self) -> ScaledPool:
        """The pool as the autoscaler is to scale it, but for its bounds."""

    def press(self) -> None:
        """Raises the load, so that it wants all replicas that are allowed."""

    def release(self) -> None:
        """Lowers the load, so that it wants as few replicas as are allowed."""

    async def report(self) -> None:
        """Raises redis-py's errors."""


@dataclass
class Gateway:
    """One, with a queue that is endless or empty."""

    client: redis.asyncio.Redis
    serve: PlayedServe
    num_waiting: int = 0
    number: int = 0
    scaled: ScaledPool = AT_ONCE

    def press(self) -> None:
        self.num_waiting = 100_000

    def release(self) -> None:
        self.num_waiting = 0

    async def report(self) -> None:
        self.number += 1
        rows = [
            ReplicaReport(name, POOL, Load("e", 0, 4, 0, 0, 0, 0, 800, 800, COSTS, 512), 16, int(name[1:]) * 7 % 11, 0)
            for name in self.serve.running
        ]
        pools = [PoolReport(POOL, PoolFlow(), self.num_waiting, 30.0 if self.num_waiting else 0.0)]
        await write_reports(self.client, [GatewayReport("g1", self.number, pools, rows)])


@dataclass
class RecordedGateways:
    """Many, that report what a real one has reported."""

    client: redis.asyncio.Redis
    serve: PlayedServe
    players: Players = field(default_factory=lambda: Players(POOL))
    next_s: float = 0.0
    scaled: ScaledPool = AS_RECORDED

    def press(self) -> None:
        self.players.press()

    def release(self) -> None:
        self.players.release()

    async def report(self) -> None:
        """Where one is due: what was recorded is played as quickly as it came."""
        now_s = time.monotonic()
        self.next_s = self.next_s or now_s
        reports: list[GatewayReport] = []
        while self.next_s <= now_s:
            self.next_s += REPORT_S
            reports = self.players.reports(int(name[1:]) for name in self.serve.running)
        await write_reports(self.client, reports)


async def write_reports(client: redis.asyncio.Redis, reports: Sequence[GatewayReport]) -> None:
    """Writes reports as gateways do. Raises redis-py's errors."""
    async with client.pipeline(transaction=False) as pipe:
        for report in reports:
            pipe.sadd(GATEWAYS_KEY, report.gateway)
            pipe.set(report_key(report.gateway), encode(report), px=LAPSE_MS)
        await pipe.execute()
