"""The whole way of a request that may leave its first tier: HTTP, two tokenizers, dispatch, a provider; replicas alone
are played."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from penstock.router.config import PoolSpec, ProviderConfig
from penstock.router.models.catalogue import Checkpoint, build_served_models
from penstock.tenancy.tenants import Settings
from penstock.wire.frames import Delta, Finish, unpack_token_ids
from penstock_loadtest.fake.behaviour import Behaviour
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.scenario import Lengths
from tests.unit.router.fleet_fakes import Cluster, FakeMember, FakeReplica
from tests.unit.router.http_fakes import MODEL, OTHER_TOKENIZER, TOKENIZER, World, events, gateway

SMALL_CONTEXT = 200
EDGE, LARGE = FakeMember("e", "edge", max_model_len=SMALL_CONTEXT), FakeMember("l", "cloud", model_digest="large")
SPECS = [
    msgspec.convert(
        {
            "name": name,
            "served_names": [MODEL],
            "tier": name,
            "model": name,
            "app_name": name,
            "max_model_len": context,
        },
        PoolSpec,
    )
    for name, context in (("edge", SMALL_CONTEXT), ("cloud", 1000))
]
CHECKPOINTS = {"edge": Checkpoint(TOKENIZER, "s" * 32), "cloud": Checkpoint(OTHER_TOKENIZER, "l" * 32)}
BUSY = 100_000


@asynccontextmanager
async def two_tiers(
    policy: str = "edge_first", provider: ProviderConfig | None = None, members: tuple[FakeMember, ...] = (EDGE, LARGE)
) -> AsyncIterator[Any]:
    """A gateway over a busy edge with a small model, a large model in the cloud (where it has a member), and a
    provider."""
    providers = [provider] if provider is not None else []
    specs = [spec for spec in SPECS if spec.name in {member.pool for member in members}]
    async with Cluster(*members, providers=providers) as cluster:
        model = build_served_models(
            specs, providers, CHECKPOINTS, lambda pools: max(pool.max_model_len for pool in pools)
        )[MODEL]
        async with gateway(
            dispatcher=cluster.dispatcher, settings=Settings(tier_policy=policy), model=model, providers=providers
        ) as world:
            cluster.replicas["e"].report(prefill_tokens_outstanding=BUSY)
            yield world, cluster


async def wait_for_sequence(replica: FakeReplica, asking: "asyncio.Task[httpx.Response]") -> None:
    while not replica.running:
        assert not asking.done(), asking.result().text
        await asyncio.sleep(0.001)


async def answer(
    asking: asyncio.Task[httpx.Response], replica: FakeReplica, flip: int, text: bytes = b"Paris."
) -> httpx.Response:
    """The response, after that replica has answered in the ids of its tokenizer."""
    await wait_for_sequence(replica, asking)
    for sid in list(replica.running):
        replica.send(Delta(sid, [text[0] ^ flip], num_cached_tokens=0))
        await asyncio.sleep(0.001)
        del replica.running[sid]
        replica.send(Delta(sid, [byte ^ flip for byte in text[1:]], finish=Finish.STOP))
    return await asking


def ask(world: World, **fields: object) -> "asyncio.Task[httpx.Response]":
    return asyncio.ensure_future(world.chat(**fields))


async def test_the_model_that_answers_reads_and_writes_with_its_own_tokenizer() -> None:
    async with two_tiers() as (world, cluster):
        response = await answer(ask(world, max_tokens=10), cluster.replicas["l"], flip=1)
        body = response.json()

        submit = cluster.replicas["l"].submits[0]
        assert (
            bytes(token ^ 1 for token in unpack_token_ids(submit.token_ids) if token < 256).count(b"Capital of France?")
            == 1
        )
        assert body["choices"][0]["message"]["content"] == "Paris."
        assert body["system_fingerprint"] == "fp_" + "l" * 12
        assert body["usage"]["prompt_tokens"] == len(submit.token_ids) // 4
        assert (response.headers["x-penstock-tier"], response.headers["x-penstock-tier-reason"]) == (
            "cloud",
            "predicted_ttft",
        )


async def test_a_stream_of_the_other_model_is_written_with_its_tokenizer_too() -> None:
    async with two_tiers() as (world, cluster):
        response = await answer(ask(world, max_tokens=10, stream=True, stop=["is."]), cluster.replicas["l"], flip=1)
        chunks = [json.loads(event) for event in events(response)[:-1]]

        assert "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]) == "Par"
        assert {chunk["system_fingerprint"] for chunk in chunks} == {"fp_" + "l" * 12}


async def test_every_choice_may_go_its_own_way() -> None:
    async with two_tiers() as (world, cluster):
        asking = ask(world, max_tokens=10, n=2)
        await wait_for_sequence(cluster.replicas["l"], asking)
        cluster.replicas["e"].report()  # has nothing more to do when the second choice begins
        for sid in list(cluster.replicas["l"].running):
            cluster.replicas["l"].send(Delta(sid, [byte ^ 1 for byte in b"cloud"], num_cached_tokens=0))
        await wait_for_sequence(cluster.replicas["e"], asking)
        cluster.replicas["l"].finish(1, Finish.STOP)
        response = await answer(asking, cluster.replicas["e"], flip=0, text=b"edge")

        assert [choice["message"]["content"] for choice in response.json()["choices"]] == ["cloud", "edge"]
        receipt = (await world.client.get(f"/v1/receipts/{response.headers['x-penstock-request-id']}")).json()
        assert [choice["tier"] for choice in receipt["choices"]] == ["cloud", "edge"]


async def test_a_prompt_too_long_for_the_edge_goes_to_the_larger_context() -> None:
    async with two_tiers() as (world, cluster):
        cluster.replicas["e"].report()
        question = [{"role": "user", "content": "x" * 300}]
        response = await answer(ask(world, max_tokens=10, messages=question), cluster.replicas["l"], flip=1)

        assert (response.headers["x-penstock-tier"], response.headers["x-penstock-tier-reason"]) == (
            "cloud",
            "context_too_long",
        )
        too_long = await world.chat(max_tokens=10, messages=[{"role": "user", "content": "x" * 3000}])
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_who_never_leaves_is_answered_by_the_edge_and_told_of_its_context() -> None:
    async with two_tiers("never_leave") as (world, cluster):
        response = await answer(ask(world, max_tokens=10), cluster.replicas["e"], flip=0)
        too_long = await world.chat(max_tokens=10, messages=[{"role": "user", "content": "x" * 300}])

        assert (response.headers["x-penstock-tier"], response.headers["x-penstock-tier-reason"]) == (
            "edge",
            "only_tier",
        )
        assert too_long.status_code == 400
        assert not cluster.replicas["l"].submits


async def test_a_provider_answers_under_our_names_and_watches_only_for_some_stop_strings() -> None:
    behaviour = Behaviour(models=["huge"], ttft_s=Lengths(constant=0.005), gap_s=Lengths(constant=0.001))
    async with FakeServer(behaviour) as server:
        provider = msgspec.convert(
            {"name": "up", "base_url": server.url, "model": "huge", "served_names": [MODEL]}, ProviderConfig
        )
        async with two_tiers(provider=provider, members=(EDGE,)) as (world, _):
            whole = await world.chat(max_tokens=6)
            words = whole.json()["choices"][0]["message"]["content"].split()
            stopped = await world.chat(max_tokens=6, stop=["Q1", "Q2", "Q3", "Q4", words[2]])
            streamed = await world.chat(max_tokens=6, stream=True, stream_options={"include_usage": True})
            text = await world.complete(max_tokens=3, n=2)

    body = whole.json()
    assert (body["model"], body["id"], body["system_fingerprint"]) == (
        MODEL,
        f"chatcmpl-{whole.headers['x-penstock-request-id']}",
        "fp_up",
    )
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == len(words) == 6
    assert body["usage"]["prompt_tokens"] == server.truths[0].prompt_tokens
    assert stopped.json()["choices"][0]["message"]["content"].split() == words[:2]
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    chunks = [json.loads(event) for event in events(streamed)[:-1]]
    assert (
        "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]).split() == words
    )
    assert chunks[-1]["usage"] == body["usage"]
    assert [len(choice["text"].split()) for choice in text.json()["choices"]] == [3, 3]


async def test_a_gateway_without_replicas_is_ready_while_a_provider_is() -> None:
    provider = msgspec.convert(
        {"name": "up", "base_url": "http://x/v1", "model": "huge", "served_names": [MODEL]}, ProviderConfig
    )
    for providers, status in (([], 503), ([provider], 200)):
        async with gateway(providers=providers) as world:
            world.pools.clear()

            assert (await world.client.get("/readyz")).status_code == status
