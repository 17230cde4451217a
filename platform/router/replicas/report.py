"""What this gateway tells the autoscaler twice a second, and what it hears from it for its metrics; both through Redis,
one round trip.

Runs only where a pool is scaled. Redis away: nothing is told, which the autoscaler sees by the age of the last report.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import redis.asyncio
from redis.exceptions import RedisError

from penstock.base.metrics import Metrics
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.replica_client import ReplicaClient
from penstock.router.replicas.traffic import Flow
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
    """pools: those that are scaled. waiting: by pool. num_held: blocks of a replica in the index. client: without
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
    ) -> None:
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
        """Of its decisions those that are in the metrics, by pool and reason."""

    async def run(self) -> None:
        """Until cancelled."""
        is_away = False
        while True:
            try:
                await self.exchange()
                is_away = False
            except (RedisError, OSError, TimeoutError) as error:
                if not is_away:
                    log.warning("autoscaler not told", extra={"error": type(error).__name__})
                is_away = True
            await asyncio.sleep(REPORT_S)

    async def exchange(self) -> None:
        """Tell and hear, once. Raises redis-py's errors."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.set(report_key(self._gateway), encode(self.report()), px=LAPSE_MS)
            pipe.sadd(GATEWAYS_KEY, self._gateway)
            pipe.get(TARGETS_KEY)
            _, _, data = await pipe.execute()
        targets = None if data is None else decode_targets(data)
        if targets is not None:
            self._show(targets)

    def report(self) -> GatewayReport:
        self._number += 1
        return GatewayReport(
            gateway=self._gateway,
            number=self._number,
            pools=[PoolReport(pool, flow.told(), *self._waiting(pool)) for pool, flow in self._flows().items()],
            replicas=[self._replica(remote) for remote in self._fleet.remotes(self._pools)],
        )

    def _flows(self) -> Mapping[str, Flow]:
        return {pool: self._fleet.flows[pool] for pool in self._pools}

    def _replica(self, remote: ReplicaClient) -> ReplicaReport:
        member = remote.member
        assert remote.load is not None, "a ready remote has one"
        return ReplicaReport(
            member.replica_id,
            member.pool,
            remote.load,
            member.block_size,
            self._num_held(member.replica_id),
            remote.hit_tokens,
        )

    def _show(self, targets: Targets) -> None:
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
