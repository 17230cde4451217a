"""Dispatch for a tenant whose policy is the cheapest within target, over pools with prices and a provider."""

import asyncio

import msgspec
import pytest

from penstock.router.config import GatewayConfig, ProviderConfig
from penstock.router.dispatch.route_prices import price_at_provider
from penstock.router.routing.request import Generation, Route
from penstock.router.routing.tiers import TierPolicy, TierRule
from penstock.wire.targets import Target, same_for_all
from penstock_loadtest.fake.behaviour import Behaviour
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.scenario import Lengths
from tests.unit.router.dispatch.test_dispatcher_tiers import (
    BUSY,
    CLOUD,
    CLOUD_ROUTE,
    EDGE,
    EDGE_ROUTE,
    LARGE,
    LARGE_ROUTE,
    PROVIDER_ROUTE,
    Reader,
    provider,
    routed,
    whole_text,
)
from tests.unit.router.fleet_fakes import Cluster, settle

RULE = TierRule(TierPolicy.CHEAPEST_WITHIN_TARGET)
PRICES = {"edge": 8.0, "cloud": 2.0}


def by_cost(*routes: Route, reader: Reader | None = None, **changes: object) -> Generation:
    return routed(*routes, reader=reader, tier_rule=RULE, **changes)


def priced(input_price: float | None = 1.0, cached_price: float | None = None) -> ProviderConfig:
    output_price = None if input_price is None else 4 * input_price
    changes = {"input_price": input_price, "output_price": output_price, "cached_price": cached_price}
    return provider("http://x/v1", **changes)


async def test_the_cheaper_pool_is_taken_whatever_its_tier_and_the_receipt_has_what_each_would_cost() -> None:
    async with Cluster(EDGE, CLOUD, prices=PRICES) as cluster:
        stream = await cluster.dispatcher.start(by_cost(EDGE_ROUTE, CLOUD_ROUTE))
        await cluster.read(stream)
        stream.close()

        receipt = stream.receipt
        edge, cloud = receipt.considered
        assert (receipt.tier, receipt.tier_reason, receipt.pool) == ("cloud", "cheapest", "cloud")
        assert edge.predicted_cost_nano is not None
        assert edge.predicted_cost_nano == pytest.approx(4 * (cloud.predicted_cost_nano or 0), abs=4)
        assert receipt.predicted_cost_nano == cloud.predicted_cost_nano
        # a step of one row: 12 ms; the prompt 30 ms more; of the answer of 8 tokens 7 follow the first
        assert cloud.predicted_cost_nano == pytest.approx((0.012 + 0.030 + 7 * 0.012) * 2.0 / 3600 * 1e9, rel=0.01)
        assert cloud.predicted_tpot_s == pytest.approx(0.012)


async def test_over_the_target_the_dearer_one_gets_it() -> None:
    async with Cluster(EDGE, CLOUD, prices=PRICES) as cluster:
        cluster.replicas["c"].report(prefill_tokens_outstanding=BUSY)
        stream = await cluster.dispatcher.start(by_cost(EDGE_ROUTE, CLOUD_ROUTE))
        stream.close()

        assert (stream.receipt.tier, stream.receipt.tier_reason) == ("edge", "predicted_ttft")


async def test_a_pool_that_would_be_too_slow_for_the_requests_class_is_passed_over() -> None:
    targets = same_for_all(Target(tpot_s=0.02))
    async with Cluster(EDGE, CLOUD, prices=PRICES, targets=targets) as cluster:
        cluster.replicas["c"].report(num_running=6, kv_tokens=600)  # 24 ms a step with the seventh
        stream = await cluster.dispatcher.start(by_cost(EDGE_ROUTE, CLOUD_ROUTE))
        stream.close()

        assert (stream.receipt.tier, stream.receipt.tier_reason) == ("edge", "predicted_tpot")


async def test_a_fuller_batch_divides_its_steps_further_and_is_cheaper() -> None:
    async with Cluster(EDGE, CLOUD, prices={"edge": 1.0, "cloud": 1.05}) as cluster:
        cluster.replicas["c"].report(num_running=4, kv_tokens=400)
        stream = await cluster.dispatcher.start(by_cost(EDGE_ROUTE, CLOUD_ROUTE))
        stream.close()

        assert (stream.receipt.tier, stream.receipt.tier_reason) == ("cloud", "cheapest")


async def test_a_pool_without_a_price_comes_last() -> None:
    async with Cluster(EDGE, CLOUD, prices={"cloud": 1000.0}) as cluster:
        stream = await cluster.dispatcher.start(by_cost(EDGE_ROUTE, CLOUD_ROUTE))
        stream.close()

        assert (stream.receipt.tier, stream.receipt.tier_reason) == ("cloud", "cheapest")
        assert stream.receipt.considered[0].predicted_cost_nano is None


async def test_the_other_models_tokens_are_counted_for_its_price() -> None:
    async with Cluster(EDGE, LARGE, prices=PRICES) as cluster:
        reader = Reader()
        stream = await cluster.dispatcher.start(by_cost(EDGE_ROUTE, LARGE_ROUTE, reader=reader))
        stream.close()

        assert (stream.receipt.tier, reader.num_read) == ("cloud", 1)


@pytest.mark.parametrize(("price", "tier"), [(0.1, "cloud"), (100.0, "edge"), (None, "edge")])
async def test_a_provider_is_compared_by_its_prices(price: float | None, tier: str) -> None:
    behaviour = Behaviour(models=["large"], ttft_s=Lengths(constant=0.005), gap_s=Lengths(constant=0.001))
    async with FakeServer(behaviour) as server:
        config = msgspec.structs.replace(priced(price), base_url=server.url)
        async with Cluster(EDGE, providers=[config], prices={"edge": 1.0}) as cluster:
            stream = await cluster.dispatcher.start(by_cost(EDGE_ROUTE, PROVIDER_ROUTE))
            stream.close()
            await settle()

            assert (stream.receipt.tier, stream.receipt.tier_reason) == (tier, "cheapest")


async def test_how_long_a_providers_answers_are_is_learned_too() -> None:
    behaviour = Behaviour(models=["large"], ttft_s=Lengths(constant=0.001), gap_s=Lengths(constant=0.0))
    async with FakeServer(behaviour) as server:
        config = msgspec.structs.replace(priced(1.0), base_url=server.url)
        async with asyncio.timeout(20), Cluster(providers=[config]) as cluster:
            sampling = msgspec.structs.replace(by_cost(PROVIDER_ROUTE).sampling, max_tokens=500)
            costs = []
            for _ in range(2):
                stream = await cluster.dispatcher.start(by_cost(PROVIDER_ROUTE, sampling=sampling))
                await whole_text(stream)
                stream.close()
                costs.append(stream.receipt.predicted_cost_nano or 0)

    # 128 tokens are expected of the first; it has 500, and that weighs 0.02
    assert costs[1] - costs[0] == pytest.approx((500 - 128) * 0.02 * 4.0 * 1000, abs=4.0 * 1000)


async def test_the_part_of_prompts_that_a_provider_has_cached_is_learned_and_priced() -> None:
    behaviour = Behaviour(
        models=["large"], ttft_s=Lengths(constant=0.001), gap_s=Lengths(constant=0.0), cached_tokens=3
    )
    async with FakeServer(behaviour) as server:
        config = msgspec.structs.replace(priced(100.0, 0.0), base_url=server.url)
        async with asyncio.timeout(20), Cluster(providers=[config]) as cluster:
            costs = []
            for _ in range(30):
                stream = await cluster.dispatcher.start(by_cost(PROVIDER_ROUTE))
                await whole_text(stream)
                stream.close()
                costs.append(stream.receipt.predicted_cost_nano or 0)
            share = cluster.providers.by_name["up"].cached_share

    # 3 of the 6 tokens of each prompt, as it counts them; the edge's model counts 30
    assert share == pytest.approx(0.5 * (1 - 0.95**30))
    assert costs[0] - costs[-1] == pytest.approx(30 * 0.5 * (1 - 0.95**29) * 100_000, abs=100_000)


def test_a_cost_at_a_provider_is_of_its_three_prices() -> None:
    assert price_at_provider(priced(1.0), 1000, 0.0, 100.0) == 1000 * 1000 + 100 * 4000
    assert price_at_provider(priced(1.0, 0.1), 1000, 0.5, 100.0) == 500 * 1000 + 500 * 100 + 100 * 4000
    assert price_at_provider(priced(1.0), 1000, 0.5, 100.0) == 1000 * 1000 + 100 * 4000
    assert price_at_provider(priced(None), 1000, 0.5, 100.0) is None


async def test_a_request_with_one_place_says_so_and_what_it_should_cost() -> None:
    async with Cluster(EDGE, prices=PRICES, config=GatewayConfig()) as cluster:
        stream = await cluster.dispatcher.start(by_cost(EDGE_ROUTE))
        stream.close()

        assert stream.receipt.tier_reason == "only_tier"
        assert (stream.receipt.predicted_cost_nano or 0) > 0
