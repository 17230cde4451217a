"""The receipt of an attempt, from the route and the decision alone."""

from types import SimpleNamespace
from typing import cast

from penstock.router.config import PoolSpec
from penstock.router.dispatch.receipt import fill_receipt
from penstock.router.dispatch.route_states import Candidate, RouteState
from penstock.router.replicas.replica_client import ReplicaClient
from penstock.router.routing.chains import Chain
from penstock.router.routing.policy import Decision, Reason
from penstock.router.routing.request import AnsweringModel, Receipt, Route
from penstock.router.routing.tiers import RouteForecast, TierReason
from tests.unit.router.fleet_fakes import FakeMember, generation

GENERATION = generation(list(range(20)))
POOLS = {
    "pool": PoolSpec(name="pool", served_names=("m",), tier="edge", model="demo", app_name="pool", max_model_len=1000)
}
CLIENT = cast(ReplicaClient, SimpleNamespace(member=FakeMember("a")))
REPLICA = RouteState(
    Route("edge", ("pool",)),
    RouteForecast(0.4),
    GENERATION.tokenized,
    Decision("a", Reason.PREFIX, 0.4, 8, {"a": 0.4, "b": 0.6}),
    Candidate(CLIENT, Chain([], b""), 8),
)
PROVIDER = RouteState(Route("cloud", (), provider="up"), RouteForecast(0.2), GENERATION.tokenized)


def test_a_replica_is_named_with_pool_tier_and_the_policys_reason() -> None:
    receipt = Receipt("r", answering_model=AnsweringModel("fp_up", None), num_prompt_tokens=7)

    fill_receipt(receipt, GENERATION, REPLICA, [REPLICA], TierReason.ONLY_TIER, POOLS)

    assert receipt == Receipt(
        "r",
        tier="edge",
        tier_reason="only_tier",
        pool="pool",
        replica="a",
        reason="prefix",
        predicted_ttft_s=0.4,
        predicted_cached_tokens=8,
        is_taken=True,
        scores={"a": 0.4, "b": 0.6},
    )


def test_a_provider_leaves_nothing_of_the_attempt_before() -> None:
    receipt = Receipt("r", attempts=2, queued_s=0.1)
    fill_receipt(receipt, GENERATION, REPLICA, [REPLICA], TierReason.ONLY_TIER, POOLS)

    fill_receipt(receipt, GENERATION, PROVIDER, [REPLICA, PROVIDER], TierReason.PREDICTED_TTFT, POOLS)

    assert (receipt.tier, receipt.pool, receipt.replica, receipt.reason) == ("cloud", "up", "up", "provider")
    assert (receipt.predicted_ttft_s, receipt.predicted_cached_tokens) == (0.2, 0)
    assert receipt.is_provided
    assert receipt.scores == {"a": 0.4, "b": 0.6, "up": 0.2}
    assert [(seen.tier, seen.places, seen.predicted_ttft_s) for seen in receipt.considered] == [
        ("edge", ("pool",), 0.4),
        ("cloud", ("up",), 0.2),
    ]
    assert (receipt.attempts, receipt.queued_s) == (2, 0.1), "counts are the dispatcher's"
