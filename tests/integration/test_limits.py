"""Limits and usage in a real Redis: the script against the pure arithmetic, many gateways at once, and Redis going
away."""

import asyncio
import itertools
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.tenancy.limit_script import LimitScript
from penstock.tenancy.limits import TIMEOUT_S, Limiter
from penstock.tenancy.tenants import Limits
from penstock.tenancy.usage import UsageLog, Used, day_name, read_usage
from penstock.tenancy.window import LimitLedger, LimitRequest, Settled, UnsettledUsage, Verdict, Window
from penstock.wire.errors import Overloaded
from tests.real_time import real_time

WINDOW = Window(bucket_ms=10_000, num_buckets=6, lease_ms=200_000)
"""Window of most tests, so wide that no key of a test expires in Redis meanwhile."""
SHORT_S = 0.5
"""Length of a window that ends within a test."""
TENANTS = itertools.count()
START_MS = 1_700_000_000_003
LIMITS = Limits(requests_per_minute=5, tokens_per_minute=100, max_parallel=3)

NAMES = st.sampled_from([f"r{number}" for number in range(12)])
AMOUNTS = st.integers(0, 60)
REQUESTS = st.builds(
    LimitRequest,
    settled=st.lists(st.builds(Settled, NAMES, AMOUNTS), max_size=2),
    unsettled=st.lists(
        st.builds(UnsettledUsage, NAMES, st.integers(0, 90_000), st.just(1), AMOUNTS, st.just(True), st.integers(0, 3))
        | st.builds(UnsettledUsage, st.just(""), st.integers(0, 90_000), st.integers(1, 3), AMOUNTS, st.just(False)),
        max_size=2,
    ),
    renewed=st.lists(NAMES, max_size=2),
    id=st.none() | NAMES,
    tokens=st.integers(0, 120),
    sequences=st.integers(0, 3),
    limits=st.sampled_from([LIMITS, Limits(tokens_per_minute=60), Limits(max_parallel=1), Limits()]),
)


@contextmanager
def running_redis(data: Path) -> Iterator[EmbeddedRedis]:
    sockets = Path(tempfile.mkdtemp(prefix="penstock-test-"))
    server = EmbeddedRedis(executable=find_executable(), data_dir=data, socket_dir=sockets)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        sockets.rmdir()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


def new_tenant() -> str:
    return f"tenant-{next(TENANTS)}"


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the condition holds: what happens is in another process, or behind a batch."""
    async with asyncio.timeout(30):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def gateway(client: redis.asyncio.Redis, name: str, window: Window) -> AsyncIterator[Limiter]:
    """A limiter that is counted as a gateway."""
    limiter = Limiter(client, name, window)
    task = asyncio.create_task(limiter.run())
    try:
        await until(lambda: asyncio.sleep(0, limiter.num_gateways is not None))
        yield limiter
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@given(st.lists(st.tuples(st.integers(0, 40_000), REQUESTS), max_size=25))
@settings(max_examples=60, deadline=None)
def test_the_script_does_what_the_arithmetic_says(url: str, steps: list[tuple[int, LimitRequest]]) -> None:
    async def main() -> None:
        async with connect(url) as client:
            tenant = new_tenant()
            script, ledger, now_ms = LimitScript(client, WINDOW), LimitLedger(WINDOW), START_MS
            for pause_ms, request in steps:
                now_ms += pause_ms
                request = msgspec.structs.replace(request, now_ms=now_ms)

                assert await script.apply(tenant, request) == ledger.apply(request, now_ms)

    asyncio.run(main())


async def test_of_many_at_once_exactly_as_many_are_admitted_as_fit(url: str) -> None:
    async with connect(url) as client, gateway(client, "one", WINDOW) as one, gateway(client, "two", WINDOW) as two:
        tenant, limits = new_tenant(), Limits(tokens_per_minute=1000)
        verdicts = await asyncio.gather(
            *((one, two)[number % 2].reserve(tenant, limits, f"r{number}", 90) for number in range(50))
        )

        assert sum(verdict.is_admitted for verdict in verdicts) == 11
        refused = [verdict for verdict in verdicts if not verdict.is_admitted]
        assert {verdict.limit for verdict in refused} == {"tokens"}
        assert all(verdict.tokens == 990 for verdict in refused)
        # a bucket's length less where the charges lie in the bucket before
        assert all(50_000 < (verdict.wait_ms or 0) <= 70_000 for verdict in refused)


@real_time
async def test_a_burst_beyond_all_connections_is_not_taken_for_an_outage(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(url) as client, gateway(client, "one", WINDOW) as limiter:
        tenant, limits = new_tenant(), Limits(requests_per_minute=1000)
        verdicts = await asyncio.gather(*(limiter.reserve(tenant, limits, f"r{number}", 1) for number in range(2000)))

        assert sum(verdict.is_admitted for verdict in verdicts) == 1000
    assert "limits_alone" not in caplog.text


async def test_a_gateway_that_stood_still_itself_does_not_decide_alone(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(url) as client, gateway(client, "one", WINDOW) as limiter:
        tenant, limits = new_tenant(), Limits(max_parallel=1)
        assert (await limiter.reserve(tenant, limits, "first", 1)).is_admitted
        apply = limiter._script.apply

        async def apply_and_stand_still(tenant_id: str, request: LimitRequest) -> Verdict:
            asyncio.get_running_loop().call_soon(time.sleep, TIMEOUT_S + 0.3)
            return await apply(tenant_id, request)

        monkeypatch.setattr(limiter._script, "apply", apply_and_stand_still)
        refused = await limiter.reserve(tenant, limits, "second", 1)

    assert refused.limit == "parallel"
    assert "limits_alone" not in caplog.text


async def use_up(url: str, limit: int, tokens: int, used: int) -> list[tuple[float, float]]:
    """Begin and end of the admissions of two gateways, of requests for so many tokens that use fewer, in the time of
    four windows of SHORT_S."""
    window = Window(bucket_ms=50, num_buckets=10, lease_ms=5000)
    spans: list[tuple[float, float]] = []
    until = 0.0

    async def reserve_until_the_end(limiter: Limiter, tenant: str, name: str) -> None:
        for number in itertools.count():
            begun = time.monotonic()
            if begun > until:
                return
            verdict = await limiter.reserve(tenant, Limits(tokens_per_minute=limit), f"{name}-{number}", tokens)
            if verdict.is_admitted:
                spans.append((begun, time.monotonic()))
                limiter.settle(tenant, f"{name}-{number}", used)
            await asyncio.sleep(0.01)

    tenant = new_tenant()
    async with connect(url) as client, gateway(client, "one", window) as one, gateway(client, "two", window) as two:
        until = time.monotonic() + 4 * SHORT_S
        await asyncio.gather(
            *(reserve_until_the_end((one, two)[number % 2], tenant, f"c{number}") for number in range(20))
        )
    return sorted(spans)


async def test_two_gateways_never_exceed_a_limit_in_any_window(url: str, caplog: pytest.LogCaptureFixture) -> None:
    spans = await use_up(url, limit=400, tokens=30, used=20)

    # a machine so busy that Redis does not answer within half a second: each gateway decides alone, by its share
    most = 800 if "limits_alone" in caplog.text else 400
    for begun, _ in spans:
        inside = [span for span in spans if span[0] >= begun and span[1] <= begun + SHORT_S]
        assert 20 * len(inside) <= most


@real_time
async def test_what_is_not_used_of_a_limit_is_given_to_others_window_after_window(url: str) -> None:
    spans = await use_up(url, limit=400, tokens=30, used=20)

    assert 20 * len(spans) >= 2.5 * 400


async def test_a_request_at_the_same_gateway_finds_what_the_one_before_it_gave_back(url: str) -> None:
    async with connect(url) as client, gateway(client, "one", WINDOW) as limiter:
        tenant, limits = new_tenant(), Limits(max_parallel=1, tokens_per_minute=100)
        for number in range(20):
            assert (await limiter.reserve(tenant, limits, f"r{number}", 80)).is_admitted
            limiter.settle(tenant, f"r{number}", 1)


async def test_a_caller_that_leaves_while_it_asks_holds_nothing(url: str) -> None:
    async with connect(url) as client, gateway(client, "one", WINDOW) as limiter:
        tenant, limits = new_tenant(), Limits(max_parallel=1)
        leaving = asyncio.create_task(limiter.reserve(tenant, limits, "a", 80))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

        async def is_admitted() -> bool:
            return (await limiter.reserve(tenant, limits, "b", 80)).is_admitted

        await until(is_admitted)


async def test_a_dead_gateways_requests_stop_counting_as_running_when_their_lease_is_over(url: str) -> None:
    window = Window(bucket_ms=100, num_buckets=200, lease_ms=300)
    tenant, limits = new_tenant(), Limits(max_parallel=1, tokens_per_minute=100)
    async with connect(url) as client:
        script = LimitScript(client, window)
        begun = time.monotonic()
        assert (await script.apply(tenant, LimitRequest(id="dead", tokens=60, limits=limits))).is_admitted
        async with gateway(client, "one", window) as limiter:

            async def is_admitted() -> bool:
                return (await limiter.reserve(tenant, limits, "next", 40)).is_admitted

            await until(is_admitted)
            assert time.monotonic() - begun > 0.2
            assert (await limiter.reserve(tenant, Limits(tokens_per_minute=100), "more", 1)).limit == "tokens", (
                "but all it reserved stays charged"
            )


async def test_while_redis_is_away_one_gateway_goes_on_within_the_limit_and_charges_it_afterwards(
    tmp_path: Path,
) -> None:
    limits = Limits(tokens_per_minute=100)
    with running_redis(tmp_path) as server:
        async with connect(server.url) as client, gateway(client, "one", WINDOW) as limiter:
            assert (await limiter.reserve("acme", limits, "before", 40)).is_admitted
            assert server.pid is not None
            os.kill(server.pid, signal.SIGSTOP)  # away, and not coming back by itself
            try:
                meanwhile = await limiter.reserve("acme", limits, "meanwhile", 50)
                refused = await limiter.reserve("acme", limits, "too much", 20)
            finally:
                os.kill(server.pid, signal.SIGCONT)
            limiter.settle("acme", "meanwhile", 30)

            assert meanwhile.is_admitted
            assert (refused.is_admitted, refused.limit, refused.tokens) == (False, "tokens", 90)
            script = LimitScript(client, WINDOW)

            async def is_charged() -> bool:
                status = await script.apply("acme", LimitRequest(limits=Limits(max_parallel=9)))
                # the request that Redis did not answer may count twice as a request, its tokens count once
                return (status.parallel, status.tokens) == (1, 70) and status.requests >= 2

            await until(is_charged)


async def test_while_redis_is_away_each_of_two_gateways_has_half_of_the_limit(tmp_path: Path) -> None:
    limits = Limits(requests_per_minute=5)
    with running_redis(tmp_path) as server:
        async with (
            connect(server.url) as client,
            gateway(client, "one", WINDOW),
            gateway(client, "two", WINDOW) as two,
        ):
            assert two.num_gateways == 2
            server.stop()
            verdicts = [await two.reserve("acme", limits, f"r{number}", 1) for number in range(5)]

            assert [verdict.is_admitted for verdict in verdicts] == [True, True, False, False, False]


async def test_a_gateway_that_never_met_redis_refuses_rather_than_guess(tmp_path: Path) -> None:
    async with connect(f"unix://{tmp_path}/nobody.sock") as client:
        limiter = Limiter(client, "one", WINDOW)
        for _ in range(2):
            with pytest.raises(Overloaded):
                await limiter.reserve("acme", Limits(requests_per_minute=5), "a", 1)


async def test_usage_is_counted_once_whatever_gets_lost_and_kept_while_redis_is_away(tmp_path: Path) -> None:
    now = [20_000 * 86400.0]

    with running_redis(tmp_path) as server:
        async with connect(server.url) as client:
            usage = UsageLog(client, "one", now=lambda: now[0])
            usage.add("acme", "demo", "", Used(1, 10, 0, 5))
            usage.add("acme", "demo", "", Used(1, 10, 8, 7))
            usage.add("acme", "demo", "lora", Used(1, 1, 0, 1))
            usage.add("other", "demo", "", Used(1, 2, 0, 3))
            assert await usage.flush()

            assert server.pid is not None
            os.kill(server.pid, signal.SIGSTOP)
            usage.add("acme", "demo", "", Used(1, 100, 0, 50))
            assert not await usage.flush()  # Redis has it in its socket, and will do it; nobody knows
            now[0] += 86400
            usage.add("acme", "demo", "", Used(1, 1000, 0, 500))
            os.kill(server.pid, signal.SIGCONT)
            await until(usage.flush)

            rows = await read_usage(client, "acme", [day_name(20_000), day_name(20_001)])
            assert [(row.day, row.model, row.adapter, tuple(row.used)) for row in rows] == [
                ("2024-10-04", "demo", "", (3, 120, 8, 62, 0, 0)),
                ("2024-10-04", "demo", "lora", (1, 1, 0, 1, 0, 0)),
                ("2024-10-05", "demo", "", (1, 1000, 0, 500, 0, 0)),
            ]
            assert [tuple(row.used) for row in await read_usage(client, "other", [day_name(20_000)])] == [
                (1, 2, 0, 3, 0, 0)
            ]
