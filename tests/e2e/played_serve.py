"""A Serve that is played, and a gateway's reports of it: replicas live on ready pods, drain before they end, and note when a pod is taken from under them."""

import time
from dataclasses import dataclass, field

import redis.asyncio

from penstock.autoscale.kubernetes.resources import Pod
from penstock.autoscale.kubernetes.watched import Watched
from penstock.wire.frames import Load, StepCosts
from penstock.wire.hand import AppPlaces, Place
from penstock.wire.scaling import GATEWAYS_KEY, LAPSE_MS, GatewayReport, PoolFlow, PoolReport, ReplicaReport, encode, report_key
from tests.e2e.ray_objects import APP

POOL = "a"
COSTS = StepCosts(base_s=0.02, row_s=0.001)
DRAIN_S = 0.3


@dataclass
class Replica:
    name: str
    state: str = "STARTING"
    address: str | None = None
    since_s: float = 0.0


@dataclass
class PlayedServe:
    """One application. Its own choice, on the way down, are replicas that still start, then the newest."""

    pods: Watched[Pod]
    target: int
    replicas: list[Replica] = field(default_factory=list)
    robbed: list[str] = field(default_factory=list)
    """Replicas whose pod went while they were neither drained nor about to be."""
    victims: list[str] = field(default_factory=list)
    """Names of the pods of those that were told to go, in order."""
    num_made: int = 0

    async def locate(self) -> list[AppPlaces]:
        return [AppPlaces(APP, self.target, [Place(replica.name, replica.state, replica.address) for replica in self.replicas])]

    async def set_target(self, name: str, target: int) -> None:
        assert name == APP
        self.target = target
        for replica in sorted(self.alive, key=lambda replica: replica.state != "STARTING")[: max(0, len(self.alive) - target)]:
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
    def num_running(self) -> int:
        return sum(replica.state == "RUNNING" for replica in self.replicas)

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


@dataclass
class Gateway:
    """What one gateway reports."""

    client: redis.asyncio.Redis
    serve: PlayedServe
    num_waiting: int = 0
    number: int = 0

    async def report(self) -> None:
        self.number += 1
        names = [replica.name for replica in self.serve.replicas if replica.state == "RUNNING"]
        rows = [ReplicaReport(name, POOL, Load("e", 0, 4, 0, 0, 0, 0, 800, 800, COSTS, 512), 16, int(name[1:]) * 7 % 11, 0) for name in names]
        pools = [PoolReport(POOL, PoolFlow(), self.num_waiting, 30.0 if self.num_waiting else 0.0)]
        await self.client.sadd(GATEWAYS_KEY, "g1")
        await self.client.set(report_key("g1"), encode(GatewayReport("g1", self.number, pools, rows)), px=LAPSE_MS)
