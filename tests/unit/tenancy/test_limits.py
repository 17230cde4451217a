"""A limiter and a played Redis that lets a test choose when it answers, and in what order. The script itself:
tests/integration/test_limits."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from redis.exceptions import ResponseError

from penstock.tenancy import limits
from penstock.tenancy.limits import MAX_TOKENS, Limiter
from penstock.tenancy.tenants import Limits, tenant_key
from penstock.tenancy.window import LIMIT_NAMES, LimitLedger, LimitRequest, Verdict, Window

WINDOW = Window(bucket_ms=1000, num_buckets=60, lease_ms=15_000)
DUE_MS = WINDOW.lease_ms // 3
ONE = Limits(max_parallel=1)
TENANT = "acme"


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The played Redis has as long for an answer as a slow machine needs."""
    monkeypatch.setattr(limits, "TIMEOUT_S", 30.0)


class PlayedRedis:
    """Applies each request when `before` has returned."""

    def __init__(self) -> None:
        self.ledgers: dict[str, LimitLedger] = {}
        self.now_ms = 1_000_000
        self.requests: list[LimitRequest] = []
        self.before: Callable[[LimitRequest], Awaitable[None]] | None = None

    @property
    def status(self) -> Verdict:
        """What Redis counts of TENANT."""
        return self.ledgers[tenant_key(TENANT, "limits:requests")].apply(
            LimitRequest(limits=Limits(max_parallel=10**6)), self.now_ms
        )

    def register_script(self, text: str) -> Callable[..., Awaitable[Any]]:
        return self._present if "ZCARD" in text else self._apply

    async def _present(self, keys: Sequence[str], args: Sequence[object]) -> int:
        return 1

    async def _apply(self, keys: Sequence[str], args: Sequence[bytes]) -> list[int]:
        request = msgspec.json.decode(args[0], type=LimitRequest)
        if self.before is not None:
            await self.before(request)
        numbers = [
            request.tokens,
            *(settled.used_tokens for settled in request.settled),
            *(usage.tokens for usage in request.unsettled),
        ]
        if any(not 0 <= number <= 2**53 for number in numbers):
            raise ResponseError("ERR value is not an integer or out of range")
        self.requests.append(request)
        is_admitted, limit, wait_ms, *rest = self.ledgers.setdefault(keys[0], LimitLedger(WINDOW)).apply(
            request, self.now_ms
        )
        return [
            int(is_admitted),
            LIMIT_NAMES.index(limit) + 1 if limit else 0,
            -1 if wait_ms is None else wait_ms,
            *rest,
        ]


@asynccontextmanager
async def running(limiter: Limiter) -> AsyncIterator[None]:
    task = asyncio.create_task(limiter.run())
    try:
        async with asyncio.timeout(10):
            yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (the limiter tells Redis when it is its time)
        await asyncio.sleep(0.001)


def made() -> tuple[PlayedRedis, Limiter]:
    store = PlayedRedis()
    client: Any = store
    return store, Limiter(client, "one", WINDOW, now_ms=lambda: store.now_ms)


async def test_what_ends_while_its_renewal_is_under_way_is_not_held_again() -> None:
    store, limiter = made()
    is_renewing, may_renew = asyncio.Event(), asyncio.Event()

    async def renewals_come_late(request: LimitRequest) -> None:
        if request.renewed:
            is_renewing.set()
            await may_renew.wait()

    store.before = renewals_come_late
    assert (await limiter.reserve(TENANT, ONE, "first", 10)).is_admitted
    store.now_ms += DUE_MS
    async with running(limiter):
        await is_renewing.wait()
        limiter.settle(TENANT, "first", 7)
        assert (await limiter.reserve(TENANT, ONE, "second", 10)).is_admitted
        limiter.settle(TENANT, "second", 5)
        may_renew.set()
        await until(lambda: any(request.renewed for request in store.requests))
        await until(lambda: store.status.parallel == 0)

        assert store.status.tokens == 12


async def test_a_tenant_that_comes_back_just_when_it_is_forgotten_is_settled_as_any() -> None:
    store, limiter = made()
    await limiter.reserve(TENANT, ONE, "long ago", 10)
    limiter.settle(TENANT, "long ago", 1)
    await limiter.reserve("another", ONE, "running", 1)
    async with running(limiter):
        await until(lambda: store.status.parallel == 0)
        is_asked, may_answer = asyncio.Event(), asyncio.Event()

        async def hold(request: LimitRequest) -> None:
            if request.id is not None:
                is_asked.set()
                await may_answer.wait()

        store.before = hold
        store.now_ms += 2 * 61_000
        reserving = asyncio.create_task(limiter.reserve(TENANT, ONE, "back", 10))
        await is_asked.wait()
        limiter.settle("another", "running", 0)
        await until(
            lambda: any(settled.id == "running" for request in store.requests for settled in request.settled)
        )  # it has looked at all accounts
        may_answer.set()
        assert (await reserving).is_admitted
        limiter.settle(TENANT, "back", 3)
        await until(lambda: store.status.parallel == 0)

        assert store.status.tokens == 3


@pytest.mark.parametrize(("used", "counted"), [(-5, 0), (10**30, MAX_TOKENS)])
async def test_an_impossible_count_is_bounded_and_does_not_stop_what_is_told_with_it(used: int, counted: int) -> None:
    store, limiter = made()
    async with running(limiter):
        assert (await limiter.reserve(TENANT, ONE, "r", 10**30)).is_admitted
        limiter.settle(TENANT, "r", used)
        await until(lambda: store.status.parallel == 0)

        assert store.status.tokens == counted
