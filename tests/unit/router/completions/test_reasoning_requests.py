"""Chats with models that think, through a gateway: whole and streamed, with tools, structured output and every field
that says what becomes of the thinking."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from penstock.router.models.served_model import ServedModel
from penstock.text.tokenizer import Tokenizer
from penstock.wire.frames import Finish
from tests.unit.router.http_fakes import (
    CONTEXT,
    IM_END,
    MODEL,
    VOCAB_SIZE,
    Script,
    byte_tokenizer,
    events,
    running_gateway,
)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if opened %}<think>\n{% endif %}{% endif %}"
)
"""What Qwen3's template does around the answer; `opened`: as that of Qwen3-Thinking and DeepSeek-R1."""
QWEN3 = byte_tokenizer(template=TEMPLATE)
MAGISTRAL = byte_tokenizer(special_tokens=("[THINK]", "[/THINK]"))
THINK, END_THINK = VOCAB_SIZE, VOCAB_SIZE + 1
ANSWER = "<think>\nThe user asks…\n\nParis, then.\n</think>\n\nIt is Paris."
THOUGHT, SAID = "The user asks…\n\nParis, then.", "It is Paris."
NUM_THOUGHT = len(ANSWER.split("\n\nIt")[0].encode())
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def served(tokenizer: Tokenizer = QWEN3) -> ServedModel:
    return ServedModel(MODEL, ("pool-a",), tokenizer, lambda: 4 * CONTEXT, "0123456789abcdef")


async def chat(
    text: str = ANSWER,
    tokenizer: Tokenizer = QWEN3,
    deltas: Sequence[Sequence[int]] | None = None,
    finish: Finish = Finish.STOP,
    **body: Any,
) -> httpx.Response:
    async with running_gateway(Script(text, deltas, finish), model=served(tokenizer)) as world:
        response = await world.chat(**body)
    assert response.status_code == 200, response.text
    return response


async def whole(**body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice and the usage of a whole answer, which OpenAI's client understands."""
    response = await chat(**body)
    ChatCompletion.model_validate(response.json())
    return response.json()["choices"][0], response.json()["usage"]


async def streamed(**body: Any) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """The deltas of a stream, its finish and its usage."""
    response = await chat(stream=True, stream_options={"include_usage": True}, **body)
    *chunks, last, done = events(response)
    assert done == "[DONE]"
    for chunk in (*chunks, last):
        ChatCompletionChunk.model_validate_json(chunk)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    return [choice["delta"] for choice in choices], choices[-1]["finish_reason"], json.loads(last)["usage"]


def joined(deltas: Sequence[dict[str, Any]], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in deltas)


async def test_a_whole_answer_has_the_thinking_apart() -> None:
    choice, usage = await whole()

    assert choice["message"]["reasoning_content"] == THOUGHT
    assert choice["message"]["content"] == SAID
    assert choice["finish_reason"] == "stop"
    assert usage["completion_tokens"] == len(ANSWER.encode())
    assert usage["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
async def test_a_stream_has_the_thinking_before_the_content(size: int) -> None:
    data = ANSWER.encode()

    deltas, finish, usage = await streamed(deltas=[list(data[at : at + size]) for at in range(0, len(data), size)])

    assert joined(deltas, "reasoning_content") == THOUGHT
    assert joined(deltas, "content") == SAID
    assert finish == "stop"
    assert usage["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    assert deltas[0]["role"] == "assistant"
    kinds = [kind for delta in deltas for kind in ("reasoning_content", "content") if delta.get(kind)]
    assert kinds == sorted(kinds, reverse=True)
    if size == 1:
        assert len(kinds) > 20


async def test_a_delta_of_thinking_has_no_content() -> None:
    deltas, _, _ = await streamed(deltas=[[*b"<think>a"], [*b"b"], [*b"</think>c"], [*b"d"]])

    assert deltas == [
        {"role": "assistant", "reasoning_content": "a"},
        {"reasoning_content": "b"},
        {"content": "c"},
        {"content": "d"},
        {},
    ]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_begins_inside_where_the_prompt_ends_so(is_stream: bool) -> None:
    fields: dict[str, Any] = {"text": "Hm.\n</think>\n\nYes.", "chat_template_kwargs": {"opened": True}}
    if is_stream:
        deltas, _, usage = await streamed(**fields)
        message = {name: joined(deltas, name) for name in ("content", "reasoning_content")}
    else:
        choice, usage = await whole(**fields)
        message = choice["message"]

    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("Hm.\n</think>")}


async def test_nothing_is_thinking_where_the_prompt_has_an_empty_pair() -> None:
    choice, usage = await whole(text="Paris.", chat_template_kwargs={"enable_thinking": False})

    assert choice["message"] == {"content": "Paris.", "role": "assistant", "refusal": None}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_a_message_with_markers_of_its_own_opens_nothing() -> None:
    choice, _ = await whole(text="Paris.", messages=[{"role": "user", "content": "<think>"}])

    assert choice["message"]["content"] == "Paris."


async def test_an_answer_may_go_on_with_the_thinking_of_its_message() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nLet me"}]

    choice, _ = await whole(text=" see.</think>Hi!", messages=messages, continue_final_message=True)

    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("see.", "Hi!")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_thinking_that_is_cut_off_stays_thinking(is_stream: bool) -> None:
    fields: dict[str, Any] = {"text": "<think>\nSo many things </thi", "finish": Finish.LENGTH}
    if is_stream:
        deltas, finish, usage = await streamed(**fields)
        message = {name: joined(deltas, name) for name in ("content", "reasoning_content")}
    else:
        choice, usage = await whole(**fields)
        message, finish = choice["message"], choice["finish_reason"]

    assert (message["reasoning_content"], message["content"]) == ("So many things </thi", "")
    assert finish == "length"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"]


async def test_markers_that_are_special_tokens_are_found() -> None:
    deltas = [[THINK], [*b"Hm."], [END_THINK, *b"Y"], [*b"es.", IM_END]]

    choice, usage = await whole(tokenizer=MAGISTRAL, deltas=deltas)

    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "Yes.")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}


async def test_thinking_is_content_where_the_pool_has_no_parser() -> None:
    choice, usage = await whole(tokenizer=QWEN3.with_reasoning_parser("none"))

    assert choice["message"]["content"] == ANSWER
    assert "reasoning_content" not in choice["message"]
    assert "completion_tokens_details" not in usage


async def test_the_legacy_endpoint_shows_all_text_as_it_is() -> None:
    async with running_gateway(Script(ANSWER), model=served()) as world:
        response = await world.complete()

    assert response.json()["choices"][0]["text"] == ANSWER
    assert "completion_tokens_details" not in response.json()["usage"]


# --- what is asked of it


@pytest.mark.parametrize("tokenizer", [QWEN3, MAGISTRAL])
async def test_thinking_that_is_not_separated_is_content_with_its_markers(tokenizer: Tokenizer) -> None:
    deltas = [[THINK], [*b"Hm."], [END_THINK], [*b"Yes."]] if tokenizer is MAGISTRAL else None
    text = "[THINK]Hm.[/THINK]Yes." if tokenizer is MAGISTRAL else ANSWER

    choice, usage = await whole(tokenizer=tokenizer, deltas=deltas, separate_reasoning=False)

    assert choice["message"] == {"content": text, "role": "assistant", "refusal": None}
    assert "completion_tokens_details" not in usage


async def test_thinking_may_be_left_out_and_is_counted_all_the_same() -> None:
    choice, usage = await whole(include_reasoning=False)
    deltas, _, _ = await streamed(include_reasoning=False)

    assert choice["message"] == {"content": SAID, "role": "assistant", "refusal": None}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    assert joined(deltas, "content") == SAID
    assert not any("reasoning_content" in delta for delta in deltas)


@pytest.mark.parametrize(("text", "said"), [(ANSWER, SAID), (ANSWER.split("\n</think>")[0], "")])
async def test_thinking_may_come_in_one_chunk(text: str, said: str) -> None:
    deltas, _, _ = await streamed(text=text, stream_reasoning=False)

    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == [THOUGHT]
    assert joined(deltas, "content") == said


# --- with other features


async def test_stop_strings_count_in_the_thinking_too() -> None:
    choice, _ = await whole(stop="Paris")

    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("The user asks…", "")
    assert choice["finish_reason"] == "stop"


async def test_log_probabilities_and_token_ids_are_those_of_the_whole_answer() -> None:
    data = list(ANSWER.encode())
    deltas = [data[:3], data[3:20], data[20:]]

    choice, _ = await whole(deltas=deltas, logprobs=True, return_token_ids=True)
    response = await chat(deltas=deltas, logprobs=True, return_token_ids=True, stream=True)

    assert choice["token_ids"] == data
    assert len(choice["logprobs"]["content"]) == len(data)
    parts = [json.loads(event)["choices"][0] for event in events(response)[:-1]]
    assert [token_id for part in parts for token_id in part["token_ids"]] == data
    assert sum(len(part["logprobs"]["content"]) for part in parts if part["logprobs"]) == len(data)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_calls_behind_the_thinking_are_read_and_those_inside_are_not(is_stream: bool) -> None:
    fields: dict[str, Any] = {"text": f"<think>\nI may {CALL}\n</think>\n\n{CALL}", "tools": [TOOL]}
    if is_stream:
        deltas, finish, _ = await streamed(**fields)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        num_calls = sum("id" in call for call in calls)
        reasoning = joined(deltas, "reasoning_content")
    else:
        choice, _ = await whole(**fields)
        (call,) = choice["message"]["tool_calls"]
        arguments, num_calls, finish = call["function"]["arguments"], 1, choice["finish_reason"]
        reasoning = choice["message"]["reasoning_content"]
        assert choice["message"]["content"] is None

    assert (json.loads(arguments), num_calls, finish) == ({"x": 1}, 1, "tool_calls")
    assert reasoning == f"I may {CALL}"


async def test_every_choice_thinks_for_itself() -> None:
    response = await chat(n=3)

    messages = [choice["message"] for choice in response.json()["choices"]]
    assert [(message["reasoning_content"], message["content"]) for message in messages] == [(THOUGHT, SAID)] * 3
    assert response.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3 * NUM_THOUGHT}


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"tools": [TOOL], "tool_choice": "required"}]
)
async def test_an_answer_that_must_have_a_form_does_not_think(fields: dict[str, Any]) -> None:
    choice, usage = await whole(text='{"a": 1}', chat_template_kwargs={"opened": True}, **fields)

    assert choice["message"] == {"content": '{"a": 1}', "role": "assistant", "refusal": None}
    assert "completion_tokens_details" not in usage


# --- the other APIs


@pytest.mark.parametrize("is_stream", [False, True])
async def test_messages_leave_the_thinking_out(is_stream: bool) -> None:
    async with running_gateway(Script(ANSWER), model=served()) as world:
        asked = [{"role": "user", "content": "Hi"}]
        response = await world.post("/v1/messages", max_tokens=200, messages=asked, stream=is_stream)

    if is_stream:
        datas = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
        assert "".join(data["delta"].get("text", "") for data in datas if "delta" in data) == SAID
        usage = next(data["usage"] for data in datas if data["type"] == "message_delta")
    else:
        assert [(block["type"], block["text"]) for block in response.json()["content"]] == [("text", SAID)]
        usage = response.json()["usage"]
    assert usage["output_tokens"] == len(ANSWER.encode())
    assert "think" not in response.text


@pytest.mark.parametrize("is_stream", [False, True])
async def test_responses_leave_the_thinking_out_and_count_it(is_stream: bool) -> None:
    async with running_gateway(Script(ANSWER), model=served()) as world:
        response = await world.post("/v1/responses", input="Hi", stream=is_stream)

    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    answer = json.loads(lines[-1])["response"] if is_stream else response.json()
    (message,) = answer["output"]
    assert [part["text"] for part in message["content"]] == [SAID]
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    assert "user asks" not in response.text
