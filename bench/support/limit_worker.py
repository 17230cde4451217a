"""One gateway's limiter, with clients that ask it for tokens without a pause; run as a process by `bench.limits`.

    python -m bench.support.limit_worker SETTINGS

SETTINGS is JSON, a `Settings`. It prints "ready" when Redis has counted the gateways, waits for a line, and writes what
was admitted and what was settled to its file, line by line, so that nothing is missing of a process that is killed.
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
from penstock.tenancy.window import Window


class Settings(msgspec.Struct, frozen=True):
    """What one process does."""

    redis_url: str
    name: str
    """Id of the gateway."""
    num_gateways: int
    """Gateways to wait for."""
    num_clients: int
    tokens_per_window: int
    bucket_ms: int
    num_buckets: int
    seconds: float
    path: str
    """File of the events."""


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A request that was let in. Times of the machine's monotonic clock, seconds."""

    id: str
    begun_s: float
    ended_s: float
    """Time at which the limiter's answer was there."""
    reserved: int
    used: int
    """Tokens that it will have used when it is settled."""


class Settled(msgspec.Struct, frozen=True, tag=True):
    """A request that is over."""

    id: str


Event = Admitted | Settled
TENANT = "acme"
RETRY_S = 0.15
"""Pause of a refused client, on average; the more patient they are, the later what has left the window is found."""
HOLD_S = 0.3
"""Longest time between the admission of a request and its settling."""


async def _ask(limiter: Limiter, settings: Settings, name: str, until_s: float, out: BinaryIO) -> None:
    rng, limits = random.Random(name), Limits(tokens_per_minute=settings.tokens_per_window)
    number = 0
    while time.monotonic() < until_s:
        number += 1
        request_id, reserved = f"{name}-{number}", rng.randint(20, 60)
        begun_s = time.monotonic()
        verdict = await limiter.reserve(TENANT, limits, request_id, reserved)
        if verdict.is_admitted:
            used = rng.randint(reserved // 2, reserved)
            _write(out, Admitted(request_id, begun_s, time.monotonic(), reserved, used))
            await asyncio.sleep(rng.uniform(0.0, HOLD_S))
            limiter.settle(TENANT, request_id, used)
            _write(out, Settled(request_id))
        else:
            await asyncio.sleep(rng.uniform(0.0, 2 * RETRY_S))


def _write(out: BinaryIO, event: Event) -> None:
    out.write(msgspec.json.encode(event) + b"\n")


async def _run(settings: Settings, out: BinaryIO) -> None:
    window = Window(settings.bucket_ms, settings.num_buckets)
    async with connect(settings.redis_url) as client:
        limiter = Limiter(client, settings.name, window)
        running = asyncio.create_task(limiter.run())
        while (limiter.num_gateways or 0) < settings.num_gateways:  # noqa: ASYNC110 (others register in Redis)
            await asyncio.sleep(0.05)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        until_s = time.monotonic() + settings.seconds
        await asyncio.gather(
            *(
                _ask(limiter, settings, f"{settings.name}-{number}", until_s, out)
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
