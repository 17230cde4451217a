"""The replicas of all pools over time: asked for, starting, ready, draining, gone. Stands for Ray Serve's controller.

The autoscaler reads and changes it through the methods of `penstock.autoscale.scaler.Actuator`, which are coroutines
there; here nothing in them waits. Invariant: a replica is counted from when it was asked for until it is empty and
gone.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

import msgspec

from penstock.autoscale.limits.shortage import Shortage
from penstock.autoscale.observation import ServeState
from penstock.perf.model import scale_costs
from penstock.prefix.index import PrefixIndex
from penstock.router.replicas.replica_client import PoolCallbacks, ReplicaClient
from penstock.router.replicas.traffic import PoolTraffic
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.faults.fault import find_fault
from penstock.sim.replica import SimulatedMember, SimulatedReplica, Timing
from penstock.sim.simulated_gateway import SimulatedRoute
from penstock.sim.step_times import Noise, StepTimes

DEFAULT_START_S = 10.0
"""Seconds that a replica of a pool without scaling would take to start."""


class ReplicaLife(msgspec.Struct):
    """What became of one replica, seconds of the simulation; None: not yet."""

    replica_id: str
    pool: str
    asked_s: float
    ready_s: float | None = None
    ended_s: float | None = None

    def seconds(self, until_s: float) -> float:
        """Seconds for which it was paid for until then."""
        return min(until_s, until_s if self.ended_s is None else self.ended_s) - self.asked_s


@dataclass(slots=True)
class _Pool:
    spec: SimulatedPool
    route: SimulatedRoute
    timing: Timing
    traffic: PoolTraffic = field(default_factory=PoolTraffic)
    num_asked: int = 0
    num_tokens_gone: int = 0
    """Output tokens of replicas that are gone."""
    starting: dict[str, ReplicaLife] = field(default_factory=dict)
    unplaced: dict[str, ReplicaLife] = field(default_factory=dict)
    """Starting replicas that have no GPUs."""
    ready: dict[str, SimulatedReplica] = field(default_factory=dict)
    draining: dict[str, SimulatedReplica] = field(default_factory=dict)


class SimulatedFleet:
    """The replicas. after: calls an action so many seconds later. on_change: called when replicas became ready or
    ceased to be."""

    def __init__(
        self,
        pools: Mapping[str, tuple[SimulatedPool, SimulatedRoute]],
        config: SimulationConfig,
        index: PrefixIndex,
        callbacks: PoolCallbacks,
        clock: Callable[[], float],
        after: Callable[[float, Callable[[], None]], None],
        on_change: Callable[[], None],
        *,
        has_tenants: bool,
    ) -> None:
        self.lives: dict[str, ReplicaLife] = {}
        self._pools: dict[str, _Pool] = {}
        self._config = config
        self._index = index
        self._callbacks = callbacks
        self._clock = clock
        self._after = after
        self._on_change = on_change
        self._has_tenants = has_tenants
        self._random = Random(f"starts {config.seed}")
        for name, (spec, route) in pools.items():
            times = StepTimes(spec.engine.timed)
            self._pools[name] = _Pool(spec, route, Timing(times, scale_costs(times.costs, config.model_error)))

    def begin(self) -> None:
        """Make the replicas ready that there are from the beginning."""
        for fault in self._config.faults:
            if fault.kind == "no_gpus":
                self._after(fault.end_s, self._place)
        for name, pool in self._pools.items():
            for _ in range(pool.spec.replicas):
                self._make_ready(self._ask(name))

    @property
    def replicas(self) -> Iterator[SimulatedReplica]:
        """Replicas that compute, draining ones included."""
        for pool in self._pools.values():
            yield from pool.ready.values()
            yield from pool.draining.values()

    def replica(self, replica_id: str) -> SimulatedReplica:
        pool = self._pools[self.lives[replica_id].pool]
        return pool.ready.get(replica_id) or pool.draining[replica_id]

    def num_ready(self) -> dict[str, int]:
        """Replicas that take requests, by "pool/tier"."""
        return {f"{name}/{pool.spec.tier}": len(pool.ready) for name, pool in self._pools.items()}

    def sources(self) -> dict[str, str]:
        """Where the step times of each pool are from."""
        return {name: pool.timing.times.source for name, pool in self._pools.items()}

    def ready_clients(self, pool: str) -> list[ReplicaClient]:
        return [replica.client for replica in self._pools[pool].ready.values()]

    def count_traffic(self, pool: str) -> PoolTraffic:
        """The pool's traffic, with the output tokens that have come by now."""
        state = self._pools[pool]
        present = (*state.ready.values(), *state.draining.values())
        state.traffic.output_tokens = state.num_tokens_gone + sum(each.batch.num_output_tokens for each in present)
        return state.traffic

    def drop_if_empty(self, replica_id: str, now: float) -> None:
        """Let a draining replica go whose last sequence has ended."""
        pool = self._pools[self.lives[replica_id].pool]
        replica = pool.draining.get(replica_id)
        if replica is None or replica.num_live:
            return
        del pool.draining[replica_id]
        pool.num_tokens_gone += replica.batch.num_output_tokens
        replica.client.detach()
        self.lives[replica_id].ended_s = now
        self._place()

    # the autoscaler's actuator

    async def read(self) -> Mapping[str, ServeState]:
        return {
            name: ServeState(
                len(pool.ready) + len(pool.starting), tuple(pool.ready), len(pool.starting), len(pool.draining)
            )
            for name, pool in self._pools.items()
        }

    async def set_target(self, pool: str, target: int) -> None:
        """Start more replicas, or stop those that are too many: those that start, then the newest."""
        state = self._pools[pool]
        while len(state.ready) + len(state.starting) < target:
            life = self._ask(pool)
            state.unplaced[life.replica_id] = life
        self._place()
        for replica_id in [*state.ready, *state.starting][target:]:
            self._stop(pool, replica_id)

    async def step_down(self, pool: str, victims: tuple[str, ...], target: int) -> bool:  # noqa: ARG002 (as of Actuator)
        for replica_id in victims:
            self._stop(pool, replica_id)
        return True

    def shortages(self) -> dict[str, Shortage]:
        """The pools' replicas without GPUs, where the cluster tells of them."""
        fault = find_fault(self._config.faults, "no_gpus", self._clock())
        if fault is None or not fault.is_told:
            return {}
        return {
            name: Shortage("unschedulable", _num_placed(pool), len(pool.unplaced), "no GPU is free")
            for name, pool in self._pools.items()
            if pool.unplaced
        }

    def _place(self) -> None:
        """Let those begin to start that have GPUs now."""
        fault = find_fault(self._config.faults, "no_gpus", self._clock())
        for pool in self._pools.values():
            while pool.unplaced and (fault is None or _num_placed(pool) + len(pool.draining) < fault.replicas):
                self._start(pool.unplaced.pop(next(iter(pool.unplaced))))

    def _ask(self, pool: str) -> ReplicaLife:
        state = self._pools[pool]
        state.num_asked += 1
        life = ReplicaLife(f"{pool}-{state.num_asked}", pool, self._clock())
        self.lives[life.replica_id] = life
        state.starting[life.replica_id] = life
        return life

    def _start(self, life: ReplicaLife) -> None:
        spec = self._pools[life.pool].spec
        mean_s = self._config.start_s
        if mean_s is None:
            mean_s = DEFAULT_START_S if spec.autoscale is None else spec.autoscale.start_s
        sigma = math.sqrt(math.log1p(self._config.start_jitter**2))
        start_s = mean_s * math.exp(sigma * self._random.gauss() - sigma**2 / 2)
        self._after(start_s, lambda: self._make_ready(life))

    def _make_ready(self, life: ReplicaLife) -> None:
        pool = self._pools[life.pool]
        if pool.starting.pop(life.replica_id, None) is None:
            return  # given up meanwhile
        life.ready_s = self._clock()
        engine = pool.spec.engine
        member = SimulatedMember(life.replica_id, life.pool, engine.block_size, engine.timed.max_model_len)
        client = ReplicaClient(member, self._index, self._callbacks, pool.traffic)
        noise = Noise(pool.timing.times.noise, (self._config.seed, len(self.lives), pool.num_asked))
        pool.ready[life.replica_id] = SimulatedReplica(
            client, engine, pool.timing, noise, has_tenants=self._has_tenants, targets=pool.spec.targets
        )
        pool.route.add(client)
        self._on_change()
        self._callbacks.on_room(life.pool, life.replica_id)

    def _stop(self, pool: str, replica_id: str) -> None:
        """Begin to drain a replica, or give up one that starts."""
        state, now = self._pools[pool], self._clock()
        if replica_id in state.starting:
            del state.starting[replica_id]
            state.unplaced.pop(replica_id, None)
            self.lives[replica_id].ended_s = now
            return
        replica = state.ready.pop(replica_id, None)
        if replica is None:
            return
        replica.is_draining = replica.client.is_retiring = True
        state.route.remove(replica.client)
        state.draining[replica_id] = replica
        self._on_change()
        self.drop_if_empty(replica_id, now)


def _num_placed(pool: _Pool) -> int:
    """Replicas that are ready, or start and have GPUs."""
    return len(pool.ready) + len(pool.starting) - len(pool.unplaced)
