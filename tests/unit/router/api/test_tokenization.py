"""/tokenize and /detokenize: what a prompt is read as, whose time that is, and what is refused."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from penstock.router.completions.fair_threads import FairThreads
from penstock.router.config import GatewayConfig
from penstock.router.models.served_model import ServedModel
from penstock.tenancy.tenants import Limits, Settings
from penstock.text.tokenizer import Tokenizer
from penstock.wire.frames import unpack_token_ids
from tests.unit.router.http_fakes import (
    CONTEXT,
    IM_END,
    IM_START,
    MODEL,
    TOKENIZER,
    VOCAB_SIZE,
    World,
    byte_tokenizer,
    running_gateway,
)

USER = {"role": "user", "content": "Hi"}
TEMPLATE = (
    "{{ greeting }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


def served(tokenizer: Tokenizer, max_model_len: int = CONTEXT) -> ServedModel:
    return ServedModel(MODEL, ("pool-a",), tokenizer, lambda: max_model_len, "0123456789abcdef")


WITH_PREFIX = served(byte_tokenizer(template=TEMPLATE, prefix_ids=(IM_START,)))


async def tokens_of(world: World, **fields: Any) -> list[int]:
    response = await world.post("/tokenize", **fields)

    assert response.status_code == 200, response.text
    found = response.json()
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), CONTEXT)
    return list(found["tokens"])


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


async def test_the_tokens_of_a_prompt_and_a_chat_are_those_that_a_completion_is_made_of() -> None:
    async with running_gateway(model=WITH_PREFIX) as world:
        chat = {"messages": [USER], "chat_template_kwargs": {"greeting": "Yo"}}
        await world.complete(prompt="Hi there")
        await world.chat(**chat)
        prompts = [unpack_token_ids(each.packed_token_ids) for each in world.dispatcher.generations]

        assert await tokens_of(world, prompt="Hi there") == prompts[0] == [IM_START, *b"Hi there"]
        assert await tokens_of(world, **chat) == prompts[1]


async def test_tools_are_part_of_a_chats_tokens() -> None:
    chat = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    async with running_gateway(model=served(byte_tokenizer(template=TEMPLATE), 4 * CONTEXT)) as world:
        await world.chat(**chat)
        response = await world.post("/tokenize", **chat)

        (generation,) = world.dispatcher.generations
        token_ids = response.json()["tokens"]
        assert token_ids == unpack_token_ids(generation.packed_token_ids)
        assert b"get_weather" in bytes(token_id for token_id in token_ids if token_id < 256)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "a", "add_special_tokens": False}, [*b"a"]),
        ({"prompt": ""}, [IM_START]),
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"prompt": "<|im_end|>", "add_special_tokens": False}, [IM_END]),
        ({"messages": [USER]}, [IM_START, *b"user\nHi", IM_END, *b"\n", IM_START, *b"assistant"]),
        ({"messages": [USER], "add_generation_prompt": False}, [IM_START, *b"user\nHi", IM_END, *b"\n"]),
        ({"messages": [USER], "continue_final_message": True}, [IM_START, *b"user\nHi"]),
    ],
)
async def test_a_prompt_is_read_as_it_is_wanted(fields: dict[str, Any], expected: list[int]) -> None:
    async with running_gateway(model=WITH_PREFIX) as world:
        assert await tokens_of(world, **fields) == expected


async def test_tokens_are_spelled_where_that_is_asked_for() -> None:
    async with running_gateway() as world:
        with_texts = (await world.post("/tokenize", prompt="a é<|im_end|>", return_token_strs=True)).json()
        without = (await world.post("/tokenize", prompt="a")).json()

        assert with_texts["token_strs"] == ["a", "\u0120", "Ã", "©", "<|im_end|>"]
        assert without["token_strs"] is None


@pytest.mark.parametrize("text", ["", "Hello", "é 🎈\n", "<|im_start|>user<|im_end|>", "a" * 300])
async def test_what_was_tokenized_can_be_read_again(text: str) -> None:
    async with running_gateway() as world:
        found = await world.post("/detokenize", tokens=await tokens_of(world, prompt=text))

        assert found.json() == {"prompt": text}


async def test_the_only_model_need_not_be_named_and_one_of_several_must() -> None:
    async with running_gateway() as world:
        assert (await world.client.post("/tokenize", json={"prompt": "a"})).json()["tokens"] == [*b"a"]
    models = {name: replace(WITH_PREFIX, name=name) for name in ("one", "two")}
    async with running_gateway(models=models) as world:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
            assert error(await world.client.post(path, json=body)) == (
                400,
                "Several models are served; 'model' must name one of them.",
            )
            assert (await world.client.post(path, json={**body, "model": "two"})).status_code == 200
            assert (await world.client.post(path, json={**body, "model": "three"})).status_code == 404


@pytest.mark.parametrize(
    ("path", "fields", "status", "words"),
    [
        ("/tokenize", {}, 400, "Either 'prompt' or 'messages'"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "Either 'prompt' or 'messages'"),
        ("/tokenize", {"prompt": ["a"]}, 400, "Invalid value for 'prompt'"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": [USER], "chat_template": "x"}, 400, "it is a program"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"messages": []}}, 400, "can't set 'messages'"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, 400, "role 'tool'"),
        ("/tokenize", {"prompt": "a" * (CONTEXT + 1)}, 400, "maximum context length"),
        ("/tokenize", {"prompts": "a"}, 400, "did you mean 'prompt'?"),
        ("/detokenize", {}, 400, "Missing required parameter: 'tokens'"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, 400, f"'tokens' holds {VOCAB_SIZE}"),
        ("/detokenize", {"tokens": [-1]}, 400, "Invalid value for 'tokens[0]'"),
        ("/detokenize", {"tokens": "a"}, 400, "Invalid value for 'tokens'"),
    ],
)
async def test_what_can_not_be_read_is_refused_with_a_sentence(
    path: str, fields: dict[str, Any], status: int, words: str
) -> None:
    async with running_gateway() as world:
        found = error(await world.post(path, **fields))

        assert found[0] == status
        assert words in found[1]


async def test_both_need_a_key_and_a_post() -> None:
    async with running_gateway() as world:
        assert (await world.client.get("/tokenize")).status_code == 405
        del world.client.headers["authorization"]
        assert (await world.post("/tokenize", prompt="a")).status_code == 401
        assert (await world.post("/detokenize", tokens=[1])).status_code == 401


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})])
async def test_each_is_charged_as_a_request(path: str, body: dict[str, Any]) -> None:
    settings = Settings(limits=Limits(requests_per_minute=2))
    async with running_gateway(settings=settings, num_gateways=1) as world:
        responses = [await world.post(path, **body) for _ in range(3)]
        page = (await world.client.get("/metrics")).text

        assert [response.status_code for response in responses] == [200, 200, 429]
        assert responses[0].headers["x-ratelimit-remaining-requests"] == "1"
        assert f'penstock_requests_total{{code="200",model="{MODEL}"}} 2.0' in page


async def test_unknown_fields_are_named_and_strictly_refused() -> None:
    async with running_gateway() as world:
        assert (await world.post("/tokenize", prompt="a", foo=1)).headers["x-penstock-ignored-fields"] == "foo"
    async with running_gateway(config=GatewayConfig(strict=True)) as world:
        assert (await world.post("/detokenize", tokens=[1], foo=1)).status_code == 400


class Watched(FairThreads):
    """Threads that note whose work they do, and what it costs."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, int]] = []

    async def run(self, tenant: str, cost: int, work: Any) -> Any:
        self.done.append((tenant, cost))
        return await super().run(tenant, cost, work)


async def test_long_ones_take_their_turn_in_the_threads_for_prompts() -> None:
    watched = Watched()
    async with running_gateway(model=served(TOKENIZER, 100_000), threads=watched) as world:
        await world.post("/tokenize", prompt="a" * 100)
        await world.post("/detokenize", tokens=[97] * 100)
        assert watched.done == []
        await world.post("/tokenize", prompt="a" * 10_000, return_token_strs=True)
        await world.post("/detokenize", tokens=[97] * 5_000)

    assert watched.done == [("tenant-1", 10_000), ("tenant-1", 10_000), ("tenant-1", 5_000)]
