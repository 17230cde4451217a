"""Caps on what providers may cost, as requests meet them: another tier, or the end; and every reservation settled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import msgspec
import pytest

from penstock.router.config import GatewayConfig
from penstock.router.providers.caps import most_cost_nano
from penstock.tenancy.limits import Limiter
from penstock.tenancy.tenants import Limits
from penstock.tenancy.window import PARALLEL_WAIT_MS, Verdict
from penstock.wire.errors import CapReached, Overloaded, error_body, http_error
from penstock.wire.money import NANO
from penstock_loadtest.fake.behaviour import Behaviour, Fault
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.scenario import Lengths
from tests.unit.router.dispatch.test_dispatcher_tiers import (
    EDGE,
    EDGE_ROUTE,
    PROMPT,
    PROVIDER_ROUTE,
    QUICK,
    busy,
    edge_answer,
    provider,
    routed,
    whole_text,
)
from tests.unit.router.fleet_fakes import Cluster, settle

PRICES = {"input_price": 3.0, "output_price": 15.0}
MOST_NANO = most_cost_nano(provider("http://up/v1", **PRICES), len(PROMPT), 8)
COST_NANO = 6 * 3000 + 8 * 15_000
"""Cost of a whole answer of the fake provider."""
MONTH_MS = 10 * 86_400_000


class Ledgers:
    """A limiter that keeps exact sums, and remembers what was given back."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self.held: dict[tuple[str, str], int] = {}
        self.is_away = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def reserve(
        self,
        ledger: str,
        limits: Limits,
        call_id: str,
        tokens: int,
        sequences: int,
        nano: int,
        *,
        is_full: bool,
    ) -> Verdict:
        assert (tokens, sequences, is_full) == (0, 0, True)
        await self.gate.wait()
        if self.is_away:
            raise Overloaded("the budget of this tenant can't be checked at the moment")
        spent = self.spent.get(ledger, 0)
        if spent + nano > (limits.budget_nano or 0):
            open_nano = sum(held for (name, _), held in self.held.items() if name == ledger)
            wait_ms = PARALLEL_WAIT_MS if spent + nano - open_nano <= (limits.budget_nano or 0) else MONTH_MS
            return Verdict(False, "budget", wait_ms, spent_nano=spent)
        self.spent[ledger] = spent + nano
        assert (ledger, call_id) not in self.held
        self.held[ledger, call_id] = nano
        return Verdict(True, spent_nano=spent + nano)

    def list_budgets(self) -> list[tuple[str, int, int]]:
        return [("acme", 1, 2), *((ledger, spent, 2 * MOST_NANO) for ledger, spent in self.spent.items())]

    def settle(self, ledger: str, call_id: str, used_tokens: int, charged_nano: int = 0) -> None:
        self.spent[ledger] += charged_nano - self.held.pop((ledger, call_id))


@asynccontextmanager
async def capped(
    ledgers: Ledgers, cap_nano: float | None, behaviour: Behaviour = QUICK, own_nano: float | None = None
) -> AsyncIterator[tuple[Cluster, FakeServer]]:
    """A busy edge, and a provider behind it that may cost so much."""
    config = GatewayConfig(provider_cap=None if cap_nano is None else cap_nano / NANO)
    async with asyncio.timeout(20), FakeServer(behaviour) as server:
        up = provider(server.url, cap=None if own_nano is None else own_nano / NANO, **PRICES)
        async with Cluster(EDGE, providers=[up], config=config, limiter=cast(Limiter, ledgers)) as cluster:
            busy(cluster)
            yield cluster, server
    assert ledgers.held == {}, "whatever becomes of a call, its reservation is settled"


async def test_the_most_that_a_call_may_cost_is_reserved_and_what_it_cost_is_kept() -> None:
    ledgers = Ledgers()
    async with capped(ledgers, 2 * MOST_NANO) as (cluster, _):
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        assert ledgers.spent == {"*providers": MOST_NANO}
        assert (await whole_text(stream))[1] == 8
        stream.close()
        await settle()

    assert MOST_NANO == (30 + 15 + 64) * 3000 + 8 * 15_000
    assert ledgers.spent == {"*providers": COST_NANO}


async def test_a_provider_that_would_cost_too_much_is_not_asked_and_another_tier_answers() -> None:
    ledgers = Ledgers()
    async with capped(ledgers, MOST_NANO - 1) as (cluster, server):
        stream = await cluster.dispatcher.start(routed(PROVIDER_ROUTE, EDGE_ROUTE))
        await edge_answer(cluster, stream)

        assert (stream.receipt.tier, stream.receipt.tier_reason) == ("edge", "provider_cap")
        assert server.truths == []
        assert b'penstock_budget_refusals_total{kind="cap"} 1.0' in cluster.metrics.render()


async def test_where_nobody_else_may_answer_the_cap_is_the_answer() -> None:
    ledgers = Ledgers()
    ledgers.spent["*providers"] = 1
    async with capped(ledgers, MOST_NANO) as (cluster, server):
        with pytest.raises(CapReached, match=r"Providers together may cost .*, which is spent") as caught:
            await cluster.dispatcher.start(routed(PROVIDER_ROUTE))

        assert server.truths == []
        assert http_error(caught.value).status == 429
        assert error_body(caught.value)["error"]["code"] == "provider_cap_reached"
        assert MONTH_MS / 1000 <= (caught.value.retry_after_s or 0) <= MONTH_MS / 1000 + 300


async def test_a_cap_that_running_calls_hold_is_free_again_when_they_end() -> None:
    ledgers = Ledgers()
    async with capped(ledgers, MOST_NANO + COST_NANO) as (cluster, _):
        first = await cluster.dispatcher.start(routed(PROVIDER_ROUTE))
        with pytest.raises(CapReached, match="which is reserved by requests that run") as caught:
            await cluster.dispatcher.start(routed(PROVIDER_ROUTE))
        assert 1 <= (caught.value.retry_after_s or 0) <= 2
        await whole_text(first)
        first.close()
        await settle()

        second = await cluster.dispatcher.start(routed(PROVIDER_ROUTE))
        await whole_text(second)
        second.close()
        await settle()

    assert ledgers.spent == {"*providers": 2 * COST_NANO}


async def test_what_one_cap_has_reserved_comes_back_when_the_other_refuses() -> None:
    ledgers = Ledgers()
    async with capped(ledgers, MOST_NANO - 1, own_nano=MOST_NANO) as (cluster, _):
        with pytest.raises(CapReached, match="Providers together"):
            await cluster.dispatcher.start(routed(PROVIDER_ROUTE))

    assert ledgers.spent == {"*provider:up": 0}


async def test_the_cap_of_one_provider_is_its_own() -> None:
    ledgers = Ledgers()
    async with capped(ledgers, None, own_nano=MOST_NANO - 1) as (cluster, _):
        with pytest.raises(CapReached, match=r"The provider up may cost .*, which is spent"):
            await cluster.dispatcher.start(routed(PROVIDER_ROUTE))


async def test_caps_that_cannot_be_checked_keep_requests_away_from_providers() -> None:
    ledgers = Ledgers()
    ledgers.is_away = True
    async with capped(ledgers, MOST_NANO) as (cluster, server):
        with pytest.raises(Overloaded, match="what providers may cost can't be checked"):
            await cluster.dispatcher.start(routed(PROVIDER_ROUTE))
        stream = await cluster.dispatcher.start(routed(PROVIDER_ROUTE, EDGE_ROUTE))
        await edge_answer(cluster, stream)

        assert server.truths == []


async def test_a_call_that_fails_after_it_was_sent_may_have_cost_its_prompt() -> None:
    ledgers = Ledgers()
    failing = msgspec.structs.replace(QUICK, faults=[Fault("close_before_headers", share=1.0)])
    async with capped(ledgers, MOST_NANO, failing) as (cluster, _):
        stream = await cluster.dispatcher.start(routed(PROVIDER_ROUTE, EDGE_ROUTE))
        await edge_answer(cluster, stream)

    assert ledgers.spent == {"*providers": len(PROMPT) * 3000}


async def test_a_client_that_leaves_before_the_first_text_has_the_prompt_counted() -> None:
    ledgers = Ledgers()
    async with capped(ledgers, MOST_NANO, msgspec.structs.replace(QUICK, ttft_s=Lengths(constant=60.0))) as (
        cluster,
        server,
    ):
        stream = await cluster.dispatcher.start(routed(PROVIDER_ROUTE))
        while not server.truths:
            await settle()
        stream.close()
        await settle()

    assert ledgers.spent == {"*providers": len(PROMPT) * 3000}


async def test_a_client_that_leaves_in_the_middle_of_the_answer_has_it_settled_with_what_came() -> None:
    ledgers = Ledgers()
    async with capped(ledgers, MOST_NANO, msgspec.structs.replace(QUICK, gap_s=Lengths(constant=60.0))) as (cluster, _):
        stream = await cluster.dispatcher.start(routed(PROVIDER_ROUTE))
        await stream.next()
        stream.close()
        await settle()

    assert ledgers.spent == {"*providers": len(PROMPT) * 3000 + 15_000}


async def test_a_client_that_leaves_while_the_cap_is_asked_holds_nothing() -> None:
    ledgers = Ledgers()
    async with capped(ledgers, MOST_NANO) as (cluster, server):
        ledgers.gate.clear()
        leaving = asyncio.create_task(cluster.dispatcher.start(routed(PROVIDER_ROUTE)))
        await settle()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

        assert server.truths == []


async def test_a_reservation_whose_request_goes_elsewhere_after_all_comes_back() -> None:
    ledgers = Ledgers()
    async with capped(ledgers, MOST_NANO) as (cluster, server):
        ledgers.gate.clear()
        asked = asyncio.create_task(cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE)))
        await settle()
        cluster.replicas["e"].report(prefill_tokens_outstanding=0)  # meanwhile the first tier has room
        await settle()
        ledgers.gate.set()
        await edge_answer(cluster, await asked)

        assert server.truths == []
    assert ledgers.spent == {"*providers": 0}


async def test_the_metrics_say_how_much_of_a_cap_is_used() -> None:
    ledgers = Ledgers()
    async with capped(ledgers, 2 * MOST_NANO, own_nano=2 * MOST_NANO) as (cluster, _):
        stream = await cluster.dispatcher.start(routed(PROVIDER_ROUTE))
        assert cluster.caps is not None
        cluster.caps.refresh_metrics()
        await whole_text(stream)
        stream.close()

    page = cluster.metrics.render().decode()
    assert 'penstock_provider_cap_used_ratio{provider="all"} 0.5' in page
    assert 'penstock_provider_cap_used_ratio{provider="up"} 0.5' in page
    assert page.count("penstock_provider_cap_used_ratio{") == 2
