"""Constrained requests go only where answers can be made to keep to a constraint."""

import asyncio

import pytest

from penstock.router.routing.request import AnsweringModel, Generation, LazyPrompt, Route, TokenizedPrompt
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Ability, Constraint, SamplingParams, pack_token_ids
from tests.unit.router.fleet_fakes import Cluster, FakeMember, answer_to, generation, settle

ABLE, OTHER = FakeMember("a"), FakeMember("b")
OTHERS_ONLY = frozenset(Ability) - {Ability.CONSTRAINTS}
UNABLE = FakeMember("u", max_model_len=2000, abilities=OTHERS_ONLY)
WANTED, OWN = Constraint("regex", "a+"), Constraint("regex", "b+")
PROMPT = list(range(10, 40))


async def test_of_several_replicas_one_that_is_able_gets_the_constraint() -> None:
    async with Cluster(UNABLE, ABLE) as cluster:
        cluster.replicas["a"].report(prefill_tokens_outstanding=100_000)  # the other one would be much sooner
        bound, free = [await cluster.start(PROMPT, constraint=wanted) for wanted in (WANTED, None)]

        assert [submit.constraint for submit in cluster.replicas["a"].submits] == [WANTED]
        assert [submit.constraint for submit in cluster.replicas["u"].submits] == [None]
        for stream in (bound, free):
            stream.close()


async def test_where_none_is_able_the_request_is_refused_at_once() -> None:
    async with Cluster(UNABLE) as cluster:
        with pytest.raises(InvalidRequest, match="keep to"):
            await cluster.start(PROMPT, constraint=WANTED)

        assert not cluster.replicas["u"].submits


async def test_where_nobody_is_connected_the_request_waits() -> None:
    async with Cluster(ABLE, UNABLE) as cluster:
        cluster.fleet.update([])
        starting = asyncio.ensure_future(cluster.start(PROMPT, constraint=WANTED))
        await settle()
        assert not starting.done()
        cluster.fleet.update([ABLE])
        stream = await starting

        assert stream.receipt.replica == "a"
        stream.close()


async def test_a_lost_answer_goes_on_with_its_constraint_where_somebody_is_able() -> None:
    async with Cluster(ABLE, OTHER, UNABLE) as cluster:
        stream = await cluster.start(PROMPT, constraint=WANTED)
        first = cluster.replicas[stream.receipt.replica]
        cluster.step(3)
        head = (await stream.next()).token_ids
        first.die()
        tail = await cluster.read(stream)
        stream.close()

        assert head + tail == answer_to(PROMPT, 8)
        (resumed,) = cluster.replicas["b" if first.member is ABLE else "a"].submits
        assert (resumed.constraint, resumed.num_output_tokens) == (WANTED, 3)
        assert not cluster.replicas["u"].submits


async def test_a_tier_that_is_not_able_is_passed_over_for_one_that_is() -> None:
    edge, cloud = FakeMember("e", "edge", abilities=OTHERS_ONLY), FakeMember("c", "cloud")
    async with Cluster(edge, cloud) as cluster:
        plain = generation(PROMPT, pools=("edge", "cloud"), constraint=WANTED)
        fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
        routes = (Route("edge", ("edge",)), Route("cloud", ("cloud",)))
        stream = await cluster.dispatcher.start(Generation(**fields | {"routes": routes}))

        assert (stream.receipt.tier, stream.receipt.tier_reason) == ("cloud", "capability")
        stream.close()


async def test_another_model_gets_the_constraint_in_its_own_words() -> None:
    async def read() -> TokenizedPrompt:
        return TokenizedPrompt(pack_token_ids([7, 8]), 2, SamplingParams(8, seed=5), OWN)

    edge, cloud = FakeMember("e", "edge", abilities=OTHERS_ONLY), FakeMember("c", "cloud", model_digest="large")
    async with Cluster(edge, cloud) as cluster:
        plain = generation(PROMPT, pools=("edge", "cloud"), constraint=WANTED)
        fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
        changes = {
            "routes": (Route("edge", ("edge",)), Route("cloud", ("cloud",), model=1)),
            "lazy_prompts": (LazyPrompt(read, AnsweringModel("fp_large", None)),),
        }
        stream = await cluster.dispatcher.start(Generation(**fields | changes))

        assert [submit.constraint for submit in cluster.replicas["c"].submits] == [OWN]
        stream.close()
