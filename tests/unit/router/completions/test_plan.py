from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.completions.endpoint import CHAT, COMPLETION
from penstock.router.completions.plan import plan
from penstock.router.config import GatewayConfig
from penstock.router.models.served_model import ServedModel
from penstock.router.transport.exchange import Exchange
from penstock.tenancy.tenants import Tenant
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import unpack_token_ids
from penstock.wire.openai import MAX_CHOICES, ChatMessageIn, ChatRequest, CompletionRequest, StreamOptions
from tests.unit.router.http_fakes import CONTEXT, TOKENIZER

SERVED = ServedModel("tiny", ("pool-a",), TOKENIZER, lambda: CONTEXT, "0123456789abcdef")
TENANT = Tenant("tenant-1", b"salt")
MESSAGES = [ChatMessageIn(role="user", content="Hi")]
DEPS = cast(
    GatewayDependencies,
    SimpleNamespace(
        config=GatewayConfig(request_timeout_s=60.0),
        providers={},
        random=Random(0),
        now=lambda: 1_000.5,
        clock=lambda: 50.5,
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
    [({"n": MAX_CHOICES, "prompt": ["a", "b"]}, "n"), ({"stream_options": StreamOptions()}, "stream_options")],
)
async def test_what_can_not_be_planned_is_refused_with_its_parameter(fields: dict[str, Any], param: str) -> None:
    request = CompletionRequest(model="tiny", **{"prompt": "a", **fields})

    with pytest.raises(InvalidRequest) as caught:
        await plan(DEPS, exchange(), TENANT, SERVED, COMPLETION, request)

    assert caught.value.param == param
