import asyncio
import sys
from typing import Any

import msgspec
import pytest

from penstock.router.completions.candidates import Candidates, LazyPrompts, find_candidates
from penstock.router.config import PoolSpec, ProviderConfig
from penstock.router.models.catalogue import Checkpoint, build_served_models
from penstock.router.models.served_model import ServedModel
from penstock.router.routing.request import Route
from penstock.router.routing.tiers import TierReason, TierRule, parse_policy
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import ContextTooLong, Forbidden, InvalidRequest
from penstock.wire.frames import Constraint, SamplingParams, unpack_token_ids
from penstock.wire.openai import ChatMessageIn, ChatRequest
from tests.unit.router.http_fakes import OTHER_TOKENIZER, TOKENIZER

PROVIDER = msgspec.convert(
    {"name": "up", "base_url": "http://x/v1", "model": "huge", "served_names": ["m"]}, ProviderConfig
)
CHECKPOINTS = {"small": Checkpoint(TOKENIZER, "digest-small"), "large": Checkpoint(OTHER_TOKENIZER, "digest-large")}
CONTEXTS = {"small": 100, "large": 1000}


def pool(name: str, tier: str, model: str) -> PoolSpec:
    fields = {
        "name": name,
        "served_names": ["m"],
        "tier": tier,
        "model": model,
        "app_name": name,
        "max_model_len": CONTEXTS[model],
    }
    return msgspec.convert(fields, PoolSpec)


EDGE, EDGE_2, CLOUD, LARGE = (
    pool("e", "edge", "small"),
    pool("e2", "edge", "small"),
    pool("c", "cloud", "small"),
    pool("l", "cloud", "large"),
)


def serve(*pools: PoolSpec, providers: tuple[ProviderConfig, ...] = ()) -> ServedModel:
    models = build_served_models(pools, providers, CHECKPOINTS, lambda found: max(one.max_model_len for one in found))
    return models["m"]


def find(model: ServedModel, policy: str = "edge_first", stays: bool = False, **fields: Any) -> Candidates:
    request = ChatRequest(model="m", messages=[ChatMessageIn(role="user", content="Hi")], **fields)
    return find_candidates(model, TierRule(parse_policy(policy), stays), request, {"up": PROVIDER})


ALL = serve(LARGE, EDGE, EDGE_2, CLOUD, providers=(PROVIDER,))


def test_pools_of_one_tier_and_model_are_one_route_and_a_model_of_its_own_has_its_tokenizer() -> None:
    assert ALL.routes == (
        Route("cloud", ("l",)),
        Route("edge", ("e", "e2"), 1),
        Route("cloud", ("c",), 1),
        Route("cloud", (), provider="up"),
    )
    assert (ALL.digest, ALL.tokenizer, ALL.max_model_len()) == ("digest-large", OTHER_TOKENIZER, 1000)
    (small,) = ALL.others
    assert (small.digest, small.tokenizer, small.max_model_len(), small.pools) == (
        "digest-small",
        TOKENIZER,
        100,
        ("e", "e2", "c"),
    )


def test_edge_first_reads_for_the_edge_and_counts_models_from_there() -> None:
    found = find(ALL)

    assert found.model.tokenizer is TOKENIZER
    assert found.routes == (
        Route("edge", ("e", "e2"), 0),
        Route("cloud", ("l",), 1),
        Route("cloud", ("c",), 0),
        Route("cloud", (), provider="up"),
    )
    assert [other.digest for other in found.others] == ["digest-large"]
    assert found.pools == ("e", "e2", "l", "c", "up")
    assert (found.skipped, found.has_provider) == (None, True)


def test_cloud_first_reads_for_the_cloud() -> None:
    found = find(ALL, "cloud_first")

    assert found.model.tokenizer is OTHER_TOKENIZER
    assert [route.pools or (route.provider,) for route in found.routes] == [("l",), ("c",), ("up",), ("e", "e2")]


@pytest.mark.parametrize("policy", ["edge_only", "never_leave"])
def test_who_never_leaves_reaches_the_edge_and_nothing_else(policy: str) -> None:
    found = find(ALL, policy)

    assert found.pools == ("e", "e2")
    assert found.others == ()
    assert (found.max_prompt_tokens(), find(ALL).max_prompt_tokens()) == (100, None), "a provider may take more"
    assert found.beyond_first_model() is None
    with pytest.raises(Forbidden):
        find(serve(CLOUD), policy)


@pytest.mark.parametrize("policy", ["edge_first", "cloud_first", "edge_only"])
def test_a_request_that_stays_reaches_the_edge_and_nothing_else(policy: str) -> None:
    found = find(ALL, policy, stays=True)

    assert (found.pools, found.has_provider, found.others) == (("e", "e2"), False, ())
    assert [route.tier for route in found.routes] == ["edge"]
    with pytest.raises(Forbidden, match="organization" if policy == "edge_only" else "x-penstock-stay"):
        find(serve(CLOUD), policy, stays=True)


def test_by_cost_each_pool_is_a_route_of_its_own_also_where_a_model_has_one_route() -> None:
    found = find(ALL, "cheapest_within_target")
    staying = find(ALL, "cheapest_within_target", stays=True)
    alone = find(serve(EDGE, EDGE_2), "cheapest_within_target")

    assert [route.pools or (route.provider,) for route in found.routes] == [("e",), ("e2",), ("l",), ("c",), ("up",)]
    assert [route.model for route in found.routes] == [0, 0, 1, 0, 0]
    assert [route.pools for route in staying.routes] == [route.pools for route in alone.routes] == [("e",), ("e2",)]


def test_what_speaks_of_token_ids_stays_with_the_first_model() -> None:
    found = find(ALL, logprobs=True)

    assert found.pools == ("e", "e2", "c")
    assert found.others == ()


def test_what_a_provider_does_not_know_does_not_go_there_and_that_is_a_reason_where_it_came_first() -> None:
    model = serve(EDGE, providers=(PROVIDER,))

    assert find(model, "cloud_first").skipped is None
    found = find(model, "cloud_first", top_k=5)
    assert (found.pools, found.skipped) == (("e",), TierReason.CAPABILITY)


def test_beyond_a_context_too_short_are_the_other_models_and_providers() -> None:
    found = find(ALL).beyond_first_model()

    assert found is not None
    assert found.model.tokenizer is OTHER_TOKENIZER
    assert (found.pools, found.skipped) == (("l", "up"), TierReason.CONTEXT_TOO_LONG)
    last = found.beyond_first_model()
    assert last is not None
    assert (last.pools, last.max_model_len()) == (("up",), sys.maxsize)
    assert last.beyond_first_model() is None


def test_one_pool_is_one_route() -> None:
    model = serve(CLOUD)

    assert find(model) == Candidates(model, (Route("cloud", ("c",)),))
    assert find(serve(EDGE), "never_leave").pools == ("e",)


async def test_a_further_model_is_read_once_for_all_choices_and_only_when_asked() -> None:
    read: list[Tokenizer] = []

    async def prompts(tokenizer: Tokenizer, max_tokens: int | None) -> list[list[int]]:
        assert max_tokens == CONTEXTS["large"]
        read.append(tokenizer)
        return [tokenizer.encode(text, add_special=False) for text in ("one", "three")]

    lazy_prompts = LazyPrompts(find(ALL).others, prompts, SamplingParams(0, seed=5), default_max_tokens=20)
    first, sibling = (lazy_prompts.for_sequence(1, choice)[0] for choice in (0, 1))
    assert read == []
    await first.load()
    await sibling.load()
    await sibling.load()

    assert read == [OTHER_TOKENIZER]
    assert first.tokenized is not None
    assert sibling.tokenized is not None
    assert unpack_token_ids(first.tokenized.packed_token_ids) == [byte ^ 1 for byte in b"three"]
    assert (first.tokenized.num_prompt_tokens, first.tokenized.sampling.max_tokens) == (5, 20)
    assert (first.tokenized.sampling.seed, sibling.tokenized.sampling.seed != 5) == (5, True)
    assert first.answering_model == ("fp_digest-large", OTHER_TOKENIZER)


async def test_prompts_that_are_wanted_at_the_same_time_are_read_once_and_refused_once() -> None:
    num_read = 0

    async def prompts(tokenizer: Tokenizer, max_tokens: int | None) -> list[list[int]]:
        nonlocal num_read
        num_read += 1
        await asyncio.sleep(0)
        if is_refused:
            raise InvalidRequest("no")
        return [[number] for number in range(128)]

    for is_refused in (False, True):
        num_read = 0
        lazy_prompts = LazyPrompts(find(ALL).others, prompts, SamplingParams(0), default_max_tokens=20)
        loaded = [lazy_prompts.for_sequence(number, 0)[0] for number in range(128)]
        await asyncio.gather(*(prompt.load() for prompt in loaded))

        assert num_read == 1
        assert all((prompt.error is not None) is is_refused for prompt in loaded)
        assert all((prompt.tokenized is None) is is_refused for prompt in loaded)


async def test_a_further_model_that_is_too_small_says_so() -> None:
    async def prompts(tokenizer: Tokenizer, max_tokens: int | None) -> list[list[int]]:
        return [[1] * 200]

    lazy_prompts = LazyPrompts(find(ALL, "cloud_first").others, prompts, SamplingParams(0), default_max_tokens=20)
    (other,) = lazy_prompts.for_sequence(0, 0)
    await other.load()

    assert isinstance(other.error, ContextTooLong)
    assert other.tokenized is None


async def test_each_further_model_has_its_own_words_for_what_an_answer_must_be() -> None:
    async def prompts(tokenizer: Tokenizer, max_tokens: int | None) -> list[list[int]]:
        return [[1, 2]]

    def constrain(tokenizer: Tokenizer) -> Constraint:
        assert tokenizer is OTHER_TOKENIZER
        return Constraint("regex", "a+")

    others = find(ALL).others
    for given, expected in ((constrain, Constraint("regex", "a+")), (None, None)):
        (other,) = LazyPrompts(others, prompts, SamplingParams(0), 20, given).for_sequence(0, 0)
        await other.load()

        assert other.tokenized is not None
        assert other.tokenized.constraint == expected
