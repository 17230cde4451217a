"""What a request holds while its answer runs, and how a long answer leaves."""

import asyncio
import gc
import json
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest

from penstock.router.completions import turns
from penstock.router.completions.endpoint import SENT_BYTES
from penstock.wire.bodies import count_values
from penstock.wire.openai import ChatCompletion, ChatRequest
from tests.unit.router.http_fakes import Script, running_gateway

SEED = 987_654_321


def find_requests() -> list[ChatRequest]:
    """Every request with that seed that is anywhere in memory."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), ChatRequest) and found.seed == SEED]


async def test_neither_body_nor_request_is_held_while_the_answer_runs() -> None:
    async with running_gateway(Script("ab", hold_after=1)) as world:
        asking = asyncio.create_task(world.chat(metadata={"a": ["b"]}, seed=SEED))
        await world.dispatcher.until(lambda: bool(world.dispatcher.streams))
        await asyncio.sleep(0)
        held = find_requests()
        world.dispatcher.streams[0].resume()
        response = await asking

        assert held == []
        assert response.status_code == 200


@pytest.mark.parametrize("num_chars", [SENT_BYTES // 2, 3 * SENT_BYTES])
async def test_a_long_answer_leaves_in_pieces_and_is_the_same_answer(num_chars: int) -> None:
    async with running_gateway(Script(deltas=[list(b"a" * num_chars)])) as world:
        response = await world.chat(return_token_ids=True)

        (choice,) = msgspec.json.decode(response.content, type=ChatCompletion).choices
        assert choice.message.content == "a" * num_chars
        assert choice.token_ids == [97] * num_chars
        assert response.headers["content-length"] == str(len(response.content))
        assert response.headers["x-penstock-replica"] == "replica-1"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_while_a_long_answer_with_log_probabilities_is_encoded_others_get_their_turn(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.0)  # a pause after each part
    num_tokens, num_top = 4000, 20
    is_chat = path.endswith("chat/completions")
    fields = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": num_top}
    body = {"model": "tiny", **(fields if is_chat else {"prompt": "Hi", "logprobs": num_top}), "max_tokens": 20}
    async with running_gateway(Script(deltas=[[97] * num_tokens])) as world:
        asking = asyncio.create_task(world.client.post(path, content=json.dumps(body)))
        await world.dispatcher.until(lambda: bool(world.dispatcher.streams) and not world.dispatcher.num_open)
        num_turns = 0
        while not asking.done():
            await asyncio.sleep(0)
            num_turns += 1
        response = await asking

        assert num_turns > num_tokens / 20
        answer = msgspec.json.decode(response.content)
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["content"] if is_chat else logprobs["tokens"]) == num_tokens


async def test_while_a_large_body_is_looked_at_others_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.0)  # a pause after each step
    events: list[str] = []

    def noted(body: bytes) -> Iterator[None]:
        for step in count_values(body):
            events.append("step")
            yield step

    monkeypatch.setattr(turns, "count_values", noted)
    async with running_gateway(Script("a")) as world:
        asking = asyncio.create_task(world.chat(metadata=["x" * 100] * 10_000))
        while not asking.done():
            await asyncio.sleep(0)
            events.append("turn")

        assert (await asking).status_code == 200
        assert events.count("step") > 50
        assert ("step", "step") not in pairwise(events)
