"""The autoscaler as Ray Serve runs it: composition root of its sources, its actuator and its loop, in a process of its
own.

Serve replaces it when it dies, and then it knows what its record in Redis tells; it learns the load again within a
window, and until then moves nothing down. While it, Redis or Serve's controller is away the pools stay as they are.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

from ray import serve
from redis.exceptions import RedisError

from penstock.autoscale.actuator import ServeActuator
from penstock.autoscale.journal import Journal
from penstock.autoscale.observe import Reports
from penstock.autoscale.records.store import RedisRecords
from penstock.autoscale.scaler import ScaledPool, Scaler
from penstock.base import log as logs
from penstock.base.environment import REDIS_URL, redis_url
from penstock.base.errors import ConfigError, PenstockError
from penstock.base.redis import connect
from penstock.base.serve_options import serve_options
from penstock.wire.discovery import AUTOSCALER_APP

PERIOD_S = 1.0
"""Seconds from the beginning of one turn to that of the next."""
STOP_S = 5.0

log = logging.getLogger("penstock.autoscale")


class Autoscaler:
    """The Serve deployment that runs the loop."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, pools: tuple[ScaledPool, ...], journal: str | None, budget_gpus: int | None
    ) -> None:
        logs.configure()
        url = redis_url("autoscaler")
        if url is None:
            raise ConfigError(f"{REDIS_URL} is not set: the autoscaler learns the load through Redis")
        self._client = connect(url)
        actuator = ServeActuator({pool.name: pool.app_name for pool in pools})
        name = f"autoscaler-{uuid.uuid4().hex[:8]}"
        scaler = Scaler(
            name,
            pools,
            Reports(self._client),
            actuator,
            Journal(None if journal is None else Path(journal)),
            budget_gpus=budget_gpus,
            records=RedisRecords(self._client),
        )
        self._main = asyncio.create_task(run(scaler), name="autoscaler")
        log.info("autoscaler ready", extra={"pools": [pool.name for pool in pools]})

    async def check_health(self) -> None:
        """Raise if the autoscaler's loop has ended. Serve replaces an autoscaler whose check fails repeatedly."""
        if self._main.done():
            raise PenstockError("The autoscaler's loop has ended; its log has the cause.")

    async def __del__(self) -> None:
        self._main.cancel()
        await asyncio.wait([self._main], timeout=STOP_S)
        try:
            await self._client.aclose()
        except (RedisError, OSError) as error:
            log.info("Redis was gone before", extra={"error": type(error).__name__})


async def run(scaler: Scaler, period_s: float = PERIOD_S) -> None:
    """Takes a turn each period until cancelled, whatever a turn raises."""
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        try:
            await scaler.reconcile()
        except Exception:  # the top: one turn that fails must not be the last
            log.exception("turn failed")
        await asyncio.sleep(max(0.0, began + period_s - loop.time()))


def autoscaler_app(
    pools: Sequence[ScaledPool], journal: str | None, budget_gpus: int | None = None
) -> serve.Application:
    """The Serve application of the autoscaler, to be run as AUTOSCALER_APP with `route_prefix=None`. journal: path of
    the event log. budget_gpus: GPUs of all pools together."""
    deployment = serve.deployment(**serve_options(AUTOSCALER_APP, 2 * STOP_S))
    application: serve.Application = deployment(Autoscaler).bind(tuple(pools), journal, budget_gpus)
    return application
