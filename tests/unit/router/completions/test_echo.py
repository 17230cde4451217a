"""What an answer shows of its prompt: `echo`, `prompt_logprobs` and `max_tokens: 0`, whole and as a stream."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from penstock.router.completions.echo import PART_TOKENS
from penstock.router.config import GatewayConfig
from penstock.router.models.served_model import ServedModel
from penstock.wire.frames import Finish
from penstock.wire.openai import ChatCompletion, TextCompletion
from tests.unit.router.http_fakes import (
    CONTEXT,
    IM_START,
    MODEL,
    Script,
    World,
    byte_tokenizer,
    events,
    running_gateway,
)

PROMPT = "The gate is shut, the mill stands still."
NO_OUTPUT = Script(deltas=[[]], finish=Finish.LENGTH)
BOS = ServedModel(MODEL, ("pool-a",), byte_tokenizer(prefix_ids=(IM_START,)), lambda: CONTEXT, "0123456789abcdef")


def choice_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


async def error_of(world: World, **body: object) -> Any:
    response = await world.complete(**body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_an_echo_stands_before_the_answer_and_is_no_output() -> None:
    async with running_gateway(Script("Paris.")) as world:
        response = await world.complete(prompt=PROMPT, echo=True)

        assert choice_of(response)["text"] == PROMPT + "Paris."
        assert response.json()["usage"]["completion_tokens"] == len("Paris.")
        assert response.json()["usage"]["prompt_tokens"] == len(PROMPT)
        assert world.dispatcher.generations[0].sampling.prompt_logprobs is None


async def test_log_probabilities_of_an_echo_are_one_list_with_the_answers() -> None:
    async with running_gateway(Script("ab")) as world:
        choice = choice_of(await world.complete(prompt=PROMPT, echo=True, logprobs=2))

        assert world.dispatcher.generations[0].sampling.prompt_logprobs == 2
        logprobs, count = choice["logprobs"], len(PROMPT)
        assert logprobs["tokens"] == list(PROMPT + "ab")
        assert logprobs["token_logprobs"] == [None] + [-0.25] * (count - 1) + [-0.5] * 2
        assert logprobs["text_offset"] == list(range(count + 2))
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][1] == {"\x00": -1.0, "\x01": -2.0, "h": -0.25}


async def test_nothing_is_generated_where_only_the_prompt_is_wanted() -> None:
    async with running_gateway(NO_OUTPUT) as world:
        response = await world.complete(prompt=PROMPT, echo=True, logprobs=0, max_tokens=0)
        choice = choice_of(response)

        assert world.dispatcher.generations[0].sampling.max_tokens == 0
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.25] * (len(PROMPT) - 1)
        assert choice["logprobs"]["top_logprobs"][1] == {"h": -0.25}
        assert response.json()["usage"]["completion_tokens"] == 0


async def test_prompt_log_probabilities_come_by_vllms_format() -> None:
    async with running_gateway(Script("ab")) as world:
        text = await world.complete(prompt="Hi!", prompt_logprobs=1, n=2)
        chat = await world.chat(prompt_logprobs=1)

        first = {"105": {"logprob": -0.25, "rank": 3, "decoded_token": "i"}}
        top = {"0": {"logprob": -1.0, "rank": 1, "decoded_token": "\x00"}}
        last = {"33": {"logprob": -0.25, "rank": 3, "decoded_token": "!"}}
        assert [each["prompt_logprobs"] for each in text.json()["choices"]] == [[None, first | top, last | top]] * 2
        assert text.json()["choices"][0]["text"] == "ab"
        assert [each.sampling.prompt_logprobs for each in world.dispatcher.generations[:2]] == [1, None]
        entries = chat.json()["prompt_logprobs"]
        assert len(entries) == chat.json()["usage"]["prompt_tokens"]
        assert entries[0] is None
        assert "prompt_logprobs" not in chat.json()["choices"][0]


async def test_each_choice_of_each_prompt_shows_its_prompt() -> None:
    async with running_gateway(Script("ab")) as world:
        response = await world.complete(prompt=["One", "Two!"], n=2, echo=True, logprobs=0)
        choices = response.json()["choices"]

        assert [choice["text"] for choice in choices] == ["Oneab", "Oneab", "Two!ab", "Two!ab"]
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [5, 5, 6, 6]


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_the_parts_of_a_stream_are_the_whole_answer(logprobs: int | None) -> None:
    prompt = PROMPT * 3
    async with running_gateway(Script("Paris.")) as world:
        body = {"prompt": prompt, "echo": True, "logprobs": logprobs, "n": 2}
        whole = (await world.complete(**body)).json()["choices"]
        streamed = await world.complete(**body, stream=True)
        chunks = [json.loads(event)["choices"][0] for event in events(streamed)[:-1]]

        for index in range(2):
            own = [chunk for chunk in chunks if chunk["index"] == index]
            assert "".join(chunk["text"] for chunk in own) == whole[index]["text"] == prompt + "Paris."
            if logprobs is not None:
                parts = [chunk["logprobs"] for chunk in own if chunk["logprobs"] is not None]
                assert len(parts) >= len(prompt) // PART_TOKENS
                for name, values in whole[index]["logprobs"].items():
                    assert [value for part in parts for value in part[name]] == values


async def test_a_token_put_in_front_of_the_text_is_no_part_of_the_echo() -> None:
    async with running_gateway(Script("a"), model=BOS) as world:
        choice = choice_of(await world.complete(prompt="Hi", echo=True, logprobs=0))

        assert choice["text"] == "Hia"
        assert choice["logprobs"]["tokens"] == ["<|im_start|>", "H", "i", "a"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]


async def test_an_echo_of_token_ids_is_what_they_spell() -> None:
    async with running_gateway(Script("a")) as world:
        ids = [*"é".encode(), IM_START, 33]
        plain = choice_of(await world.complete(prompt=ids, echo=True, logprobs=0))
        special = choice_of(await world.complete(prompt=ids, echo=True, skip_special_tokens=False))
        cut = choice_of(await world.complete(prompt="Hello", echo=True, truncate_prompt_tokens=2))

        assert plain["text"] == "é!a"
        assert plain["logprobs"]["text_offset"] == [0, 0, 1, 1, 2]
        assert special["text"] == "é<|im_start|>!a"
        assert cut["text"] == "loa"


async def test_a_chat_echoes_the_message_that_the_answer_goes_on_with() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    async with running_gateway(Script(", yes")) as world:
        body = {"messages": messages, "continue_final_message": True, "echo": True}
        whole = await world.chat(**body)
        streamed = await world.chat(**body, stream=True)
        other = await world.chat(messages=messages[:1], echo=True)

        assert choice_of(whole)["message"]["content"] == "Well, yes"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events(streamed)[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == "Well, yes"
        assert [delta.get("role") for delta in deltas].count("assistant") == 1
        assert choice_of(other)["message"]["content"] == ", yes"


async def test_a_prompt_of_one_token_has_no_log_probability() -> None:
    async with running_gateway(NO_OUTPUT) as world:
        choice = choice_of(await world.complete(prompt="H", echo=True, logprobs=1, max_tokens=0, prompt_logprobs=0))

        assert choice["logprobs"]["token_logprobs"] == [None]
        assert choice["prompt_logprobs"] == [None]


async def test_answers_are_of_the_documented_types() -> None:
    async with running_gateway(Script("ab")) as world:
        text = await world.complete(prompt=PROMPT, echo=True, logprobs=2, prompt_logprobs=2)
        chat = await world.chat(prompt_logprobs=2)

        assert msgspec.json.decode(text.content, type=TextCompletion).choices[0].text == PROMPT + "ab"
        assert msgspec.json.decode(chat.content, type=ChatCompletion).choices[0].message.content == "ab"


async def test_what_can_not_be_asked_for_is_refused() -> None:
    async with running_gateway() as world:
        nothing = await error_of(world, max_tokens=0)
        stream = await error_of(world, prompt_logprobs=1, stream=True)
        few = await error_of(world, echo=True, max_tokens=0, min_tokens=1)
        many = await error_of(world, prompt_logprobs=21)

        assert (nothing["param"], stream["param"], few["param"]) == ("max_tokens", "prompt_logprobs", "min_tokens")
        assert "prompt_logprobs" in many["message"]
        assert world.dispatcher.generations == []


async def test_what_is_shown_of_prompts_counts_as_size_of_the_answer() -> None:
    async with running_gateway(NO_OUTPUT, config=GatewayConfig(max_answer_tokens=100)) as world:
        fine = await world.complete(prompt="x" * 20, echo=True, logprobs=1, max_tokens=0)
        error = await error_of(world, prompt="x" * 20, echo=True, logprobs=3, max_tokens=0)  # 20 * (1 + 2 + 3) entries

        assert fine.status_code == 200
        assert "120" in error["message"]
