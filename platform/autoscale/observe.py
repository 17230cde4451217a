"""Gateways' reports, read from Redis, as observations of pools. A report's age is counted from when it was new here, so
no two clocks are compared."""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import redis.asyncio

from penstock.autoscale.observation import Observation, ReplicaSnapshot, ServeState
from penstock.wire.scaling import (
    GATEWAYS_KEY,
    LAPSE_MS,
    TARGETS_KEY,
    GatewayReport,
    PoolFlow,
    ReplicaReport,
    Targets,
    decode_report,
    encode,
    report_key,
)

SILENT_S = 2.5
"""Seconds after which a gateway's report is left out while another gateway reports: it may have died."""


class AgedReport(NamedTuple):
    """A gateway's report and the seconds since it was new here."""

    report: GatewayReport
    age_s: float


class ReportAges:
    """The ages of gateways' reports. Pure; the caller tells the time."""

    def __init__(self) -> None:
        self._news: dict[str, tuple[int, float]] = {}
        """Each gateway's last report: its number, and when it was new."""

    def note(self, reports: Iterable[GatewayReport], now: float) -> list[AgedReport]:
        """The reports with their ages: the latest of every gateway, as it was found at `now`, monotonic seconds."""
        found = list(reports)
        self._news = {report.gateway: self._since(report, now) for report in found}
        return [AgedReport(report, now - self._news[report.gateway][1]) for report in found]

    def _since(self, report: GatewayReport, now: float) -> tuple[int, float]:
        known = self._news.get(report.gateway)
        return known if known is not None and known[0] == report.number else (report.number, now)


class Reports:
    """The reports in one Redis. client: without `decode_responses`. clock: monotonic seconds. Raises redis-py's
    errors."""

    def __init__(self, client: redis.asyncio.Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._ages = ReportAges()

    async def read(self) -> list[AgedReport]:
        """The latest report of every gateway."""
        names = sorted(name.decode() for name in cast(set[bytes], await self._client.smembers(GATEWAYS_KEY)))
        found = [cast(bytes | None, await self._client.get(report_key(name))) for name in names]
        gone = [name for name, data in zip(names, found, strict=True) if data is None]
        if gone:
            await self._client.srem(GATEWAYS_KEY, *gone)
        reports = [report for data in found if data is not None and (report := decode_report(data)) is not None]
        return self._ages.note(reports, self._clock())

    async def publish(self, targets: Targets) -> None:
        """Writes the pools' targets for gateways to show in their metrics."""
        await self._client.set(TARGETS_KEY, encode(targets), px=LAPSE_MS)


def observe(pool: str, serve_state: ServeState, reports: Iterable[AgedReport]) -> Observation:
    """A pool by the reports of all gateways; of a replica's load the youngest report counts, for all gateways report
    the same load."""
    fresh = sorted((item for item in reports if item.age_s <= SILENT_S), key=lambda item: -item.age_s)
    rows = {item.report.gateway: row for item in fresh for row in item.report.pools if row.pool == pool}
    flows: dict[str, PoolFlow] = {gateway: row.flow for gateway, row in rows.items()}
    found = [row for item in fresh for row in item.report.replicas if row.pool == pool]
    youngest: dict[str, ReplicaReport] = {row.replica_id: row for row in found}
    hit_tokens = dict.fromkeys(youngest, 0)
    for row in found:
        hit_tokens[row.replica_id] += row.hit_tokens
    return Observation(
        serve_state=serve_state,
        flows=flows,
        num_queued=sum(row.num_waiting for row in rows.values()),
        oldest_wait_s=max((row.oldest_wait_s for row in rows.values()), default=0.0),
        replicas=tuple(
            ReplicaSnapshot(name, row.load, row.block_size, row.cached_blocks, hit_tokens[name], row.start)
            for name, row in youngest.items()
        ),
        age_s=max((item.age_s for item in fresh), default=float("inf")),
        queues={gateway: row.num_waiting for gateway, row in rows.items()},
    )
