"""Whole answers in parts: the same JSON as at once, and no part takes long."""

import msgspec
import pytest

from penstock.router.completions.formats import (
    PART_TOKENS,
    ChatFormat,
    FinishedCall,
    FinishedChoice,
    Format,
    ResponseMeta,
    TextFormat,
)
from penstock.router.completions.logprobs import chat_logprobs, text_logprobs
from penstock.router.completions.text_assembly import TextPiece
from penstock.router.routing.request import CallDelta
from penstock.wire.frames import TokenLogprobs
from penstock.wire.openai import ChatCompletion, PromptTokensDetails, TextCompletion, Usage
from tests.unit.router.http_fakes import TOKENIZER

USAGE = Usage(3, 5, 8, PromptTokensDetails(1))
HOSTILE = '"choices":[] "content":[] {"tokens":[],"token_logprobs":[]} \\'


def choice(index: int, num_tokens: int, text: str = HOSTILE) -> FinishedChoice:
    token_ids = [number % 256 for number in range(num_tokens)]
    logprobs = [TokenLogprobs(-float(number), ((65, -0.5), (200, -1.5))) for number in range(num_tokens)]
    return FinishedChoice(index, text, "length", token_ids, logprobs, list(range(num_tokens)))


def meta(has_logprobs: bool, has_token_ids: bool) -> ResponseMeta:
    return ResponseMeta("id-1", 7, HOSTILE, "fp", TOKENIZER, has_logprobs=has_logprobs, has_token_ids=has_token_ids)


CHOICES = [choice(0, 1), choice(1, PART_TOKENS), choice(2, 3 * PART_TOKENS + 1), choice(3, 0)]


@pytest.mark.parametrize("has_logprobs", [True, False])
@pytest.mark.parametrize("has_token_ids", [True, False])
def test_the_parts_of_a_chat_are_its_json(has_logprobs: bool, has_token_ids: bool) -> None:
    whole = b"".join(ChatFormat(meta(has_logprobs, has_token_ids)).whole(CHOICES, USAGE))

    answer = msgspec.json.decode(whole, type=ChatCompletion)
    assert msgspec.json.encode(answer) == whole
    assert (answer.id, answer.model, answer.usage) == ("id-1", HOSTILE, USAGE)
    for ours, theirs in zip(CHOICES, answer.choices, strict=True):
        assert (theirs.index, theirs.message.content, theirs.finish_reason) == (ours.index, ours.text, "length")
        assert theirs.token_ids == (ours.token_ids if has_token_ids else msgspec.UNSET)
        wanted = chat_logprobs(TOKENIZER, ours.token_ids, ours.logprobs) if has_logprobs and ours.logprobs else None
        assert theirs.logprobs == wanted


@pytest.mark.parametrize("has_logprobs", [True, False])
def test_the_parts_of_a_legacy_completion_are_its_json(has_logprobs: bool) -> None:
    whole = b"".join(TextFormat(meta(has_logprobs, has_token_ids=True)).whole(CHOICES, USAGE))

    answer = msgspec.json.decode(whole, type=TextCompletion)
    assert msgspec.json.encode(answer) == whole
    for ours, theirs in zip(CHOICES, answer.choices, strict=True):
        assert (theirs.index, theirs.text, theirs.token_ids) == (ours.index, ours.text, ours.token_ids)
        wanted = (
            text_logprobs(TOKENIZER, ours.token_ids, ours.logprobs, ours.offsets)
            if has_logprobs and ours.logprobs
            else None
        )
        assert theirs.logprobs == wanted


@pytest.mark.parametrize("new_format", [ChatFormat, TextFormat])
def test_a_long_answer_with_log_probabilities_has_many_parts(new_format: type[ChatFormat] | type[TextFormat]) -> None:
    answer_format: Format = new_format(meta(has_logprobs=True, has_token_ids=False))

    parts = list(answer_format.whole([choice(0, 100 * PART_TOKENS)], USAGE))

    assert len(parts) > 100


def test_calls_of_a_whole_answer_are_in_its_message_and_null_stands_for_no_text() -> None:
    calls = [FinishedCall("call_1", "f", '{"a": 1}'), FinishedCall("call_2", "g", "{}")]
    finished = [
        FinishedChoice(0, "", "tool_calls", calls=calls),
        FinishedChoice(1, "text", "tool_calls", calls=calls[:1]),
    ]

    whole = msgspec.json.decode(b"".join(ChatFormat(meta(False, False)).whole(finished, USAGE)))

    first, second = (item["message"] for item in whole["choices"])
    assert first["content"] is None
    assert first["tool_calls"] == [
        {"id": "call_1", "function": {"name": "f", "arguments": '{"a": 1}'}, "type": "function"},
        {"id": "call_2", "function": {"name": "g", "arguments": "{}"}, "type": "function"},
    ]
    assert (second["content"], len(second["tool_calls"])) == ("text", 1)
    assert [item["finish_reason"] for item in whole["choices"]] == ["tool_calls"] * 2


def test_an_answer_without_calls_has_no_field_of_theirs() -> None:
    whole = b"".join(ChatFormat(meta(False, False)).whole([choice(0, 1)], USAGE))

    assert b"tool_calls" not in whole


def test_parts_of_calls_are_in_a_chunks_delta_those_of_one_call_together() -> None:
    chat = ChatFormat(meta(False, False))
    parts = [
        CallDelta(0, "", "call_1", "f"),
        CallDelta(0, '{"a"'),
        CallDelta(0, ": 1}"),
        CallDelta(1, "", "call_2", "g"),
    ]

    first = msgspec.json.decode(chat.chunk(0, TextPiece("", [], calls=parts), True))["choices"][0]["delta"]
    second = msgspec.json.decode(chat.chunk(0, TextPiece("x", [], calls=[CallDelta(1, "{}")]), False))["choices"][0]

    assert first == {
        "role": "assistant",
        "tool_calls": [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"index": 1, "id": "call_2", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    }
    assert second["delta"] == {"content": "x", "tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}
