import gc
import tracemalloc
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.router.completions.admission import can_ever_fit
from penstock.router.completions.completion import Completion
from penstock.router.completions.constraints import ConstraintChecker
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.completions.endpoint import CHAT, COMPLETION
from penstock.router.completions.fair_threads import FairThreads
from penstock.router.completions.plan import plan
from penstock.router.completions.receipts import Receipts
from penstock.router.config import EscalationConfig, GatewayConfig
from penstock.router.models.request_targets import RequestTargets
from penstock.router.models.served_model import ServedModel
from penstock.router.routing.request import Receipt, Route
from penstock.router.transport.exchange import Exchange
from penstock.tenancy.tariffs import FREE, Tariff
from penstock.tenancy.tenants import Limits, Tenant
from penstock.text.seen import SeenTexts
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Constraint, unpack_token_ids
from penstock.wire.money import NANO
from penstock.wire.openai import MAX_CHOICES, ChatMessageIn, ChatRequest, CompletionRequest, StreamOptions
from penstock.wire.targets import ClassTargets, Target
from tests.unit.router.http_fakes import CONTEXT, TOKENIZER

SERVED = ServedModel("tiny", ("pool-a",), TOKENIZER, lambda: CONTEXT, "0123456789abcdef")
ESCALATING = replace(
    SERVED,
    routes=(Route("edge", ("pool-a",)), Route("cloud", ("pool-b",))),
    escalation=EscalationConfig(tokens=4, min_mean_logprob=-1.0),
)
TENANT = Tenant("tenant-1", b"salt")
MESSAGES = [ChatMessageIn(role="user", content="Hi")]
DEPS = cast(
    GatewayDependencies,
    SimpleNamespace(
        config=GatewayConfig(request_timeout_s=60.0, max_answer_tokens=2000),
        providers={},
        random=Random(0),
        now=lambda: 1_000.5,
        clock=lambda: 50.5,
        threads=FairThreads(),
        seen=SeenTexts(),
        admission=SimpleNamespace(find_tariff=lambda _model, _adapter: FREE),
        targets=RequestTargets({"tiny": ClassTargets(standard=Target(ttft_s=0.75))}),
    ),
)


def exchange() -> Exchange:
    unused: Any = None
    return Exchange({"method": "POST", "path": "/", "headers": []}, unused, unused, "r", 0.0)


async def test_choices_are_numbered_through_all_prompts_and_each_has_a_seed_of_its_own() -> None:
    request = CompletionRequest(model="tiny", prompt=["ab", "c"], n=2, seed=5, max_tokens=7)

    planned = await plan(DEPS, exchange(), TENANT, SERVED, COMPLETION, request)

    choices = [choice for prompt in planned.prompts for choice in prompt]
    generations = [choice.generation for choice in choices]
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    assert [generation.request_id for generation in generations] == ["r", "r-1", "r-2", "r-3"]
    assert [bytes(unpack_token_ids(generation.packed_token_ids)) for generation in generations] == [
        b"ab",
        b"ab",
        b"c",
        b"c",
    ]
    first, second = ([choice.generation.sampling.seed for choice in prompt] for prompt in planned.prompts)
    assert first == second
    assert (first[0], first[1] != 5) == (5, True)
    assert {generation.deadline for generation in generations} == {110.5}
    assert len({id(choice.assembler) for choice in choices}) == 4


async def test_a_plan_knows_the_form_of_the_answer() -> None:
    options = StreamOptions(include_usage=True)
    streamed = ChatRequest(model="tiny", messages=MESSAGES, stream=True, stream_options=options, logprobs=True)

    planned = await plan(DEPS, exchange(), TENANT, SERVED, CHAT, streamed)

    meta = planned.answer_format.meta
    assert planned.is_stream
    assert (meta.id, meta.created, meta.model, meta.fingerprint) == ("chatcmpl-r", 1000, "tiny", "fp_0123456789ab")
    assert (meta.has_usage_chunk, meta.has_logprobs, meta.has_token_ids) == (True, True, False)
    whole = await plan(DEPS, exchange(), TENANT, SERVED, CHAT, ChatRequest(model="tiny", messages=MESSAGES))
    assert not whole.is_stream


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": MAX_CHOICES, "prompt": ["a", "b"]}, "n"),
        ({"stream_options": StreamOptions()}, "stream_options"),
        ({"n": 5, "max_tokens": 401}, "max_tokens"),
        ({"n": 5, "max_tokens": 19, "logprobs": 20}, "max_tokens"),
        ({"prompt": ["a"] * 5, "max_tokens": 401}, "max_tokens"),
    ],
)
async def test_what_can_not_be_planned_is_refused_with_its_parameter(fields: dict[str, Any], param: str) -> None:
    request = CompletionRequest(model="tiny", **{"prompt": "a", **fields})

    with pytest.raises(InvalidRequest) as caught:
        await plan(DEPS, exchange(), TENANT, SERVED, COMPLETION, request)

    assert caught.value.param == param


async def test_the_size_of_an_answer_has_a_ceiling_that_an_answer_without_max_tokens_keeps_to() -> None:
    async def granted(**fields: Any) -> int:
        request = CompletionRequest(model="tiny", **{"prompt": "a", **fields})
        planned = await plan(DEPS, exchange(), TENANT, SERVED, COMPLETION, request)
        return planned.prompts[0][0].generation.sampling.max_tokens

    assert await granted(n=5, max_tokens=400) == 400
    assert await granted(n=5, max_tokens=18, logprobs=20) == 18
    assert await granted(n=20) == 100
    assert await granted(n=50, logprobs=20) == 1
    with pytest.raises(InvalidRequest, match=r"5 times 19 tokens, each with .* of 20 .* at most 18 tokens"):
        await granted(n=5, max_tokens=19, logprobs=20)


async def test_the_choices_of_a_request_share_all_that_is_large() -> None:
    stops = [f"{number:02}" + "ab" * 127 for number in range(16)]
    request = CompletionRequest(model="tiny", prompt="a" * 300, n=MAX_CHOICES, stop=stops, max_tokens=1)
    await plan(DEPS, exchange(), TENANT, SERVED, COMPLETION, request)

    tracemalloc.start()
    try:
        planned = await plan(DEPS, exchange(), TENANT, SERVED, COMPLETION, request)
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert len(planned.prompts[0]) == MAX_CHOICES
    assert num_bytes < 2**20 + MAX_CHOICES * 2048


async def test_every_sequence_of_a_request_has_its_constraint() -> None:
    deps = cast(GatewayDependencies, SimpleNamespace(**vars(DEPS), constraints=ConstraintChecker()))
    request = CompletionRequest(model="tiny", prompt=["ab", "c"], n=2, max_tokens=7, guided_regex="a+")

    planned = await plan(deps, exchange(), TENANT, SERVED, COMPLETION, request)

    found = [choice.generation.constraint for prompt in planned.prompts for choice in prompt]
    assert found == [Constraint("regex", "a+")] * 4


async def test_every_sequence_has_the_target_of_its_tenants_class() -> None:
    request = CompletionRequest(model="tiny", prompt=["ab", "c"], n=2, max_tokens=7)

    planned = await plan(DEPS, exchange(), TENANT, SERVED, COMPLETION, request)

    assert {choice.generation.ttft_target_s for prompt in planned.prompts for choice in prompt} == {0.75}


async def test_a_constraint_that_can_not_be_enforced_is_refused_before_anything_is_planned() -> None:
    deps = cast(GatewayDependencies, SimpleNamespace(**vars(DEPS), constraints=ConstraintChecker()))
    request = CompletionRequest(model="tiny", prompt="a", guided_regex="(a")

    with pytest.raises(InvalidRequest) as caught:
        await plan(deps, exchange(), TENANT, SERVED, COMPLETION, request)

    assert caught.value.param == "guided_regex"


async def test_a_salt_of_the_requests_own_narrows_what_is_reused() -> None:
    async def scope(**fields: Any) -> tuple[bytes, str]:
        request = CompletionRequest(model="tiny", prompt="a", **fields)
        planned = await plan(DEPS, exchange(), TENANT, SERVED, COMPLETION, request)
        generation = planned.prompts[0][0].generation
        return generation.salt, generation.cache_scope

    assert await scope() == (b"salt", "")
    first, again, other = await scope(cache_salt="x"), await scope(cache_salt="x"), await scope(cache_salt="y")
    assert first == again
    assert len({b"salt", first[0], other[0]}) == 3
    assert len({"", first[1], other[1]}) == 3


async def test_what_a_receipt_keeps_of_a_trial_does_not_grow_with_the_prompt() -> None:
    model = replace(ESCALATING, max_model_len=lambda: 10**6)
    receipts, unused = Receipts(max_kept=8), cast(Any, None)

    async def answer(number: int) -> None:
        deps = cast(GatewayDependencies, SimpleNamespace(**{**vars(DEPS), "seen": SeenTexts()}))
        request = CompletionRequest(model="tiny", prompt="a" * 100_000, max_tokens=1)
        planned = await plan(deps, exchange(), TENANT, model, COMPLETION, request)
        (choice,) = planned.prompts[0]
        assert choice.trial is not None
        choice.receipt = Receipt("r")
        receipts.keep(f"r{number}", "t", "tiny", 0, Completion(planned.prompts, unused, unused, unused))

    tracemalloc.start()
    try:
        await answer(0)  # the thread that encodes keeps what it did last
        num_before = tracemalloc.get_traced_memory()[0]
        for number in range(1, 5):
            await answer(number)
        gc.collect()
        num_bytes = tracemalloc.get_traced_memory()[0] - num_before
    finally:
        tracemalloc.stop()

    assert len(receipts.find("r4", "t").choices) == 1
    assert num_bytes < 100_000


@pytest.mark.parametrize(
    ("limits", "is_tried"),
    [
        (None, True),
        (Limits(tokens_per_minute=2 * 10 + 4 + 20), True),
        (Limits(tokens_per_minute=2 * 10 + 4 + 20 - 1), False),
        (Limits(tokens_per_minute=10 + 20), False),
        (Limits(budget=(2 * 10 + 4 + 20) / 1e6), True),
        (Limits(budget=(2 * 10 + 4 + 19) / 1e6), False),
        (Limits(requests_per_minute=1), True),
    ],
)
async def test_a_request_that_fits_but_for_an_attempt_at_the_edge_is_not_tried_there(
    limits: Limits | None, is_tried: bool
) -> None:
    tariff = Tariff(NANO, NANO, NANO)
    admission = SimpleNamespace(find_tariff=lambda _model, _adapter: tariff)
    deps = cast(GatewayDependencies, SimpleNamespace(**{**vars(DEPS), "admission": admission}))
    tenant = replace(TENANT, limits=limits)
    request = CompletionRequest(model="tiny", prompt="a" * 10, max_tokens=20)

    planned = await plan(deps, exchange(), tenant, ESCALATING, COMPLETION, request)

    (choice,) = planned.prompts[0]
    assert choice.trial is not None
    assert choice.generation.num_judged_tokens == (4 if is_tried else 0)
    assert (choice.trial.escalation.obstacle is None) == is_tried
    assert can_ever_fit(limits, planned.prompts, tariff), "and so it is not refused"
    choice.trial.note_placed(Receipt("r", "edge"), is_constrained=False)
    assert (choice.trial.outcome, choice.trial.reason) == ((None, "") if is_tried else ("no_cloud", "limit"))


async def test_an_attempt_at_the_edge_does_not_shorten_an_answer_without_max_tokens() -> None:
    tenant = replace(TENANT, limits=Limits(tokens_per_minute=100))
    planned = await plan(
        DEPS, exchange(), tenant, ESCALATING, COMPLETION, CompletionRequest(model="tiny", prompt="a" * 40)
    )

    assert planned.prompts[0][0].generation.sampling.max_tokens == 60
