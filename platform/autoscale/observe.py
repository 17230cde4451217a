"""What gateways report, read from Redis, as observations of pools. Age is counted from when a report was new here, so
no two clocks meet."""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import redis.asyncio

from penstock.autoscale.observation import Observation, ReplicaSeen, ServeState
from penstock.wire.scaling import (
    GATEWAYS_KEY,
    LAPSE_MS,
    TARGETS_KEY,
    GatewayReport,
    PoolFlow,
    Targets,
    decode_report,
    encode,
    report_key,
)

SILENT_S = 2.5
"""A gateway whose last report is older is left out while another one is heard: it may have died."""


class AgedReport(NamedTuple):
    report: GatewayReport
    age_s: float


class Reports:
    """client: without `decode_responses`. Raises redis-py's errors. clock: monotonic seconds."""

    def __init__(self, client: redis.asyncio.Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._news: dict[str, tuple[int, float]] = {}
        """By gateway: number of its last report, and when that was new."""

    async def read(self) -> list[AgedReport]:
        """The latest report of every gateway."""
        names = sorted(name.decode() for name in cast(set[bytes], await self._client.smembers(GATEWAYS_KEY)))
        found = [cast(bytes | None, await self._client.get(report_key(name))) for name in names]
        gone = [name for name, data in zip(names, found, strict=True) if data is None]
        if gone:
            await self._client.srem(GATEWAYS_KEY, *gone)
        reports = [report for data in found if data is not None and (report := decode_report(data)) is not None]
        self._news = {report.gateway: self._since(report) for report in reports}
        return [AgedReport(report, self._clock() - self._news[report.gateway][1]) for report in reports]

    async def tell(self, targets: Targets) -> None:
        await self._client.set(TARGETS_KEY, encode(targets), px=LAPSE_MS)

    def _since(self, report: GatewayReport) -> tuple[int, float]:
        known = self._news.get(report.gateway)
        return known if known is not None and known[0] == report.number else (report.number, self._clock())


def observe(pool: str, placed: ServeState, heard: Iterable[AgedReport]) -> Observation:
    """A pool in the words of all gateways that are heard; of a replica's load the youngest report counts, for each says
    the same."""
    fresh = sorted((item for item in heard if item.age_s <= SILENT_S), key=lambda item: -item.age_s)
    rows = {item.report.gateway: row for item in fresh for row in item.report.pools if row.pool == pool}
    flows: dict[str, PoolFlow] = {gateway: row.flow for gateway, row in rows.items()}
    replicas: dict[str, ReplicaSeen] = {}
    for item in fresh:
        for row in item.report.replicas:
            if row.pool == pool:
                before = replicas.get(row.replica_id)
                hit_tokens = row.hit_tokens + (0 if before is None else before.hit_tokens)
                replicas[row.replica_id] = ReplicaSeen(
                    row.replica_id, row.load, row.block_size, row.cached_blocks, hit_tokens
                )
    return Observation(
        placed=placed,
        flows=flows,
        num_queued=sum(row.num_waiting for row in rows.values()),
        oldest_wait_s=max((row.oldest_wait_s for row in rows.values()), default=0.0),
        replicas=tuple(replicas.values()),
        age_s=max((item.age_s for item in fresh), default=float("inf")),
    )
