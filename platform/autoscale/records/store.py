"""Pools' records in Redis.

penstock:scaling:record:{pool}    a PoolRecord, as JSON; ends by itself KEPT_S after the last write
"""

from datetime import timedelta
from typing import cast

import redis.asyncio

KEPT_S = timedelta(days=8).total_seconds()
"""Seconds for which a record is kept that nobody writes: longer than bursts are remembered."""


def record_key(pool: str) -> str:
    return f"penstock:scaling:record:{pool}"


class RedisRecords:
    """The records in one Redis. client: without `decode_responses`. Raises redis-py's errors."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client

    async def read(self, pool: str) -> bytes | None:
        return cast(bytes | None, await self._client.get(record_key(pool)))

    async def write(self, pool: str, data: bytes) -> None:
        await self._client.set(record_key(pool), data, px=int(KEPT_S * 1000))
