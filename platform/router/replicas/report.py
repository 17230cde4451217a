"""The report of this gateway to the autoscaler twice a second, and the autoscaler's targets for the metrics; both
through Redis, in one round trip.

Runs only where a pool is scaled. Redis away: nothing is reported, which the autoscaler notices by the age of the last
report.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import redis.asyncio
from redis.exceptions import RedisError

from penstock.base.metrics import Metrics
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.replica_client import ReplicaClient
from penstock.router.replicas.traffic import PoolTraffic
from penstock.wire.scaling import (
    GATEWAYS_KEY,
    LAPSE_MS,
    REPORT_S,
    TARGETS_KEY,
    GatewayReport,
    PoolReport,
    ReplicaReport,
    Targets,
    decode_targets,
    encode,
    report_key,
)

log = logging.getLogger("penstock.gateway")


class Waiting(NamedTuple):
    """The requests that wait for a pool: how many, and for how many seconds the oldest has waited."""

    num_requests: int
    oldest_s: float


class Reporter:
    """Writes this gateway's report to Redis and reads the autoscaler's targets. pools: those that are scaled. waiting:
    requests that wait for a pool. num_held: blocks of a replica in the index. client: made without
    `decode_responses`."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        gateway: str,
        pools: Sequence[str],
        fleet: Fleet,
        waiting: Callable[[str], Waiting],
        num_held: Callable[[str], int],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ready_s: dict[str, float] = {}
        """Times at which the first replicas of pools should be there, were they asked for by now; on `clock`."""
        self._heard: bytes | None = None
        """What the autoscaler said last, and since when."""
        self._heard_s = clock()
        self._client = client
        self._gateway = gateway
        self._pools = list(pools)
        self._fleet = fleet
        self._waiting = waiting
        self._num_held = num_held
        self._metrics = metrics
        self._number = 0
        self._autoscaler = ""
        self._counted: dict[tuple[str, str], int] = {}
        """Decisions of the autoscaler that the metrics hold already, by pool and reason."""

    async def run(self) -> None:
        """Report until cancelled."""
        is_unavailable = False
        while True:
            try:
                await self.exchange()
                is_unavailable = False
            except (RedisError, OSError, TimeoutError) as error:
                if not is_unavailable:
                    log.warning("autoscaler not told", extra={"error": type(error).__name__})
                is_unavailable = True
            await asyncio.sleep(REPORT_S)

    async def exchange(self) -> None:
        """Write one report and read the targets. Raises redis-py's errors."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.set(report_key(self._gateway), encode(self.report()), px=LAPSE_MS)
            pipe.sadd(GATEWAYS_KEY, self._gateway)
            pipe.get(TARGETS_KEY)
            _, _, data = await pipe.execute()
        if data == self._heard:
            return  # what was said before: numbers of decisions rise with each turn
        self._heard = data
        targets = None if data is None else decode_targets(data)
        if targets is not None:
            self._count_decisions(targets)
            self._heard_s = self._clock()
            self._ready_s = {
                row.pool: self._heard_s + row.ready_in_s for row in targets.pools if row.ready_in_s is not None
            }

    def ready_in_s(self, pool: str) -> float | None:
        """Seconds until the pool's first replica should be there, at least 0. None: nobody knows, or the autoscaler has
        not been heard for LAPSE_MS."""
        ready_s, now = self._ready_s.get(pool), self._clock()
        return None if ready_s is None or now - self._heard_s > LAPSE_MS / 1000 else max(0.0, ready_s - now)

    def report(self) -> GatewayReport:
        self._number += 1
        return GatewayReport(
            gateway=self._gateway,
            number=self._number,
            pools=[
                PoolReport(pool, traffic.to_wire(), *self._waiting(pool)) for pool, traffic in self._traffic().items()
            ],
            replicas=[_report_replica(client, self._num_held) for client in self._fleet.ready_clients(self._pools)],
        )

    def _traffic(self) -> Mapping[str, PoolTraffic]:
        return {pool: self._fleet.traffic[pool] for pool in self._pools}

    def _count_decisions(self, targets: Targets) -> None:
        if targets.autoscaler != self._autoscaler:  # another process: its counts began at 0
            self._autoscaler = targets.autoscaler
            self._counted.clear()
        for row in targets.pools:
            self._metrics.autoscale_target.labels(row.pool).set(row.target)
            for reason, count in row.reasons.items():
                key = row.pool, reason
                self._metrics.autoscale_decisions.labels(row.pool, reason).inc(
                    max(0, count - self._counted.get(key, 0))
                )
                self._counted[key] = count


def _report_replica(client: ReplicaClient, num_held: Callable[[str], int]) -> ReplicaReport:
    member = client.member
    assert client.load is not None, "a ready replica has one"
    return ReplicaReport(
        member.replica_id,
        member.pool,
        client.load,
        member.block_size,
        num_held(member.replica_id),
        client.hit_tokens,
        member.start,
    )
