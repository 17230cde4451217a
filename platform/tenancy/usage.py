"""What tenants have used: requests and tokens by day, model and adapter, in Redis.

Not the limits, and nothing that a request waits for. A gateway adds up what has been used and writes it about once a
second, in batches that carry a number: a batch that is repeated because Redis's answer got lost is not counted twice.
While Redis is away, sums are kept and written when it is back. A gateway that is killed loses the last second, and of
answers that run what came since they were last added. Layout, under the tenant's hash tag:
    penstock:tenant:{id}:usage:2026-11-21             [model, adapter, kind] as JSON -> count; days are UTC
    penstock:tenant:{id}:usage:2026-11-21:{gateway}   number of that gateway's last batch
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from operator import add
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from penstock.tenancy.tenants import tenant_key
from penstock.wire.errors import Overloaded

FLUSH_S = 1.0
TIMEOUT_S = 2.0
KEPT_S = 400 * 86400
"""How long a day can be read."""
BATCH_KEPT_S = 7 * 86400
"""How long a batch may be repeated."""
MAX_ROWS = 65536
"""Rows kept while Redis is away; a row more is lost, with a line in the log. Rows are tenants times models times days:
few."""
DAY_S = 86400
_EPOCH = date(1970, 1, 1)
_UNAVAILABLE = (RedisError, OSError, TimeoutError)

log = logging.getLogger(__name__)


class Used(NamedTuple):
    """What one request has used, or many together."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in a cache."""
    completion_tokens: int = 0
    cost_nano: int = 0
    """Cost at the places' prices, in 1e-9 of the unit that prices are in."""
    charge_nano: int = 0
    """Charge by the tariff, in the same unit."""

    def plus(self, other: "Used") -> "Used":
        return Used(*map(add, self, other))


class UsageRow(NamedTuple):
    """Usage of one model, or of one adapter of it, on one day."""

    day: str
    """Date such as 2026-11-21, UTC."""
    model: str
    adapter: str
    """Name of the adapter; empty: none."""
    used: Used


class _TenantDay(NamedTuple):
    """One hash in Redis: a tenant's usage of one day."""

    tenant: str
    day: int
    """Days since 1970."""


class _ModelKey(NamedTuple):
    """What a row is about."""

    model: str
    adapter: str


_Rows = dict[_ModelKey, Used]


@dataclass(slots=True)
class _Batch:
    """Rows of one tenant and day that are written under one number."""

    number: int
    rows: _Rows


def day_name(day: int) -> str:
    return (_EPOCH + timedelta(days=day)).isoformat()


def last_days(count: int, now: float) -> list[str]:
    """Names of that many days, oldest first; the last one is that of `now`, Unix time."""
    today = datetime.fromtimestamp(now, UTC).date()
    return [(today - timedelta(days=back)).isoformat() for back in reversed(range(count))]


async def read_usage(client: redis.asyncio.Redis, tenant_id: str, days: Sequence[str]) -> list[UsageRow]:
    """Rows of a tenant, sorted by day, model and adapter. Raises RedisError, OSError or TimeoutError."""
    async with asyncio.timeout(TIMEOUT_S), client.pipeline(transaction=False) as pipe:
        for day in days:
            pipe.hgetall(tenant_key(tenant_id, f"usage:{day}"))
        replies = await pipe.execute()
    rows = [
        UsageRow(day, *key, used)
        for day, counts in zip(days, replies, strict=True)
        for key, used in _decode_rows(counts).items()
    ]
    return sorted(rows)


def _decode_rows(counts: dict[bytes, bytes]) -> _Rows:
    rows: _Rows = {}
    for field, count in counts.items():
        model, adapter, kind = msgspec.json.decode(field, type=tuple[str, str, str])
        key = _ModelKey(model, adapter)
        used = rows.setdefault(key, Used())
        if kind in Used._fields:  # a later version may count more
            rows[key] = used._replace(**{kind: int(count)})
    return rows


class UsageLog:
    """Usage that one gateway has still to write. Methods run on one event loop; `run` is a task of the gateway's. now:
    Unix time, seconds."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        gateway_id: str,
        now: Callable[[], float] = time.time,
        before_write: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """`before_write` is called before what has been added is written; where it returns False, that is written
        later."""
        self._client = client
        self._before_write = before_write
        self._script = client.register_script(Path(__file__).with_name("usage.lua").read_text(encoding="utf-8"))
        self._gateway_id = gateway_id
        self._now = now
        self._open: dict[_TenantDay, _Rows] = {}
        """Rows that still grow."""
        self._sealed: dict[_TenantDay, _Batch] = {}
        """Batches that may have been written already, so they must stay as they are."""
        self.num_rows = 0
        """Rows held, of both kinds."""
        self._number = 0
        self._num_lost = 0
        self._flushing = asyncio.Lock()
        self._is_unavailable = False

    def add(self, tenant_id: str, model: str, adapter: str, used: Used) -> None:
        """Add what a request has used, or what it has used since it was last added; `used.requests` is 1 the first
        time. O(1)."""
        rows = self._open.setdefault(_TenantDay(tenant_id, int(self._now()) // DAY_S), {})
        key = _ModelKey(model, adapter)
        before = rows.get(key)
        if before is not None:
            rows[key] = before.plus(used)
        elif self.num_rows < MAX_ROWS:
            rows[key] = used
            self.num_rows += 1
        else:
            self._lose()

    async def run(self) -> None:
        """Write every second until cancelled, and then what is left."""
        try:
            while True:
                await asyncio.sleep(FLUSH_S)
                await self.flush()
        finally:
            await self.flush()

    async def flush(self) -> bool:
        """Write all that was added before. Returns False if Redis is away; it is kept then, and written later."""
        async with self._flushing:
            if not await self._write_sealed():
                return False
            self._seal()
            return await self._write_sealed()

    async def _write_sealed(self) -> bool:
        if not self._sealed:
            return True
        if self._before_write is not None and not await self._before_write():
            return False
        return await self._write()

    async def read(self, tenant_id: str, days: Sequence[str]) -> list[UsageRow]:
        """Rows of a tenant as `read_usage` returns them, with what was added here before. Raises Overloaded when Redis
        is away."""
        try:
            if await self.flush():
                return await read_usage(self._client, tenant_id, days)
        except _UNAVAILABLE as error:
            self._note(error)
        raise Overloaded("usage can't be read at the moment", retry_after_s=1.0)

    def _seal(self) -> None:
        assert not self._sealed
        for tenant_day, rows in self._open.items():
            self._number += 1
            self._sealed[tenant_day] = _Batch(self._number, rows)
        self._open = {}

    async def _write(self) -> bool:
        for tenant_day, batch in list(self._sealed.items()):
            name = tenant_key(tenant_day.tenant, f"usage:{day_name(tenant_day.day)}")
            counts = [
                part
                for key, used in batch.rows.items()
                for kind, count in zip(Used._fields, used, strict=True)
                if count
                for part in (_encode_field(key, kind), count)
            ]
            arguments: list[bytes | int] = [batch.number, KEPT_S, BATCH_KEPT_S, *counts]
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await cast(
                        "Awaitable[int]", self._script(keys=[name, f"{name}:{self._gateway_id}"], args=arguments)
                    )
            except _UNAVAILABLE as error:
                self._note(error)
                return False
            self.num_rows -= len(self._sealed.pop(tenant_day).rows)
            self._note(None)
        return True

    def _lose(self) -> None:
        self._num_lost += 1
        if self._num_lost == 1:
            log.error("usage_lost", extra={"rows": MAX_ROWS})

    def _note(self, error: BaseException | None) -> None:
        """Write a line to the log when Redis goes away and when it is back."""
        if self._is_unavailable != (error is not None):
            self._is_unavailable = error is not None
            log.warning(
                "usage_kept" if self._is_unavailable else "usage_written",
                extra={"cause": type(error).__name__, "lost_requests": self._num_lost},
            )
            self._num_lost = 0


def _encode_field(key: _ModelKey, kind: str) -> bytes:
    return msgspec.json.encode((*key, kind))


def usage_key(tenant_id: str, now: float) -> str:
    """Name of the hash of what a tenant uses on the day of `now`, Unix time."""
    return tenant_key(tenant_id, f"usage:{day_name(int(now) // DAY_S)}")


def count_fields(model: str, adapter: str, used: Used) -> list[tuple[bytes, str, int]]:
    """Field in that hash, kind and count of whatever was used, for a script that adds it in one step with something
    else. The hash must then be kept for KEPT_S."""
    key = _ModelKey(model, adapter)
    return [(_encode_field(key, kind), kind, count) for kind, count in zip(Used._fields, used, strict=True) if count]
