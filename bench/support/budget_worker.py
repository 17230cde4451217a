"""One gateway's limiter, with clients that spend a budget until it is spent; run as a process by `bench.budgets`.

    python -m bench.support.budget_worker SETTINGS

SETTINGS is JSON, a `Settings`. It prints "ready" when Redis has counted the gateways, waits for a line, and writes what
was charged to its file, line by line, so that nothing is missing of a process that is killed.
"""

import asyncio
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from penstock.base.redis import connect
from penstock.tenancy.limits import Limiter
from penstock.tenancy.tenants import Limits
from penstock.tenancy.window import PARALLEL_WAIT_MS, Window
from penstock.wire.errors import Overloaded
from penstock.wire.money import NANO


class Settings(msgspec.Struct, frozen=True):
    """What one process does."""

    redis_url: str
    name: str
    """Id of the gateway."""
    num_gateways: int
    """Gateways to wait for."""
    num_clients: int
    budget_nano: int
    most_nano: int
    """Most that a request comes to."""
    lease_ms: int
    seconds: float
    """Longest time."""
    path: str
    """File of the charges."""


class Charged(msgspec.Struct, frozen=True):
    """A request that is over."""

    at_s: float
    """Time of the machine's monotonic clock."""
    nano: int


TENANT = "acme"
RETRY_S = 0.1
HOLD_S = 0.3
"""Longest time between the admission of a request and its settling."""


async def _spend(limiter: Limiter, settings: Settings, name: str, until_s: float, out: BinaryIO) -> None:
    rng, limits, number = random.Random(name), Limits(budget=settings.budget_nano / NANO), 0
    while time.monotonic() < until_s:
        number += 1
        request_id, most = f"{name}-{number}", rng.randint(settings.most_nano // 2, settings.most_nano)
        try:
            verdict = await limiter.reserve(TENANT, limits, request_id, 1, 1, most)
        except Overloaded:  # Redis is away, and what was set aside is spent
            await asyncio.sleep(RETRY_S)
            continue
        if verdict.is_admitted:
            await asyncio.sleep(rng.uniform(0.0, HOLD_S))
            charged = rng.randint(most // 2, most)
            limiter.settle(TENANT, request_id, 1, charged)
            out.write(msgspec.json.encode(Charged(time.monotonic(), charged)) + b"\n")
        elif (verdict.wait_ms or 0) > PARALLEL_WAIT_MS:
            return
        else:
            await asyncio.sleep(rng.uniform(0.0, 2 * RETRY_S))


async def _run(settings: Settings, out: BinaryIO) -> None:
    async with connect(settings.redis_url) as client:
        limiter = Limiter(client, settings.name, Window(lease_ms=settings.lease_ms))
        running = asyncio.create_task(limiter.run())
        while (limiter.num_gateways or 0) < settings.num_gateways:  # noqa: ASYNC110 (others register in Redis)
            await asyncio.sleep(0.05)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        until_s = time.monotonic() + settings.seconds
        await asyncio.gather(
            *(
                _spend(limiter, settings, f"{settings.name}-{number}", until_s, out)
                for number in range(settings.num_clients)
            )
        )
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    with Path(settings.path).open("wb", buffering=0) as out:
        asyncio.run(_run(settings, out))


if __name__ == "__main__":
    main()
