"""Chunks of many servers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_loadtest.client.chunks import Choice, Chunk, Message, PromptDetails, Usage, read_chunk, spread_tokens

CACHED = Chunk(usage=Usage(prompt_tokens_details=PromptDetails(cached_tokens=3)))


def said(value: object) -> list[tuple[str, str]]:
    chunk = read_chunk(json.dumps(value).encode())
    assert chunk is not None
    messages = [choice.delta or choice.message for choice in chunk.choices or ()]
    return [(message.answer, message.reasoning_text) for message in messages if message is not None]


@pytest.mark.parametrize(
    ("delta", "found"),
    [
        ({"content": "x"}, ("x", "")),
        ({"content": None}, ("", "")),
        ({}, ("", "")),
        ({"reasoning_content": "hm"}, ("", "hm")),
        ({"reasoning": "hm", "content": "x", "odd": [1]}, ("x", "hm")),
        ({"content": [{"type": "text", "text": "x"}, {"type": "thinking", "thinking": []}, {"text": "y"}]}, ("xy", "")),
    ],
)
def test_text_is_read_wherever_servers_put_it(delta: object, found: tuple[str, str]) -> None:
    assert said({"choices": [{"index": 0, "delta": delta}]}) == [found]
    assert said({"choices": [{"index": 0, "message": delta}]}) == [found]


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"choices": []},
        {"choices": None},
        {"choices": [{}]},
        {"choices": [{"delta": None}]},
        {"usage": None, "error": None},
    ],
)
def test_chunks_that_say_nothing_are_chunks(value: object) -> None:
    chunk = read_chunk(json.dumps(value).encode())

    assert said(value) == []
    assert chunk is not None
    assert not chunk.is_error


@pytest.mark.parametrize("value", [{"error": {"message": "x"}}, {"error": "x"}, {"object": "error", "message": "x"}])
def test_an_error_is_told_from_a_chunk(value: object) -> None:
    chunk = read_chunk(json.dumps(value).encode())

    assert chunk is not None
    assert chunk.is_error


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"choices": 1, "usage": [2]}', Chunk()),
        (
            b'{"choices": [1, {"delta": {"content": 7, "reasoning": "hm"}, "finish_reason": {}}]}',
            Chunk(choices=[Choice(delta=Message(reasoning="hm"))]),
        ),
        (b'{"choices": [{"text": "x", "token_ids": [18446744073709551615]}]}', Chunk(choices=[Choice(text="x")])),
        (
            b'{"usage": {"prompt_tokens": null, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": '
            b"3}}}",
            CACHED,
        ),
        (b'{"choices": [{"text": "\xff"}]}', Chunk(choices=[Choice(text="\ufffd")])),
        (b'{"choices": 1, "object": "error"}', Chunk(sort="error")),
    ],
)
def test_what_is_of_another_type_is_left_out_and_the_rest_is_read(data: bytes, found: Chunk) -> None:
    assert read_chunk(data) == found


def test_tool_calls_are_text_that_was_generated_but_no_answer_to_go_on_with() -> None:
    calls = [{"index": 0, "id": "call-1", "function": {"name": "find", "arguments": "{}"}}, {"function": None}, {}]
    chunk = read_chunk(json.dumps({"choices": [{"delta": {"tool_calls": calls}}]}).encode())

    assert chunk is not None
    assert chunk.choices is not None
    assert (chunk.choices[0].generated_text, chunk.choices[0].answer) == ("find{}", "")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"1", b'{"x":' + b"[" * 100_000, b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
)
def test_anything_else_is_no_chunk(data: bytes) -> None:
    assert read_chunk(data) is None


@given(st.integers(0, 500), st.integers(0, 200))
def test_spread_tokens_add_up_and_are_even_behind_the_first(tokens: int, chunks: int) -> None:
    counts = spread_tokens(tokens, chunks)

    assert len(counts) == chunks
    assert sum(counts) == (tokens if chunks else 0)
    assert chunks < 2 or not tokens or counts[0] == 1
    assert chunks < 2 or max(counts[1:]) - min(counts[1:]) <= 1
