"""Budgets in a real Redis: the script against a model, many gateways at once, gateways that die, Redis going away."""

import asyncio
import itertools
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.redis import connect
from penstock.tenancy.charges import Aside, BudgetRequest, RenewedCharge, SettledCharge, UnsettledCharge
from penstock.tenancy.limit_script import LimitScript
from penstock.tenancy.tariffs import MAX_NANO
from penstock.tenancy.window import LimitRequest, Settled, Window
from tests.integration.budget_model import BudgetModel
from tests.integration.test_limits import running_redis

WINDOW = Window(bucket_ms=10_000, num_buckets=6, lease_ms=200_000)
SHORT = Window(bucket_ms=100, num_buckets=5, lease_ms=600)
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
PAUSES_MS = st.integers(0, 40_000) | st.sampled_from([70_000, 150_000, 250_000, 3_700_000, 20 * DAY_MS])
STARTS_MS = st.sampled_from(
    [
        int(datetime(*when, tzinfo=UTC).timestamp() * 1000)
        for when in ((2026, 11, 30, 23, 59, 50), (2027, 12, 31, 23, 59, 59), (2028, 2, 28, 23, 0), (2100, 2, 28, 12))
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
@settings(max_examples=100, deadline=None)
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
