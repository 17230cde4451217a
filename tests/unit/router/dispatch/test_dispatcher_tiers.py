"""Dispatch over several tiers: pools of the same model, of another one, and a provider (a real server on loopback)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from penstock.base.errors import PenstockError
from penstock.router.config import GatewayConfig, ProviderConfig
from penstock.router.dispatch.mailbox import Mailbox
from penstock.router.routing.request import (
    AnsweringModel,
    Generation,
    LazyPrompt,
    ProviderRequest,
    Route,
    TokenizedPrompt,
)
from penstock.wire.errors import ContextTooLong, InvalidRequest, Overloaded, ReplicaLost
from penstock.wire.frames import Finish, SamplingParams, pack_token_ids, unpack_token_ids
from penstock.wire.openai import ChatMessageIn, ChatRequest
from penstock_loadtest.fake.behaviour import Behaviour, Fault, Shedding
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.scenario import Lengths
from tests.unit.router.fleet_fakes import Cluster, FakeMember, answer_to, generation, settle
from tests.unit.router.http_fakes import OTHER_TOKENIZER

EDGE, EDGE_2, CLOUD = FakeMember("e", "edge"), FakeMember("e2", "edge"), FakeMember("c", "cloud")
LARGE = FakeMember("l", "cloud", model_digest="large")
PROMPT, OTHER_PROMPT = list(range(10, 40)), list(range(100, 120))
ANSWERER = AnsweringModel("fp_large", OTHER_TOKENIZER)
EDGE_ROUTE, CLOUD_ROUTE, LARGE_ROUTE = (
    Route("edge", ("edge",)),
    Route("cloud", ("cloud",)),
    Route("cloud", ("cloud",), model=1),
)
PROVIDER_ROUTE = Route("cloud", (), provider="up")
BUSY = 100_000
"""Prefill tokens outstanding of a replica that is far over any target."""
PROVIDER_REQUEST = ProviderRequest(
    ChatRequest(model="m", messages=[ChatMessageIn(role="user", content="What is the capital of France?")])
)


class Reader:
    """Reads the prompt for the other model, or fails to."""

    def __init__(self, error: PenstockError | None = None) -> None:
        self.num_read = 0
        self._error = error

    async def read(self) -> TokenizedPrompt:
        self.num_read += 1
        await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        return TokenizedPrompt(pack_token_ids(OTHER_PROMPT), len(OTHER_PROMPT), SamplingParams(6, seed=5))


def routed(*routes: Route, reader: Reader | None = None, **changes: object) -> Generation:
    places = tuple(dict.fromkeys(place for route in routes for place in (route.pools or (route.provider or "",))))
    plain = generation(PROMPT, pools=places)
    lazy_prompts = () if reader is None else (LazyPrompt(reader.read, ANSWERER),)
    fields = (
        {name: getattr(plain, name) for name in plain.__dataclass_fields__}
        | {"routes": routes, "lazy_prompts": lazy_prompts, "provider_request": PROVIDER_REQUEST}
        | changes
    )
    return Generation(**fields)


def busy(cluster: Cluster, replica: str = "e") -> None:
    cluster.replicas[replica].report(prefill_tokens_outstanding=BUSY)


def decisions(cluster: Cluster, **labels: str) -> float:
    return cluster.metrics.registry.get_sample_value("penstock_tier_decisions_total", labels) or 0.0


async def test_below_the_target_the_first_tier_gets_it_and_nothing_is_read_for_another() -> None:
    async with Cluster(EDGE, LARGE) as cluster:
        reader = Reader()
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, LARGE_ROUTE, reader=reader))
        stream.close()

        assert (stream.receipt.tier, stream.receipt.tier_reason, stream.receipt.considered) == (
            "edge",
            "preferred",
            [],
        )
        assert reader.num_read == 0


async def test_the_target_is_that_of_the_requests_class() -> None:
    async with Cluster(EDGE, CLOUD) as cluster:
        busy(cluster)
        tiers = []
        for target_s in (None, 1e6):
            stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, CLOUD_ROUTE, ttft_target_s=target_s))
            stream.close()
            tiers.append((stream.receipt.tier, stream.receipt.tier_reason))

        assert tiers == [("cloud", "predicted_ttft"), ("edge", "preferred")]
        assert stream.receipt.placed_s is not None


async def test_over_the_target_another_tiers_model_gets_its_own_tokens() -> None:
    async with Cluster(EDGE, LARGE) as cluster:
        busy(cluster)
        reader = Reader()
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, LARGE_ROUTE, reader=reader))
        tokens = await cluster.read(stream)
        stream.close()

        submit = cluster.replicas["l"].submits[0]
        receipt = stream.receipt
        assert unpack_token_ids(submit.packed_token_ids) == OTHER_PROMPT
        assert tokens == answer_to(OTHER_PROMPT, 6)
        assert (receipt.tier, receipt.tier_reason, receipt.pool) == ("cloud", "predicted_ttft", "cloud")
        assert (receipt.answering_model, receipt.num_prompt_tokens) == (ANSWERER, len(OTHER_PROMPT))
        assert [(seen.tier, seen.places, seen.obstacle) for seen in receipt.considered] == [
            ("edge", ("edge",), None),
            ("cloud", ("cloud",), None),
        ]
        assert receipt.scores.keys() == {"e", "l"}
        assert reader.num_read == 1
        assert decisions(cluster, pool="cloud", tier="cloud", reason="predicted_ttft") == 1


@pytest.mark.parametrize("error", [ContextTooLong("too long"), InvalidRequest("the template refuses")])
async def test_a_model_that_cannot_take_it_leaves_it_where_it_is(error: PenstockError) -> None:
    async with Cluster(EDGE, LARGE) as cluster:
        busy(cluster)
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, LARGE_ROUTE, reader=Reader(error)))
        stream.close()

        assert (stream.receipt.tier, stream.receipt.tier_reason) == ("edge", "none_better")
        assert not cluster.replicas["l"].submits


async def test_a_tier_lost_before_the_first_token_is_left() -> None:
    async with Cluster(EDGE, LARGE) as cluster:
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, LARGE_ROUTE, reader=Reader()))
        cluster.replicas["e"].die()
        tokens = await cluster.read(stream)
        stream.close()

        assert tokens == answer_to(OTHER_PROMPT, 6)
        assert (stream.receipt.tier_reason, stream.receipt.attempts) == ("tier_down", 2)


async def test_after_the_first_token_the_same_model_of_another_tier_goes_on_to_the_token() -> None:
    async with Cluster(EDGE, CLOUD) as cluster:
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, CLOUD_ROUTE))
        cluster.step(3)
        head = (await stream.next()).token_ids
        cluster.replicas["e"].die()
        tail = await cluster.read(stream)
        stream.close()

        assert head + tail == answer_to(PROMPT, 8)
        assert (stream.receipt.tier, stream.receipt.tier_reason) == ("cloud", "tier_down")


async def test_after_the_first_token_no_other_model_and_no_provider_goes_on() -> None:
    async with Cluster(
        EDGE, LARGE, config=GatewayConfig(queue_timeout_s=0.05), providers=[provider("http://127.0.0.1:9/v1")]
    ) as cluster:
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, LARGE_ROUTE, PROVIDER_ROUTE, reader=Reader()))
        cluster.step(3)
        await stream.next()
        cluster.replicas["e"].die()
        with pytest.raises(ReplicaLost):
            await stream.next()
        stream.close()

        assert not cluster.replicas["l"].submits
        assert await outcomes(cluster) == {}


async def test_a_request_with_the_edge_alone_waits_and_goes_nowhere_else() -> None:
    async with Cluster(EDGE, CLOUD, config=GatewayConfig(queue_timeout_s=0.05)) as cluster:
        cluster.replicas["e"].die()
        with pytest.raises(Overloaded):
            await cluster.dispatcher.start(routed(EDGE_ROUTE))

        assert not cluster.replicas["c"].submits


async def test_who_waits_for_any_tier_takes_the_first_place_that_becomes_free() -> None:
    async with Cluster(EDGE, LARGE, max_inflight=1) as cluster:
        blocking = [
            await cluster.dispatcher.start(routed(route, reader=Reader())) for route in (EDGE_ROUTE, LARGE_ROUTE)
        ]
        waiting = [
            asyncio.ensure_future(cluster.dispatcher.start(routed(EDGE_ROUTE, LARGE_ROUTE, reader=Reader())))
            for _ in range(3)
        ]
        await settle()
        assert not any(task.done() for task in waiting)
        blocking[1].close()
        first = await waiting[0]
        blocking[0].close()
        second = await waiting[1]
        first.close()
        third = await waiting[2]

        assert [stream.receipt.pool for stream in (first, second, third)] == ["cloud", "edge", "cloud"]
        assert first.receipt.tier_reason == "tier_full"
        for stream in (second, third):
            stream.close()


async def test_a_context_too_short_at_the_edge_is_a_reason() -> None:
    async with Cluster(FakeMember("e", "edge", max_model_len=20), CLOUD) as cluster:
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, CLOUD_ROUTE))
        stream.close()

        assert (stream.receipt.tier, stream.receipt.tier_reason) == ("cloud", "context_too_long")


async def test_a_refusal_at_the_edge_is_a_reason_and_every_refusal_is_the_end() -> None:
    async with Cluster(EDGE, CLOUD) as cluster:
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, CLOUD_ROUTE))
        reading = asyncio.ensure_future(stream.next())
        await settle()
        cluster.replicas["e"].finish(1, Finish.REFUSED)
        await settle()
        assert (stream.receipt.tier, stream.receipt.tier_reason) == ("cloud", "refused")
        assert stream.receipt.is_taken
        cluster.replicas["c"].finish(1, Finish.REFUSED)
        with pytest.raises(Overloaded):
            await reading
        stream.close()
        assert not stream.receipt.is_taken, "nobody has it, and nobody counts it"


async def test_refused_by_the_one_and_not_readable_by_the_other_it_is_over_at_once() -> None:
    async with Cluster(EDGE, LARGE) as cluster:
        stream = await cluster.dispatcher.start(
            routed(EDGE_ROUTE, LARGE_ROUTE, reader=Reader(InvalidRequest("the template refuses")))
        )
        reading = asyncio.ensure_future(stream.next())
        await settle()
        cluster.replicas["e"].finish(1, Finish.REFUSED)
        with pytest.raises(Overloaded):
            await reading
        stream.close()


# --- a provider


def provider(url: str, **changes: object) -> ProviderConfig:
    fields = {
        "name": "up",
        "base_url": url,
        "model": "large",
        "served_names": ("m",),
        "ttft_s": 0.02,
        "timeout_s": 5.0,
    } | changes
    return msgspec.convert(fields, ProviderConfig)


async def outcomes(cluster: Cluster) -> dict[str, float]:
    await settle()
    return {
        sample.labels["outcome"]: sample.value
        for metric in cluster.metrics.provider_requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (the server on the other end of the socket has no event for it)
        await asyncio.sleep(0.001)


QUICK = Behaviour(models=["large"], ttft_s=Lengths(constant=0.005), gap_s=Lengths(constant=0.001))


@asynccontextmanager
async def busy_edge(behaviour: Behaviour, **changes: object) -> AsyncIterator[tuple[Cluster, FakeServer]]:
    """A busy edge, and a provider's server behind it."""
    async with (
        asyncio.timeout(20),
        FakeServer(behaviour) as server,
        Cluster(EDGE, providers=[provider(server.url, **changes)]) as cluster,
    ):
        busy(cluster)
        yield cluster, server


async def whole_text(stream: Mailbox) -> tuple[str, int, Finish]:
    """Text, tokens and end of an answer that comes as text."""
    text, num_tokens = "", 0
    while True:
        delta = await stream.next()
        text, num_tokens = text + delta.text, num_tokens + delta.num_tokens
        assert delta.token_ids == []
        if delta.finish is not None:
            return text, num_tokens, delta.finish


async def test_a_provider_answers_in_text_with_its_own_counts() -> None:
    async with busy_edge(msgspec.structs.replace(QUICK, tokens_per_chunk=Lengths(constant=3))) as (cluster, server):
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        stream.listen(lambda delta: pytest.fail("a listener takes token ids"))
        text, num_tokens, finish = await whole_text(stream)
        stream.close()

        assert len(text.split()) == num_tokens == 8
        assert finish is Finish.LENGTH
        receipt = stream.receipt
        assert (receipt.tier, receipt.tier_reason, receipt.pool, receipt.replica) == (
            "cloud",
            "predicted_ttft",
            "up",
            "up",
        )
        assert receipt.num_prompt_tokens == server.truths[0].prompt_tokens == 6
        assert receipt.predicted_ttft_s == receipt.scores["up"] == 0.02
        assert await outcomes(cluster) == {"finished": 1}


async def test_what_it_costs_is_counted() -> None:
    async with busy_edge(QUICK, input_price=3.0, output_price=15.0) as (cluster, _):
        stream = await cluster.dispatcher.start(routed(PROVIDER_ROUTE))
        await whole_text(stream)
        stream.close()

        assert cluster.metrics.registry.get_sample_value(
            "penstock_provider_cost_total", {"provider": "up"}
        ) == pytest.approx((6 * 3 + 8 * 15) / 1e6)


async def test_an_answer_that_was_cut_costs_what_had_come() -> None:
    async with busy_edge(
        msgspec.structs.replace(QUICK, gap_s=Lengths(constant=60.0)), input_price=3.0, output_price=15.0
    ) as (cluster, _):
        stream = await cluster.dispatcher.start(routed(PROVIDER_ROUTE))
        await stream.next()
        stream.close()
        await settle()

        cost = cluster.metrics.registry.get_sample_value("penstock_provider_cost_total", {"provider": "up"})
        assert cost == pytest.approx((len(PROMPT) * 3 + 1 * 15) / 1e6), "the prompt as the edge counts it"


@pytest.mark.parametrize("fault", ["status_500", "close_before_headers"])
async def test_a_provider_that_fails_before_its_first_token_is_replaced_unseen(fault: str) -> None:
    async with busy_edge(
        msgspec.structs.replace(QUICK, faults=[msgspec.convert({"kind": fault, "share": 1.0}, Fault)])
    ) as (cluster, _):
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        tokens = await edge_answer(cluster, stream)
        stream.close()

        assert tokens == answer_to(PROMPT, 8)
        assert (stream.receipt.tier, stream.receipt.tier_reason, stream.receipt.attempts) == ("edge", "none_better", 2)
        assert stream.receipt.answering_model is None


async def test_an_answer_that_waits_for_the_edge_to_go_on_holds_up_nobody_who_may_leave() -> None:
    async with busy_edge(QUICK) as (cluster, _):
        cluster.replicas["e"].report()
        begun = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        cluster.step(3)
        await begun.next()
        cluster.replicas["e"].die()
        waiting = asyncio.ensure_future(begun.next())
        await settle()
        assert len(cluster.queue) == 1
        newcomer = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        await whole_text(newcomer)
        newcomer.close()

        assert (newcomer.receipt.tier, newcomer.receipt.tier_reason) == ("cloud", "tier_down")
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        begun.close()


async def edge_answer(cluster: Cluster, stream: Mailbox) -> list[int]:
    reading = asyncio.ensure_future(stream.next())
    await until(lambda: bool(cluster.replicas["e"].running))
    cluster.step(8)
    return (await reading).token_ids


@pytest.mark.parametrize("fault", ["close_mid_stream", "error_event"])
async def test_a_provider_that_fails_in_the_middle_ends_the_answer_with_an_error(fault: str) -> None:
    async with busy_edge(
        msgspec.structs.replace(QUICK, faults=[msgspec.convert({"kind": fault, "share": 1.0}, Fault)])
    ) as (cluster, _):
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        with pytest.raises(ReplicaLost):
            await whole_text(stream)
        stream.close()

        assert not cluster.replicas["e"].submits
        assert await outcomes(cluster) == {"failed": 1}


async def test_a_provider_that_says_nothing_is_given_up_in_time() -> None:
    async with busy_edge(msgspec.structs.replace(QUICK, faults=[Fault(kind="hang", share=1.0)]), timeout_s=0.1) as (
        cluster,
        _,
    ):
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        assert await edge_answer(cluster, stream) == answer_to(PROMPT, 8)
        stream.close()

        assert await outcomes(cluster) == {"failed": 1}


BROKEN_ONCE = msgspec.structs.replace(QUICK, faults=[Fault(kind="status_500", numbers=[0])])


async def test_after_failures_in_a_row_it_is_not_asked() -> None:
    async with busy_edge(BROKEN_ONCE, breaker_failures=1, breaker_open_s=60.0) as (cluster, server):
        reasons = []
        for _ in range(4):
            stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
            await edge_answer(cluster, stream)
            busy(cluster)
            reasons.append([seen.obstacle for seen in stream.receipt.considered][1])
            stream.close()

        assert reasons == ["refused", "breaker_open", "breaker_open", "breaker_open"]
        assert len(server.truths) == 1


async def test_after_the_pause_it_is_asked_again_for_those_that_wait() -> None:
    async with busy_edge(BROKEN_ONCE, breaker_failures=1, breaker_open_s=0.3) as (cluster, server):
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        await edge_answer(cluster, stream)
        stream.close()
        cluster.replicas["e"].die()
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))  # waits for the end of the pause
        _, num_tokens, _ = await whole_text(stream)
        stream.close()

        assert (num_tokens, len(server.truths)) == (8, 2)


async def test_a_provider_at_its_limit_is_left_alone_for_as_long_as_it_asks() -> None:
    async with busy_edge(msgspec.structs.replace(QUICK, shedding=Shedding(concurrency=0, retry_after_s=30))) as (
        cluster,
        server,
    ):
        for expected in ("refused", "breaker_open"):
            stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
            await edge_answer(cluster, stream)
            busy(cluster)
            stream.close()
            assert stream.receipt.considered[1].obstacle == expected

        assert len(server.truths) == 1


async def test_what_a_provider_says_of_the_request_is_final_only_where_nobody_else_is_left() -> None:
    async with busy_edge(msgspec.structs.replace(QUICK, refused_fields=["max_tokens"])) as (cluster, _):
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        assert await edge_answer(cluster, stream) == answer_to(PROMPT, 8)
        stream.close()
        cluster.replicas["e"].die()
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        with pytest.raises(InvalidRequest, match=r"Unrecognized request argument supplied: max_tokens\."):
            await stream.next()
        stream.close()

        assert cluster.providers.has_available, "it is in good health"


async def test_a_client_that_hangs_up_ends_the_providers_request_too() -> None:
    async with busy_edge(msgspec.structs.replace(QUICK, gap_s=Lengths(constant=60.0))) as (cluster, server):
        stream = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        await stream.next()
        stream.close()
        await until(lambda: server.truths[0].end_s is not None)

        assert server.truths[0].outcome == "gone"
        assert await outcomes(cluster) == {"cut": 1}


async def test_closed_before_it_was_asked_a_provider_has_room_again() -> None:
    async with busy_edge(QUICK, max_concurrency=1) as (cluster, _):
        for _ in range(3):
            stream = await cluster.dispatcher.start(routed(PROVIDER_ROUTE))
            stream.close()
            await settle()

        stream = await cluster.dispatcher.start(routed(PROVIDER_ROUTE))
        await whole_text(stream)
        stream.close()
        assert await outcomes(cluster) == {"cut": 3, "finished": 1}


async def test_no_more_requests_are_there_at_once_than_allowed() -> None:
    async with busy_edge(QUICK, max_concurrency=1) as (cluster, _):
        first = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        second = await cluster.dispatcher.start(routed(EDGE_ROUTE, PROVIDER_ROUTE))
        waiting = asyncio.ensure_future(cluster.dispatcher.start(routed(PROVIDER_ROUTE)))
        await settle()
        assert not waiting.done()
        await whole_text(first)
        third = await waiting

        assert [stream.receipt.tier for stream in (first, second, third)] == ["cloud", "edge", "cloud"]
        assert second.receipt.considered[1].obstacle == "tier_full"
        for stream in (first, second, third):
            stream.close()
