"""Escalation over the whole way of a request: HTTP, two tokenizers, dispatch, a provider; replicas alone are played."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
import msgspec
import pytest

from penstock.base.errors import ConfigError
from penstock.router.completions.admission import count_usage
from penstock.router.completions.completion import Choice, Completion
from penstock.router.config import EscalationConfig, GatewayConfig, PoolSpec, ProviderConfig
from penstock.router.dispatch.mailbox import Mailbox
from penstock.router.models.catalogue import Checkpoint, build_served_models
from penstock.router.routing.request import Generation, HoldListener
from penstock.router.routing.tiers import TierReason
from penstock.tenancy.tenants import Limits, Settings
from penstock.tenancy.usage import Used
from penstock.wire.errors import CapReached
from penstock.wire.frames import Ability, Delta, Finish, TokenLogprobs
from penstock_loadtest.fake.behaviour import Behaviour, Fault
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.scenario import Lengths
from tests.unit.router.fleet_fakes import Cluster, FakeMember, FakeReplica, settle
from tests.unit.router.http_fakes import MODEL, OTHER_TOKENIZER, TOKENIZER, World, events, running_gateway

EDGE, CLOUD = FakeMember("e", "edge"), FakeMember("c", "cloud", model_digest="large")
EDGE_2 = FakeMember("e2", "edge")
RULE = EscalationConfig(tokens=4, min_mean_logprob=-1.0)
SURE, UNSURE = -0.5, -2.0
PATIENT = GatewayConfig(ttft_target_s=60.0)
"""The cloud has as long to take a request as a slow machine needs."""
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


class Scene(NamedTuple):
    world: World
    cluster: Cluster
    completions: list[Completion]
    """Completions that were settled."""

    def submits(self, replica: str) -> int:
        return len(self.cluster.replicas[replica].submits)

    def counted(self, outcome: str) -> float:
        value = self.world.metrics.registry.get_sample_value(
            "penstock_escalations_total", {"model": MODEL, "outcome": outcome}
        )
        return value or 0.0

    @property
    def first_choice(self) -> Choice:
        (completion,) = self.completions
        return completion.prompts[0][0]

    @property
    def used(self) -> Used:
        (completion,) = self.completions
        return count_usage(completion)


@asynccontextmanager
async def scene(
    policy: str = "edge_first",
    members: Sequence[FakeMember] = (EDGE, CLOUD),
    providers: Sequence[ProviderConfig] = (),
    rule: EscalationConfig = RULE,
    models: Sequence[str] = ("small", "large"),
    config: GatewayConfig = PATIENT,
) -> AsyncIterator[Scene]:
    """models: of the edge's pool and the cloud's."""
    fields = {"served_names": [MODEL], "app_name": "x", "max_model_len": 1000}
    names = {member.pool for member in members}
    specs = [
        msgspec.convert({"name": name, "tier": name, "model": model, **fields, "escalation": chosen}, PoolSpec)
        for name, model, chosen in (("edge", models[0], msgspec.to_builtins(rule)), ("cloud", models[1], None))
        if name in names
    ]
    checkpoints = {"small": Checkpoint(TOKENIZER, "s" * 32), "large": Checkpoint(OTHER_TOKENIZER, "l" * 32)}
    async with Cluster(*members, providers=providers, config=config) as cluster:
        model = build_served_models(specs, providers, checkpoints, lambda _pools: 1000)[MODEL]
        async with running_gateway(
            dispatcher=cluster.dispatcher,
            settings=Settings(tier_policy=policy),
            model=model,
            providers=providers,
            config=config,
        ) as world:
            settled: list[Completion] = []
            settle_one = world.admission.settle

            def keep(
                tenant_id: str,
                limits: Limits | None,
                request_id: str,
                model: str,
                completion: Completion,
                adapter: str = "",
            ) -> Used:
                settled.append(completion)
                return settle_one(tenant_id, limits, request_id, model, completion, adapter)

            world.admission.settle = keep  # type: ignore[method-assign]
            yield Scene(world, cluster, settled)


def ask(scene: Scene, **fields: object) -> "asyncio.Task[httpx.Response]":
    return asyncio.ensure_future(scene.world.chat(**{"max_tokens": 20, **fields}))


async def placed(replica: FakeReplica, asking: "asyncio.Task[httpx.Response]", count: int = 1) -> None:
    async with asyncio.timeout(10):
        while len(replica.running) < count:
            assert not asking.done(), asking.result().text
            await asyncio.sleep(0.001)


async def say(
    replica: FakeReplica, text: bytes, logprob: float | None = None, finish: Finish | None = None, flip: int = 0
) -> None:
    """One delta for all of a replica's sequences, with log probabilities where they were asked for."""
    for sid, running in list(replica.running.items()):
        is_first, running.is_begun = not running.is_begun, True
        wanted = running.submit.sampling.logprobs is not None and logprob is not None
        logprobs = [TokenLogprobs(logprob or 0.0)] * len(text) if wanted else None
        if finish is not None:
            del replica.running[sid]
        token_ids = [byte ^ flip for byte in text]
        replica.send(
            Delta(sid, token_ids, finish, num_cached_tokens=0 if is_first else None, logprobs=logprobs, step_s=0.0)
        )
    await settle()


async def answer_in_cloud(scene: Scene, asking: "asyncio.Task[httpx.Response]", count: int = 1) -> httpx.Response:
    await placed(scene.cluster.replicas["c"], asking, count)
    await say(scene.cluster.replicas["c"], b"Par", flip=1)
    await say(scene.cluster.replicas["c"], b"is.", finish=Finish.STOP, flip=1)
    return await asking


def content(response: httpx.Response) -> list[str]:
    return [choice["message"]["content"] for choice in response.json()["choices"]]


async def escalation_of(scene: Scene, response: httpx.Response) -> dict[str, object]:
    receipt = await scene.world.client.get(f"/v1/receipts/{response.headers['x-penstock-request-id']}")
    found: dict[str, object] = receipt.json()["choices"][0]["escalation"]
    return found


def assert_shown_late(at: Scene, seconds: float) -> None:
    """The first token came so much earlier, at least, than it was shown, and not before it was asked for."""
    choice = at.first_choice
    assert choice.trial is not None
    assert choice.receipt is not None
    assert choice.trial.first_token_s is not None
    assert choice.first_token_s is not None
    assert choice.receipt.placed_s is not None
    assert choice.receipt.placed_s <= choice.trial.first_token_s <= choice.first_token_s - seconds + 1e-9


async def test_a_sure_beginning_is_held_and_then_shown_at_once() -> None:
    async with scene() as at:
        asking = ask(at, stream=True)
        edge = at.cluster.replicas["e"]
        await placed(edge, asking)
        for byte in b"Sur":
            await say(edge, bytes((byte,)), SURE)
        await say(edge, b"e.", SURE)
        await say(edge, b" Yes", SURE)
        await say(edge, b"!", SURE, Finish.STOP)
        response = await asking

        texts = [json.loads(event)["choices"][0]["delta"].get("content") for event in events(response)[:-1]]
        assert [text for text in texts if text] == ["Sure.", " Yes", "!"]
        assert (edge.submits[0].sampling.logprobs, edge.submits[0].sampling.logprobs_tokens) == (0, 4)
        receipt = await escalation_of(at, response)
        held_s = receipt.pop("held_s")
        assert isinstance(held_s, float)
        assert held_s > 0
        assert receipt == {
            "outcome": "kept",
            "escalated": False,
            "reason": None,
            "mean_logprob": SURE,
            "min_mean_logprob": -1.0,
            "held_tokens": 4,
            "edge": None,
        }
        assert at.used.completion_tokens == 10
        assert_shown_late(at, held_s)
        assert at.counted("kept") == 1
        assert at.submits("c") == 0


@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_unsure_beginning_is_never_shown_and_both_attempts_count(is_stream: bool) -> None:
    async with scene() as at:
        asking = ask(at, stream=is_stream)
        edge = at.cluster.replicas["e"]
        await placed(edge, asking)
        await say(edge, b"Lond", UNSURE)
        response = await answer_in_cloud(at, asking)

        assert "Lond" not in response.text
        assert (response.headers["x-penstock-tier"], response.headers["x-penstock-tier-reason"]) == (
            "cloud",
            "escalated",
        )
        assert edge.aborts == [1]
        assert at.cluster.replicas["c"].submits[0].sampling.logprobs is None
        receipt = await escalation_of(at, response)
        assert (receipt["outcome"], receipt["escalated"], receipt["mean_logprob"]) == ("escalated", True, UNSURE)
        prompts = [len(at.cluster.replicas[name].submits[0].packed_token_ids) // 4 for name in "ec"]
        assert receipt["edge"] == {
            "pool": "edge",
            "replica": "e",
            "prompt_tokens": prompts[0],
            "cached_tokens": 0,
            "completion_tokens": 4,
            "cost": None,
        }
        assert at.used[:4] == (1, sum(prompts), 0, 4 + 6)
        counted = at.world.metrics.registry.get_sample_value
        assert counted("penstock_escalations_total", {"model": MODEL, "outcome": "escalated"}) == 1
        if not is_stream:
            assert content(response) == ["Paris."]
            assert response.json()["usage"]["completion_tokens"] == 6
            assert response.json()["system_fingerprint"] == "fp_" + "l" * 12


async def test_an_answer_that_ends_early_is_judged_by_what_there_is() -> None:
    async with scene() as at:
        asking = ask(at)
        await placed(at.cluster.replicas["e"], asking)
        await say(at.cluster.replicas["e"], b"No", UNSURE, Finish.STOP)

        assert content(await answer_in_cloud(at, asking)) == ["Paris."]


async def test_what_stands_behind_a_stop_string_is_neither_waited_for_nor_judged() -> None:
    async with scene() as at:
        asking = ask(at, stop=["o"])
        edge = at.cluster.replicas["e"]
        await placed(edge, asking)
        sid = next(iter(edge.running))
        logprobs = [TokenLogprobs(SURE), TokenLogprobs(SURE), TokenLogprobs(-90.0)]
        edge.send(Delta(sid, list(b"No!"), num_cached_tokens=0, logprobs=logprobs))
        response = await asking

        assert content(response) == ["N"]
        assert (await escalation_of(at, response))["mean_logprob"] == SURE


@pytest.mark.parametrize("policy", ["edge_only", "never_leave"])
async def test_what_may_not_leave_is_not_held_and_not_judged(policy: str) -> None:
    async with scene(policy) as at:
        asking = ask(at)
        edge = at.cluster.replicas["e"]
        await placed(edge, asking)
        await say(edge, b"Lond", UNSURE)
        await say(edge, b"on", UNSURE, Finish.STOP)
        response = await asking

        assert content(response) == ["London"]
        assert edge.submits[0].sampling.logprobs is None
        receipt = await escalation_of(at, response)
        assert (receipt["outcome"], receipt["mean_logprob"], receipt["held_tokens"]) == ("not_allowed", None, 0)
        assert at.counted("not_allowed") == 1
        assert at.submits("c") == 0


async def test_a_request_that_stays_is_not_held_although_its_tenant_may_leave() -> None:
    async with scene() as at:
        edge = at.cluster.replicas["e"]
        asking = asyncio.ensure_future(
            at.world.client.post(
                "/v1/chat/completions",
                json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20},
                headers={"x-penstock-stay": "edge"},
            )
        )
        await placed(edge, asking)
        await say(edge, b"London", UNSURE, Finish.STOP)
        response = await asking

        assert content(response) == ["London"]
        assert (await escalation_of(at, response))["outcome"] == "not_allowed"
        assert at.submits("c") == 0


async def test_the_edge_goes_on_at_once_where_the_cloud_has_no_replica() -> None:
    async with scene() as at:
        at.cluster.replicas["c"].die()
        asking = ask(at)
        edge = at.cluster.replicas["e"]
        await placed(edge, asking)
        await say(edge, b"Lond", UNSURE)
        await say(edge, b"on", UNSURE, Finish.STOP)
        response = await asyncio.wait_for(asking, 5)

        assert content(response) == ["London"]
        receipt = await escalation_of(at, response)
        assert (receipt["outcome"], receipt["reason"], receipt["escalated"]) == ("no_cloud", "tier_down", False)
        assert at.used.completion_tokens == 6
        assert at.counted("no_cloud") == 1


async def test_the_edge_goes_on_when_the_cloud_has_no_place_in_time() -> None:
    async with scene(config=GatewayConfig(ttft_target_s=0.05)) as at:
        at.cluster.replicas["c"].report(max_inflight=0)
        asking = ask(at)
        await placed(at.cluster.replicas["e"], asking)
        await say(at.cluster.replicas["e"], b"London", UNSURE, Finish.STOP)
        response = await asyncio.wait_for(asking, 5)

        assert content(response) == ["London"]
        assert (await escalation_of(at, response))["reason"] == "tier_full"
        assert_shown_late(at, 0.05)


@asynccontextmanager
async def provider(**behaviour: object) -> AsyncIterator[tuple[FakeServer, ProviderConfig]]:
    told = Behaviour(models=["huge"], ttft_s=Lengths(constant=0.005), gap_s=Lengths(constant=0.001), **behaviour)  # type: ignore[arg-type]
    async with FakeServer(told) as server:
        fields = {"name": "up", "base_url": server.url, "model": "huge", "served_names": [MODEL]}
        yield server, msgspec.convert(fields, ProviderConfig)


async def test_a_provider_may_be_the_cloud() -> None:
    async with provider() as (server, up), scene(members=(EDGE,), providers=[up]) as at:
        asking = ask(at, max_tokens=6)
        await placed(at.cluster.replicas["e"], asking)
        await say(at.cluster.replicas["e"], b"Lond", UNSURE)
        response = await asking

        assert len(content(response)[0].split()) == 6
        assert (response.headers["x-penstock-replica"], (await escalation_of(at, response))["outcome"]) == (
            "up",
            "escalated",
        )
        assert at.used.completion_tokens == 4 + 6
        assert len(server.truths) == 1


async def test_a_provider_that_took_it_and_fails_leaves_the_answer_to_the_edge_with_the_same_seed() -> None:
    async with provider(faults=[Fault(kind="status_500", share=1.0)]) as (_, up):
        async with scene(members=(EDGE,), providers=[up]) as at:
            edge = at.cluster.replicas["e"]
            asking = ask(at)
            await placed(edge, asking)
            await say(edge, b"Lond", UNSURE)
            async with asyncio.timeout(10):
                while len(edge.submits) < 2:  # noqa: ASYNC110 (the provider's failure comes over a socket)
                    await asyncio.sleep(0.001)
            await say(edge, b"London", UNSURE, Finish.STOP)
            response = await asking
            receipt = await escalation_of(at, response)

        assert content(response) == ["London"]
        assert edge.submits[0].sampling.seed == edge.submits[1].sampling.seed
        assert (receipt["outcome"], receipt["escalated"], receipt["reason"]) == ("no_cloud", False, "failed")
        trial = at.first_choice.trial
        assert trial is not None
        assert trial.first_token_s is None, "what was held was not shown"
        assert [each.pool for each in trial.vain] == ["edge", "up"], "what that cost counts"
        prompt = len(edge.submits[0].packed_token_ids) // 4
        assert at.used[:4] == (1, prompt, 0, 6), "nobody pays twice for a provider's failure"


async def test_a_breaker_that_is_open_is_the_reason() -> None:
    async with provider(faults=[Fault(kind="status_500", share=1.0)]) as (_, up):
        opened = msgspec.structs.replace(up, breaker_failures=1, breaker_open_s=60.0)
        async with scene("cloud_first", members=(EDGE,), providers=[opened]) as at:
            edge = at.cluster.replicas["e"]
            asking = ask(at)
            await placed(edge, asking)  # the provider has failed
            await say(edge, b"London", UNSURE, Finish.STOP)
            response = await asyncio.wait_for(asking, 5)
            receipt = await escalation_of(at, response)

        assert (content(response), receipt["outcome"], receipt["reason"]) == (["London"], "no_cloud", "breaker_open")


async def test_a_cap_on_what_the_provider_may_cost_is_the_reason() -> None:
    async with provider() as (server, up), scene(members=(EDGE,), providers=[up]) as at:
        start = at.cluster.dispatcher.start

        async def refuse(generation: Generation, listener: HoldListener | None = None) -> Mailbox:
            if generation.skipped is TierReason.ESCALATED:
                raise CapReached("the cap of 'up' is spent")
            return await start(generation, listener)

        at.cluster.dispatcher.start = refuse  # type: ignore[method-assign]
        asking = ask(at)
        await placed(at.cluster.replicas["e"], asking)
        await say(at.cluster.replicas["e"], b"London", UNSURE, Finish.STOP)
        response = await asking

        assert content(response) == ["London"]
        receipt = await escalation_of(at, response)
        assert (receipt["outcome"], receipt["reason"]) == ("no_cloud", "provider_cap")
        assert server.truths == []


async def test_a_constraint_that_the_edge_refuses_goes_to_the_cloud() -> None:
    async with scene() as at:
        asking = ask(at, response_format=SCHEMA)
        edge = at.cluster.replicas["e"]
        await placed(edge, asking)
        edge.finish(next(iter(edge.running)), Finish.INVALID, "a grammar of which this engine knows nothing")
        response = await answer_in_cloud(at, asking)

        receipt = await escalation_of(at, response)
        assert (receipt["outcome"], receipt["escalated"], receipt["held_tokens"]) == ("constraint", True, 0)
        prompt = len(at.cluster.replicas["c"].submits[0].packed_token_ids) // 4
        assert at.used[:4] == (1, prompt, 0, 6)
        assert at.counted("constraint") == 1


async def test_a_constraint_that_nobody_takes_is_refused_with_the_edges_reason() -> None:
    async with scene() as at:
        at.cluster.replicas["c"].die()
        asking = ask(at, response_format=SCHEMA)
        edge = at.cluster.replicas["e"]
        await placed(edge, asking)
        edge.finish(next(iter(edge.running)), Finish.INVALID, "a grammar of which this engine knows nothing")
        response = await asking

        assert (response.status_code, response.json()["error"]["message"]) == (
            400,
            "a grammar of which this engine knows nothing",
        )


async def test_an_edge_without_constraints_sends_them_on_before_it_computes_anything() -> None:
    unable = FakeMember("e", "edge", abilities=frozenset({Ability.BEAMS}))
    async with scene(members=(unable, CLOUD)) as at:
        response = await answer_in_cloud(at, ask(at, response_format=SCHEMA))

        assert (await escalation_of(at, response))["outcome"] == "constraint"
        assert at.submits("e") == 0


async def test_a_tenant_that_goes_to_the_cloud_first_is_not_held() -> None:
    async with scene("cloud_first") as at:
        response = await answer_in_cloud(at, ask(at))

        assert await escalation_of(at, response) is None
        assert at.submits("e") == 0


async def test_the_first_choice_decides_for_its_siblings() -> None:
    async with scene() as at:
        asking = ask(at, n=3)
        await placed(at.cluster.replicas["e"], asking)
        await say(at.cluster.replicas["e"], b"Lond", UNSURE)
        cloud = at.cluster.replicas["c"]
        await placed(cloud, asking)
        await say(cloud, b"Par", flip=1)
        await placed(cloud, asking, 3)
        await say(cloud, b"is.", finish=Finish.STOP, flip=1)
        response = await asking

        assert content(response) == ["Paris.", "is.", "is."]
        assert at.submits("e") == 1
        assert at.used.completion_tokens == 4 + 6 + 3 + 3


async def test_a_client_that_hangs_up_while_its_answer_is_held_has_used_what_was_held() -> None:
    async with scene() as at:
        asking = ask(at)
        edge = at.cluster.replicas["e"]
        await placed(edge, asking)
        await say(edge, b"Lo", UNSURE)
        asking.cancel()
        await settle()

        assert edge.aborts == [1]
        assert at.used[:4] == (1, len(edge.submits[0].packed_token_ids) // 4, 0, 2)


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_nothing_that_was_held_counts_where_the_engine_fails_before_anything_is_shown(num_prompts: int) -> None:
    async with scene() as at:
        asking = asyncio.ensure_future(at.world.complete(prompt=["ab"] * num_prompts, max_tokens=20))
        edge = at.cluster.replicas["e"]
        await placed(edge, asking, num_prompts)
        await say(edge, b"Lo", UNSURE)
        edge.finish(next(iter(edge.running)), Finish.ERROR, "a kernel that failed")
        response = await asking

        assert response.status_code == 500
        assert at.used[:4] == (1, 2 * num_prompts, 0, 0), "what was computed of the prompt counts as ever"


async def test_a_held_answer_goes_on_where_another_replica_takes_it_up() -> None:
    async with scene(members=(EDGE, EDGE_2, CLOUD)) as at:
        asking = ask(at)
        async with asyncio.timeout(10):
            while not (at.cluster.replicas["e"].running or at.cluster.replicas["e2"].running):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        first, second = sorted((at.cluster.replicas["e"], at.cluster.replicas["e2"]), key=lambda each: not each.running)
        await say(first, b"Pa", SURE)
        first.die()
        await placed(second, asking)
        resumed = second.submits[0]
        await say(second, b"ris", SURE, Finish.STOP)
        response = await asking

        assert content(response) == ["Paris"]
        assert (resumed.num_output_tokens, resumed.sampling.logprobs) == (2, 0)
        assert (await escalation_of(at, response))["held_tokens"] == 4
        assert at.used.completion_tokens == 5


async def test_log_probabilities_that_the_client_wants_keep_it_at_the_edge_where_the_cloud_has_other_tokens() -> None:
    async with scene() as at:
        asking = ask(at, logprobs=True)
        await placed(at.cluster.replicas["e"], asking)
        await say(at.cluster.replicas["e"], b"London", UNSURE, Finish.STOP)
        response = await asking

        receipt = await escalation_of(at, response)
        assert (receipt["outcome"], receipt["reason"], receipt["held_tokens"]) == ("no_cloud", "capability", 0)
        assert len(response.json()["choices"][0]["logprobs"]["content"]) == 6


async def test_log_probabilities_that_the_client_wants_are_the_answering_models() -> None:
    async with scene(models=("small", "small")) as at:
        asking = ask(at, logprobs=True)
        await placed(at.cluster.replicas["e"], asking)
        await say(at.cluster.replicas["e"], b"Lond", UNSURE)
        await placed(at.cluster.replicas["c"], asking)
        await say(at.cluster.replicas["c"], b"Paris", SURE, Finish.STOP)
        response = await asking

        shown = response.json()["choices"][0]["logprobs"]["content"]
        assert [(each["token"], each["logprob"]) for each in shown] == [(char, SURE) for char in "Paris"]


async def test_a_kept_answer_shows_no_log_probabilities_that_nobody_asked_for() -> None:
    async with scene() as at:
        asking = ask(at)
        await placed(at.cluster.replicas["e"], asking)
        await say(at.cluster.replicas["e"], b"Pari", SURE)
        await say(at.cluster.replicas["e"], b"s", SURE, Finish.STOP)
        response = await asking

        assert response.json()["choices"][0]["logprobs"] is None
        assert content(response) == ["Paris"]


async def test_a_search_is_not_judged() -> None:
    async with scene() as at:
        asking = asyncio.ensure_future(at.world.complete(use_beam_search=True, best_of=2, n=1, max_tokens=4))
        edge = at.cluster.replicas["e"]
        await placed(edge, asking)
        assert edge.submits[0].sampling.logprobs is None
        asking.cancel()
        await settle()


async def test_only_the_place_that_is_named_gets_it() -> None:
    rule = msgspec.structs.replace(RULE, to="up")
    async with provider() as (_, up), scene(providers=[up], rule=rule) as at:
        asking = ask(at, max_tokens=6)
        await placed(at.cluster.replicas["e"], asking)
        await say(at.cluster.replicas["e"], b"Lond", UNSURE)
        response = await asking

        assert response.headers["x-penstock-replica"] == "up"
        assert at.submits("c") == 0


async def test_a_call_of_a_tool_comes_from_the_model_that_answers() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    async with scene() as at:
        asking = ask(at, tools=tools, max_tokens=100)
        await placed(at.cluster.replicas["e"], asking)
        await say(at.cluster.replicas["e"], b"<tool_call>", UNSURE)
        await placed(at.cluster.replicas["c"], asking)
        call = b'<tool_call>{"name": "look", "arguments": {}}</tool_call>'
        await say(at.cluster.replicas["c"], call, finish=Finish.STOP, flip=1)
        response = await asking

        (found,) = response.json()["choices"][0]["message"]["tool_calls"]
        assert found["function"] == {"name": "look", "arguments": "{}"}
        assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tokens": 0, "min_mean_logprob": -1.0}, "escalation.tokens"),
        ({"tokens": 4, "min_mean_logprob": 0.5}, "0 at most, not 0.5"),
        ({"tokens": 4, "min_mean_logprob": float("nan")}, "not nan"),
    ],
)
def test_a_rule_that_can_not_be_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EscalationConfig(**fields)  # type: ignore[arg-type]
