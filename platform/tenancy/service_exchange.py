"""What each gateway has given to each tenant, and how busy it is, told to the other gateways through Redis, about once
a second.

Not the counters (`penstock.router.dispatch.shares.counters`), which this only feeds, and nothing that a request waits
for. Each gateway keeps its sums in one field of one hash, so the traffic is a read and a write a second, and a lost or
repeated write changes nothing. What others have given counts from the second look at their sums on: what was given
while gateways could not see each other (Redis away, a gateway that is new) is held against nobody. A gateway whose sums
have not changed for STALE_S is gone. Bounded: each gateway tells of at most MAX_TENANTS tenants, those that wait first.
Layout:
    penstock:service            gateway id -> Report, as MessagePack; ends by itself KEPT_S after the last write
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from penstock.tenancy.share import Service

EXCHANGE_S = 1.0
"""Time from one exchange to the next."""
TIMEOUT_S = 0.5
STALE_S = 5.0
"""A gateway that has not written for so long doesn't count, and no more does what was missed for longer."""
IDLE_S = 60.0
"""A tenant that was given nothing for so long is left out, and its sum begins anew."""
KEPT_S = 60
MAX_TENANTS = 1024
MAX_REPORT_BYTES = 256 * 1024
"""Longest report that is read; a longer one was not written by a gateway."""
_KEY = "penstock:service"
_UNAVAILABLE = (RedisError, OSError, TimeoutError)

log = logging.getLogger(__name__)


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway writes."""

    number: int
    """1 for its first report, and rising."""
    given: dict[str, Service]
    load: float | None = None
    """Requests under way there; None: a gateway of the version before."""


class Loads(Protocol):
    """Takes how busy the gateways are."""

    def sample(self) -> float:
        """How many requests are under way at this gateway, on average over the latest calls."""

    def compare(self, others: Sequence[float]) -> None:
        """Take what the other gateways have sampled."""


class Counters(Protocol):
    """The counters of a gateway."""

    def given(self) -> Mapping[str, Service]:
        """What this gateway has given."""

    def forget_given(self, tenants: Iterable[str]) -> None:
        """Begin anew with what was given to these tenants."""

    def take_elsewhere(self, costs: Mapping[str, float], waiting: Iterable[str]) -> None:
        """Take what other gateways have given since the last call, and for whom requests wait there."""


@dataclass(slots=True)
class _Known:
    """The latest report of another gateway. Times are those of the exchange's clock."""

    report: Report
    changed_at: float


@dataclass(slots=True)
class Merger:
    """What follows from the reports of all gateways: pure, `now` is monotonic seconds."""

    _known: dict[str, _Known] = field(default_factory=dict)

    def merge(self, reports: Mapping[str, Report], now: float) -> tuple[dict[str, float], set[str]]:
        """What others have given since the last call, by tenant, and who waits there. reports: those of the others."""
        costs: dict[str, float] = {}
        waiting: set[str] = set()
        self._known = {gateway: known for gateway, known in self._known.items() if gateway in reports}
        for gateway, report in reports.items():
            known = self._known.get(gateway)
            is_recent = known is not None and now - known.changed_at <= STALE_S
            if known is None or known.report.number != report.number:
                self._known[gateway] = _Known(report, now)
                if known is not None and is_recent:
                    _add_gains(costs, known.report.given, report.given)
                is_recent = True
            if is_recent:
                waiting.update(tenant for tenant, service in report.given.items() if service.is_waiting)
        return costs, waiting

    def loads(self, now: float) -> list[float]:
        """Requests under way at each other gateway that writes."""
        return [
            known.report.load
            for known in self._known.values()
            if known.report.load is not None and now - known.changed_at <= STALE_S
        ]

    def stale(self, now: float) -> list[str]:
        """Gateways that are gone: their reports are the same for so long that nobody else needs them either."""
        return [gateway for gateway, known in self._known.items() if now - known.changed_at > KEPT_S]


class Publisher:
    """Maker of a gateway's reports, from what it has given: pure, `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._number = 0
        self._changed: dict[str, tuple[float, float]] = {}
        """Sum of each tenant and when it changed."""

    def make(self, given: Mapping[str, Service], now: float, load: float | None = None) -> tuple[Report, list[str]]:
        """The next report, and the tenants that it leaves out, whose sums begin anew."""
        for tenant, service in given.items():
            changed = self._changed.get(tenant)
            if changed is None or changed[0] != service.cost or service.is_waiting:
                self._changed[tenant] = service.cost, now
        idle = [tenant for tenant, (_, at) in self._changed.items() if tenant not in given or now - at > IDLE_S]
        for tenant in idle:
            del self._changed[tenant]
        told = [tenant for tenant in given if tenant in self._changed]
        if len(told) > MAX_TENANTS:
            told.sort(key=lambda tenant: (given[tenant].is_waiting, self._changed[tenant][1]), reverse=True)
        self._number += 1
        report = Report(self._number, {tenant: given[tenant] for tenant in told[:MAX_TENANTS]}, load)
        return report, idle + told[MAX_TENANTS:]


class ServiceExchange:
    """The exchange of one gateway. `correct`: brings its counters up to date. clock: monotonic seconds. loads: None:
    nothing is told of how busy it is."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        gateway_id: str,
        counters: Counters,
        correct: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        period_s: float = EXCHANGE_S,
        loads: Loads | None = None,
    ) -> None:
        self._client = client
        self._gateway_id = gateway_id
        self._counters = counters
        self._correct = correct
        self._clock = clock
        self._period_s = period_s
        self._loads = loads
        self._publisher = Publisher()
        self._merger = Merger()
        self._is_away = False

    async def run(self) -> None:
        """Exchange until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            self._correct()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self.exchange()
            except _UNAVAILABLE as error:
                self._note(error)
            else:
                self._note(None)

    async def exchange(self) -> None:
        """Write this gateway's report and read those of the others. Raises RedisError, OSError or TimeoutError."""
        now = self._clock()
        load = None if self._loads is None else self._loads.sample()
        report, idle = self._publisher.make(self._counters.given(), now, load)
        self._counters.forget_given(idle)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hset(_KEY, self._gateway_id, msgspec.msgpack.encode(report))
            pipe.expire(_KEY, KEPT_S)
            pipe.hgetall(_KEY)
            replies = await pipe.execute()
        reports = {
            gateway.decode(): read
            for gateway, data in cast("dict[bytes, bytes]", replies[-1]).items()
            if gateway.decode() != self._gateway_id and (read := _decode(data)) is not None
        }
        self._counters.take_elsewhere(*self._merger.merge(reports, now))
        if self._loads is not None:
            self._loads.compare(self._merger.loads(now))
        stale = self._merger.stale(now)
        if stale:
            await self._client.hdel(_KEY, *stale)

    def _note(self, error: BaseException | None) -> None:
        """Write a line to the log when the exchange ceases and when it goes on."""
        if self._is_away != (error is not None):
            self._is_away = error is not None
            log.warning(
                "shares_alone" if self._is_away else "shares_together",
                extra={"cause": None if error is None else type(error).__name__},
            )


def _add_gains(costs: dict[str, float], before: Mapping[str, Service], now: Mapping[str, Service]) -> None:
    for tenant, service in now.items():
        gained = service.cost - (before[tenant].cost if tenant in before else 0.0)
        if gained > 0:  # else it was left out meanwhile, and began anew
            costs[tenant] = costs.get(tenant, 0.0) + gained


def _decode(data: bytes) -> Report | None:
    """Returns None for what no gateway of this version can have written."""
    if len(data) > MAX_REPORT_BYTES:
        return None
    try:
        return msgspec.msgpack.decode(data, type=Report)
    except msgspec.MsgspecError:
        return None
