"""Budgets in a real Redis: the script against a model, many gateways at once, gateways that die, Redis going away."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.budgets import run_ledger
from penstock.base.metrics import Metrics
from penstock.base.redis import connect
from penstock.router.completions.admission import Admission
from penstock.tenancy.charges import ASIDE_LEASES, Aside, BudgetRequest, RenewedCharge, SettledCharge, UnsettledCharge
from penstock.tenancy.limit_script import LimitScript
from penstock.tenancy.limits import Limiter
from penstock.tenancy.tariffs import MAX_NANO
from penstock.tenancy.tenants import Limits
from penstock.tenancy.usage import UsageLog, Used, last_days, read_usage
from penstock.tenancy.window import PARALLEL_WAIT_MS, LimitRequest, Settled, Verdict, Window
from penstock.wire.errors import Overloaded
from penstock.wire.money import NANO
from tests.integration.budget_model import BudgetModel, next_month_ms
from tests.integration.test_limits import gateway, running_redis, until

WINDOW = Window(bucket_ms=10_000, num_buckets=6, lease_ms=200_000)
SHORT = Window(bucket_ms=500, num_buckets=20, lease_ms=3000)
"""Window of the tests that wait for leases."""
TENANTS = itertools.count()
DAY_MS = 86_400_000
NAMES = st.sampled_from([f"r{number}" for number in range(8)])
NANO_SUMS = st.integers(0, 60) | st.sampled_from([MAX_NANO, MAX_NANO - 1, 2**31, 7 * 10**9])
LIMITS = st.none() | st.sampled_from(["100", "5", "9007199254740993", "4000000000000000000", "9007199254740991"])
BUDGETS = st.builds(
    BudgetRequest,
    settled=st.lists(st.builds(SettledCharge, NAMES, NANO_SUMS), max_size=2),
    aside=st.none() | st.builds(Aside, st.sampled_from(["aside:one", "aside:two"]), NANO_SUMS),
    unsettled=st.lists(
        st.builds(UnsettledCharge, NAMES, st.integers(0, 3_000_000), NANO_SUMS, NANO_SUMS, *[st.booleans()] * 2),
        max_size=2,
        unique_by=lambda usage: usage.id,
    ),
    renewed=st.lists(st.builds(RenewedCharge, NAMES, NANO_SUMS, NANO_SUMS, st.booleans()), max_size=2),
    nano=NANO_SUMS,
    is_full=st.booleans(),
    limit=LIMITS,
)
PAUSES_MS = st.integers(0, 40_000) | st.sampled_from([70_000, 150_000, 250_000, 700_000, 3_700_000, 20 * DAY_MS])
STARTS_MS = st.sampled_from(
    [
        int(datetime.fromisoformat(f"{start}+00:00").timestamp() * 1000)
        for start in ("2026-11-30T23:59:50", "2027-12-31T23:59:59", "2028-02-28T23:00:00", "2100-02-28T12:00:00")
    ]
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


def new_tenant() -> str:
    return f"budgeted-{next(TENANTS)}"


def this_month() -> str:
    return datetime.now(UTC).strftime("%Y-%m")


@given(STARTS_MS, st.lists(st.tuples(PAUSES_MS, st.none() | NAMES, BUDGETS), max_size=25))
@settings(max_examples=40, deadline=None)
def test_the_script_does_what_the_model_says(
    url: str, start_ms: int, steps: list[tuple[int, str | None, BudgetRequest]]
) -> None:
    async def main() -> None:
        async with connect(url) as client:
            tenant, now_ms = new_tenant(), start_ms
            script, model = LimitScript(client, WINDOW), BudgetModel(WINDOW.lease_ms)
            for pause_ms, request_id, budget in steps:
                now_ms += pause_ms
                known = () if request_id is None else (Settled(request_id, 0),)  # to the limits, which keep no id then
                request = LimitRequest(settled=known, id=request_id, budget=budget, now_ms=now_ms)
                verdict = await script.apply(tenant, request)
                wait_ms, spent, aside = model.apply(budget, request_id, now_ms)

                assert (verdict.limit, verdict.wait_ms) == (("budget", wait_ms) if wait_ms else (None, 0))
                assert (verdict.spent_nano, verdict.aside_nano) == (spent, aside)

    asyncio.run(main())


async def test_what_is_set_aside_is_held_for_as_long_as_gateways_give_it_out(url: str) -> None:
    tenant, start_ms, ends_ms = new_tenant(), 1_800_000_000_000, ASIDE_LEASES * WINDOW.lease_ms
    async with connect(url) as client:
        script = LimitScript(client, WINDOW)

        async def spent_after(passed_ms: int, aside: Aside | None = None) -> int:
            budget = BudgetRequest(limit="1000", aside=aside)
            return (await script.apply(tenant, LimitRequest(budget=budget, now_ms=start_ms + passed_ms))).spent_nano

        assert await spent_after(0, Aside("aside:one", 100)) == 100
        for passed_ms in range(0, ends_ms, WINDOW.lease_ms // 4):  # others ask all the time
            assert await spent_after(passed_ms) == 100
        assert await spent_after(ends_ms - 1) == 100
        assert await spent_after(ends_ms) == 0


def budget_of(nano: int) -> Limits:
    """Limits with a budget of so many parts."""
    limits = Limits(budget=nano / NANO)
    assert limits.budget_nano == nano
    return limits


async def spent(limiter: Limiter, tenant: str) -> int:
    return await limiter.read_spent(tenant, this_month())


async def reserve(limiter: Limiter, tenant: str, limits: Limits, request_id: str, nano: int) -> Verdict:
    """The verdict of Redis: a slow machine may need more than one try."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await limiter.reserve(tenant, limits, request_id, 1, 1, nano)
            except Overloaded:
                await asyncio.sleep(0.1)


async def test_of_many_at_once_exactly_as_many_are_admitted_as_the_budget_holds(url: str) -> None:
    async with connect(url) as client, gateway(client, "one", WINDOW) as one, gateway(client, "two", WINDOW) as two:
        tenant, limits = new_tenant(), budget_of(1000)
        verdicts = await asyncio.gather(
            *(reserve((one, two)[number % 2], tenant, limits, f"r{number}", 90) for number in range(50))
        )

        assert sum(verdict.is_admitted for verdict in verdicts) == 11
        refused = [verdict for verdict in verdicts if not verdict.is_admitted]
        assert {(verdict.limit, verdict.wait_ms, verdict.spent_nano) for verdict in refused} == {
            ("budget", PARALLEL_WAIT_MS, 990)
        }
        for number, verdict in enumerate(verdicts):
            (one, two)[number % 2].settle(tenant, f"r{number}", 1, 80 if verdict.is_admitted else 0)

        async def is_settled() -> bool:
            return await spent(one, tenant) == 880

        await until(is_settled)
        assert (await reserve(two, tenant, limits, "more", 120)).is_admitted
        last = await reserve(one, tenant, limits, "last", 121)
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        assert last.wait_ms is not None
        assert abs(last.wait_ms - (next_month_ms(now_ms) - now_ms)) < 60_000, "all that is reserved would not suffice"


async def test_limits_and_budget_are_charged_both_or_neither(url: str) -> None:
    async with connect(url) as client, gateway(client, "one", WINDOW) as limiter:
        tenant, limits = new_tenant(), Limits(budget=100 / NANO, tokens_per_minute=50)
        by_budget = await limiter.reserve(tenant, limits, "a", 50, 1, 101)
        by_tokens = await limiter.reserve(tenant, limits, "b", 51, 1, 100)
        both = await limiter.reserve(tenant, limits, "c", 50, 1, 100)

        assert (by_budget.limit, by_budget.tokens, by_budget.spent_nano) == ("budget", 0, 0)
        assert (by_tokens.limit, by_tokens.tokens, by_tokens.spent_nano) == ("tokens", 0, 0)
        assert (both.is_admitted, both.tokens, both.spent_nano) == (True, 50, 100)


async def test_reads_between_take_no_budget_from_what_is_under_way(url: str) -> None:
    unused: Any = None
    async with connect(url) as client, gateway(client, "one", WINDOW) as limiter:
        tenant = new_tenant()
        limits = msgspec.structs.replace(budget_of(1000), requests_per_minute=1000)
        admission = Admission(limiter, unused, Metrics())
        asked = [asyncio.create_task(reserve(limiter, tenant, limits, f"r{number}", 90)) for number in range(20)]
        for number in range(40):
            await admission.charge(tenant, limits, f"read{number}")
        verdicts = await asyncio.gather(*asked)

        assert sum(verdict.is_admitted for verdict in verdicts) == 11
        for number, verdict in enumerate(verdicts):
            if verdict.is_admitted:
                limiter.settle(tenant, f"r{number}", 1, 80)

        async def is_settled() -> bool:
            return await spent(limiter, tenant) == 880

        await until(is_settled)


async def test_a_budget_lowered_below_what_is_spent_refuses_and_raised_again_it_admits(url: str) -> None:
    async with connect(url) as client, gateway(client, "one", WINDOW) as limiter:
        tenant = new_tenant()
        assert (await reserve(limiter, tenant, budget_of(100), "a", 60)).is_admitted
        limiter.settle(tenant, "a", 1, 60)
        lowered = await reserve(limiter, tenant, budget_of(50), "b", 1)
        free = await reserve(limiter, tenant, budget_of(50), "c", 0)
        raised = await reserve(limiter, tenant, budget_of(61), "d", 1)

        assert (lowered.limit, lowered.spent_nano) == ("budget", 60)
        assert (lowered.wait_ms or 0) > PARALLEL_WAIT_MS
        assert free.is_admitted, "what costs nothing is not kept away"
        assert (raised.is_admitted, raised.spent_nano) == (True, 61)


async def test_a_budget_taken_away_is_not_asked_and_what_runs_is_settled(url: str) -> None:
    async with connect(url) as client, gateway(client, "one", WINDOW) as limiter:
        tenant = new_tenant()
        assert (await reserve(limiter, tenant, budget_of(100), "a", 60)).is_admitted
        assert (await reserve(limiter, tenant, Limits(requests_per_minute=5), "b", 10**9)).is_admitted
        limiter.settle(tenant, "a", 1, 5)
        limiter.settle(tenant, "b", 1, 10**9)

        async def is_settled() -> bool:
            return await spent(limiter, tenant) == 5

        await until(is_settled)


async def test_what_a_dead_gateway_reserved_comes_back_but_for_what_it_was_charged(url: str) -> None:
    tenant, limits = new_tenant(), budget_of(100)
    async with connect(url) as client, gateway(client, "other", SHORT) as other:
        dead = Limiter(client, "dead", SHORT)
        running = asyncio.create_task(dead.run())
        assert (await reserve(dead, tenant, limits, "lost", 60)).is_admitted
        assert (await dead.reserve(tenant, limits, "kept", 1, 1, 30, is_full=True)).is_admitted
        dead.note(tenant, "lost", 7)
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(SHORT.lease_ms / 1000)  # its next renewal has told it
        assert (await reserve(other, tenant, limits, "early", 11)).limit == "budget"
        running.cancel()  # without the last report that `run` makes: killed
        dead._accounts.clear()

        async def is_back() -> bool:
            return (await reserve(other, tenant, limits, "next", 63)).is_admitted

        await until(is_back)
        assert asyncio.get_running_loop().time() - begun < 15
        assert (await reserve(other, tenant, limits, "more", 1)).spent_nano == 7 + 30 + 63


async def test_of_a_gateway_that_is_killed_the_budget_has_no_less_than_the_usage(url: str) -> None:
    tenant, limits = new_tenant(), budget_of(100)
    async with connect(url) as client, gateway(client, "other", SHORT) as other:
        dead = Limiter(client, "killed", SHORT)
        usage = UsageLog(client, "killed", before_write=dead.tell_charges)
        running = asyncio.create_task(dead.run())
        for name in ("runs", "ended", "settled"):
            assert (await reserve(dead, tenant, limits, name, 20)).is_admitted
        await asyncio.sleep(SHORT.lease_ms / 3000)  # its first renewal is over
        for name, nano in (("runs", 7), ("ended", 11)):
            dead.note(tenant, name, nano)
        dead.settle(tenant, "settled", 1, 13)
        usage.add(tenant, "demo", "", Used(3, charge_nano=7 + 11 + 13))
        assert await usage.flush()
        dead._accounts.clear()  # killed: not even the last report that `run` makes
        running.cancel()

        async def is_back() -> bool:
            return (await reserve(other, tenant, limits, "next", 100 - 7 - 11 - 13)).is_admitted

        await until(is_back)
        assert (await reserve(other, tenant, limits, "more", 1)).limit == "budget"
        (row,) = await read_usage(client, tenant, last_days(1, time.time()))
        assert row.used.charge_nano == 7 + 11 + 13


async def test_usage_of_what_redis_was_not_told_is_written_later(tmp_path: Path) -> None:
    limits = budget_of(100)
    with running_redis(tmp_path) as server:
        async with connect(server.url) as client, gateway(client, "one", SHORT) as limiter:
            cut = CuttableClient(client)
            limiter._script = LimitScript(cast("redis.asyncio.Redis", cut), SHORT)
            usage = UsageLog(client, "one", before_write=limiter.tell_charges)
            assert (await reserve(limiter, "acme", limits, "runs", 20)).is_admitted
            limiter.note("acme", "runs", 7)
            usage.add("acme", "demo", "", Used(1, charge_nano=7))
            cut.is_cut = True
            assert not await usage.flush()
            assert await read_usage(client, "acme", last_days(1, time.time())) == []
            cut.is_cut = False

            await until(usage.flush)
            (row,) = await read_usage(client, "acme", last_days(1, time.time()))
            assert row.used.charge_nano == 7


async def test_while_redis_is_away_a_gateway_gives_out_what_it_has_set_aside_and_no_more(tmp_path: Path) -> None:
    tenant, limits = "acme", budget_of(10_000)
    with running_redis(tmp_path) as server:
        async with connect(server.url) as client, gateway(client, "one", SHORT) as limiter:
            assert (await reserve(limiter, tenant, limits, "before", 100)).is_admitted
            limiter.settle(tenant, "before", 1, 50)

            async def has_aside() -> bool:
                return await spent(limiter, tenant) == 50 + (10_000 - 50) // 50

            await until(has_aside)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGSTOP)
            try:
                meanwhile = await limiter.reserve(tenant, limits, "meanwhile", 1, 1, 150)
                with pytest.raises(Overloaded, match="has set aside"):
                    await limiter.reserve(tenant, limits, "too much", 1, 1, 50)
                with pytest.raises(Overloaded, match="has set aside"):
                    await limiter.reserve("unknown", limits, "another", 1, 1, 1)
                limiter.settle(tenant, "meanwhile", 1, 120)
                more = await limiter.reserve(tenant, limits, "more", 1, 1, 70)
            finally:
                os.kill(server.pid, signal.SIGCONT)
            assert meanwhile.is_admitted
            assert more.is_admitted
            limiter.settle(tenant, "more", 1, 70)

            async def is_charged() -> bool:
                found = await reserve(limiter, tenant, limits, f"q{next(TENANTS)}", 0)
                aside = (10_000 - 240) // 50
                return 240 <= found.spent_nano <= 240 + aside

            await until(is_charged)


class CuttableClient:
    """A connection to Redis that can be cut for one gateway."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self.is_cut = False

    def register_script(self, text: str) -> Callable[..., Awaitable[Any]]:
        script = self._client.register_script(text)

        async def call(keys: Sequence[str], args: Sequence[Any]) -> Any:
            if self.is_cut:
                raise ConnectionError("cut off")
            return await script(keys=keys, args=args)

        return call


async def test_a_gateway_that_is_cut_off_gives_out_nothing_that_redis_has_given_back(url: str) -> None:
    tenant, limits, window = new_tenant(), budget_of(10_000), Window(bucket_ms=500, num_buckets=20, lease_ms=1500)
    async with connect(url) as client, gateway(client, "others", window) as others:
        cuttable: Any = CuttableClient(client)
        async with gateway(cuttable, "cut", window) as cut:
            assert (await reserve(cut, tenant, limits, "before", 100)).is_admitted
            cut.settle(tenant, "before", 1, 100)

            async def has_aside() -> bool:
                return await spent(others, tenant) > 100

            await until(has_aside)
            cuttable.is_cut = True
            aside = await spent(others, tenant) - 100
            assert (await cut.reserve(tenant, limits, "alone", 1, 1, 10)).is_admitted

            async def is_back() -> bool:  # the first are refused while it is set aside
                return (await reserve(others, tenant, limits, "all", 10_000 - 100)).is_admitted

            assert not await is_back()
            assert aside > 20
            with pytest.raises(Overloaded, match="has set aside"):
                await cut.reserve(tenant, limits, "more than there is", 1, 1, aside)
            await until(is_back)
            with pytest.raises(Overloaded, match="has set aside"):
                await cut.reserve(tenant, limits, "too late", 1, 1, 10)


@pytest.mark.slow
def test_gateways_never_exceed_a_budget_and_use_it_up_while_redis_and_one_of_them_are_killed(tmp_path: Path) -> None:
    found = run_ledger(tmp_path, 1000, 60.0, lease_ms=3000)

    assert found.faults == []
    assert found.num_requests > 1000, "what was reserved and not used was used by others"
