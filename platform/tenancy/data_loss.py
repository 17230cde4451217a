"""Notices that Redis came back without its data: emptied, a disk lost, a failover to a server that never had it.

A marker, a random number under one key, is made by whichever gateway finds none. One that is gone, or another one than
this gateway saw before, means that what was there is lost. It is then said in the log and counted, and nothing else
changes: keys that a gateway knows go on for gateway.key_grace_minutes, so that there is time to restore an export;
dropping them would turn a loss of data into an outage. What it can't see: a loss while no gateway runs, and the last
writes that a failover or a crash takes away.

Decisions: docs/decisions/limits.md
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import cast

import redis.asyncio
from redis.exceptions import RedisError

MARKER = "penstock:marker"
PERIOD_S = 5.0
TIMEOUT_S = 2.0
_UNAVAILABLE = (RedisError, OSError, TimeoutError)

log = logging.getLogger(__name__)


class LossWatch:
    """Looks at the marker every period_s, for as long as `run` runs. on_loss: called once for each loss. on_look:
    called after each look with whether Redis left it without an answer."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        on_loss: Callable[[], object],
        on_look: Callable[[bool], object] = lambda _: None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._client = client
        self._on_loss = on_loss
        self._on_look = on_look
        self._period_s = period_s
        self._marker: bytes | None = None

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(self._period_s)

    async def check(self) -> bool:
        """Compare the marker with the one seen before. Returns False if that one is lost. While Redis is away nothing
        is known, and True is returned."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = cast("bytes | None", await self._client.get(MARKER))
                if found is None:
                    await self._client.set(MARKER, secrets.token_hex(8), nx=True)
                    found = cast("bytes | None", await self._client.get(MARKER))
        except _UNAVAILABLE:
            self._on_look(True)
            return True
        self._on_look(False)
        known, self._marker = self._marker, found
        if known is None or known == found:
            return True
        log.error(
            "redis_has_lost_its_data",
            extra={"hint": "known keys go on for gateway.key_grace_minutes; restore an export: penstock tenant apply"},
        )
        self._on_loss()
        return False
