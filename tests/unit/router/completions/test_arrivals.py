"""Each request counts once, right after its key is known, whatever becomes of it."""

import asyncio
from typing import cast

import pytest

from penstock.base.metrics import Metrics
from penstock.router.completions.admission import MAX_KNOWN_S, Admission
from penstock.router.completions.arrivals import Arrivals
from penstock.tenancy.limits import Limiter
from penstock.tenancy.tenants import Limits, Settings, Tenant
from penstock.tenancy.usage import UsageLog
from penstock.tenancy.window import Verdict
from penstock.wire.errors import Overloaded, RateLimited
from tests.unit.router.http_fakes import World, running_gateway

THREE = Limits(requests_per_minute=3)
TENANT = Tenant("tenant-1", b"salt", limits=THREE)


class FakeLimiter:
    """Counts requests, and admits what the limit allows. `is_away`: nobody can count."""

    def __init__(self) -> None:
        self.reserved: list[str] = []
        self.sequences: list[int] = []
        self.num_asked = 0
        self.is_away = False

    async def reserve(
        self, tenant_id: str, limits: Limits, request_id: str, tokens: int, sequences: int = 1, nano: int = 0
    ) -> Verdict:
        self.num_asked += 1
        self.sequences.append(sequences)
        if self.is_away:
            raise Overloaded("the limits of this tenant can't be checked at the moment")
        assert limits.requests_per_minute is not None
        if len(self.reserved) >= limits.requests_per_minute:
            return Verdict(False, "requests", 30_000, len(self.reserved), reset_requests_ms=60_000)
        self.reserved.append(request_id)
        return Verdict(True, requests=len(self.reserved))

    def settle(self, tenant_id: str, request_id: str, used_tokens: int, charged_nano: int = 0) -> None:
        """The request is over."""


class Desk:
    """Arrivals over a fake limiter, and the clock of both."""

    def __init__(self) -> None:
        self.limiter = FakeLimiter()
        self.now = 100.0
        self.admission = Admission(cast(Limiter, self.limiter), cast(UsageLog, None), Metrics(), clock=lambda: self.now)
        self.arrivals = Arrivals(self.admission)

    async def fail(self, request_id: str, tenant: Tenant = TENANT) -> None:
        self.arrivals.begin(tenant, request_id)
        try:
            await self.arrivals.charge(tenant, request_id)
        finally:
            self.arrivals.end(tenant, request_id)


async def test_a_failure_is_charged_once_and_a_request_that_was_admitted_is_not() -> None:
    desk = Desk()

    await desk.fail("bad")
    desk.arrivals.begin(TENANT, "good")
    await desk.admission.admit("tenant-1", THREE, "good", [])
    assert desk.arrivals.end(TENANT, "good")
    await desk.arrivals.charge(TENANT, "good")  # it failed later
    await desk.arrivals.charge(TENANT, "bad")

    assert desk.limiter.reserved == ["bad", "good"]


async def test_a_limit_that_was_just_reached_refuses_without_asking_anybody_and_for_a_moment_only() -> None:
    desk = Desk()
    for number in range(3):
        await desk.fail(f"bad-{number}")
    with pytest.raises(RateLimited) as first:
        await desk.fail("bad-3")
    asked = desk.limiter.num_asked

    desk.now += MAX_KNOWN_S / 2
    with pytest.raises(RateLimited) as again:
        await desk.fail("bad-4")
    assert desk.limiter.num_asked == asked
    assert first.value.retry_after_s is not None
    assert again.value.retry_after_s is not None
    assert 30.0 <= first.value.retry_after_s <= 30.0 * 5 / 4
    assert 29.5 <= again.value.retry_after_s <= 29.5 * 5 / 4
    assert dict(again.value.headers)[b"x-ratelimit-reset-requests"] == b"59.5s"

    desk.now += MAX_KNOWN_S
    with pytest.raises(RateLimited):
        await desk.fail("bad-5")
    assert desk.limiter.num_asked == asked + 1


async def test_reads_beyond_a_limit_that_was_just_reached_ask_nobody_either() -> None:
    desk = Desk()
    for number in range(3):
        await desk.admission.charge("tenant-1", THREE, f"read-{number}")
    for number in range(5):
        with pytest.raises(RateLimited):
            await desk.admission.charge("tenant-1", THREE, f"late-{number}")

    assert desk.limiter.num_asked == 4


async def test_what_generates_nothing_is_none_of_the_sequences_at_once() -> None:
    desk = Desk()
    await desk.admission.charge("tenant-1", THREE, "read")

    assert desk.limiter.sequences == [0]


async def test_a_limit_that_was_raised_meanwhile_counts_at_once() -> None:
    desk = Desk()
    for number in range(3):
        await desk.fail(f"bad-{number}")
    with pytest.raises(RateLimited):
        await desk.fail("bad-3")

    await desk.fail("bad-4", Tenant("tenant-1", b"salt", limits=Limits(requests_per_minute=10)))

    assert desk.limiter.reserved[-1] == "bad-4"


async def test_no_more_are_undecided_than_the_limit_allows_in_a_minute() -> None:
    desk = Desk()
    for number in range(3):
        desk.arrivals.begin(TENANT, f"r-{number}")

    with pytest.raises(RateLimited) as caught:
        desk.arrivals.begin(TENANT, "r-3")
    assert caught.value.retry_after_s == 1.0
    assert not desk.arrivals.end(TENANT, "r-3"), "it never counted"
    desk.arrivals.begin(Tenant("tenant-2", b"salt", limits=THREE), "other")
    desk.arrivals.end(TENANT, "r-0")
    desk.arrivals.begin(TENANT, "r-3")

    assert desk.limiter.num_asked == 0


async def test_without_redis_a_failure_stays_the_failure_that_it_is() -> None:
    desk = Desk()
    desk.limiter.is_away = True

    await desk.fail("bad")

    assert desk.limiter.num_asked == 1


async def test_who_has_no_limit_of_requests_is_not_looked_at() -> None:
    desk = Desk()
    for limits in (None, Limits(tokens_per_minute=5)):
        for number in range(10):
            await desk.fail(f"bad-{number}", Tenant("tenant-1", b"salt", limits=limits))

    assert desk.limiter.num_asked == 0


# --- through the HTTP surface; Redis is nowhere, so the gateway counts by itself


async def statuses(world: World, *bodies: bytes) -> list[int]:
    return [(await world.client.post("/v1/chat/completions", content=body)).status_code for body in bodies]


async def test_what_ends_in_400_404_or_413_costs_its_sender_a_request() -> None:
    async with running_gateway(settings=Settings(limits=THREE), num_gateways=1) as world:
        found = await statuses(
            world,
            b"{",
            b'{"model": "nothing", "messages": [{"role": "user", "content": "Hi"}]}',
            b" " * (9 * 2**20),
            b"{",
        )
        good = await world.chat()

        assert found == [400, 404, 413, 429]
        assert good.status_code == 429
        assert 0 < int(good.headers["retry-after"]) <= 61 * 5 / 4 + 1, "a minute, and up to a quarter"
        assert good.headers["x-ratelimit-remaining-requests"] == "0"
        assert world.dispatcher.generations == []


async def test_what_is_answered_counts_once_and_above_the_limit_no_body_is_read() -> None:
    async with running_gateway(settings=Settings(limits=THREE), num_gateways=1) as world:
        answered = [(await world.chat()).status_code for _ in range(4)]
        unread = await statuses(world, b"{")

        assert answered == [200, 200, 200, 429]
        assert unread == [429], "it is not even found to be malformed"


async def test_of_many_failures_at_once_no_more_are_answered_than_the_limit_allows() -> None:
    async with running_gateway(settings=Settings(limits=THREE), num_gateways=1) as world:
        found = await asyncio.gather(*(statuses(world, b"{") for _ in range(20)))

        assert sorted(status for (status,) in found) == [400] * 3 + [429] * 17
