"""What a hostile body costs before it is refused, or taken: memory and time."""

import contextlib
import time
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from penstock.wire.bodies import MAX_NUMBERS, MAX_VALUES, decode_chat, decode_completion
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatRequest, CompletionRequest
from penstock.wire.support import check, forget_unread

SIZE = 8 * 2**20
MAX_GROWTH = 6.0
"""Peak memory of decoding over the size of the body, which itself is not counted."""
MAX_SECONDS = 1.5
"""Time for one body under tracemalloc on a busy machine; without either it is a tenth of that."""
CHAT = b'{"model":"m","messages":[{"role":"user","content":"Hi"}],'


def fill(before: bytes, unit: bytes, behind: bytes) -> bytes:
    """A body of SIZE bytes: `unit` as often as it fits, less its last comma."""
    return before + (unit * ((SIZE - len(before) - len(behind)) // len(unit))).rstrip(b",") + behind


def decode(body: bytes) -> ChatRequest | CompletionRequest:
    return decode_chat(body) if b'"messages"' in body[:40] else decode_completion(body)


HOSTILE = {
    "lists in metadata": fill(CHAT + b'"metadata":[', b"[],", b"]}"),
    "objects in user": fill(CHAT + b'"user":[', b'{"a":1},', b"]}"),
    "tools": fill(CHAT + b'"tools":[', b"[1],", b"]}"),
    "lists in prompt": fill(b'{"model":"m","prompt":[', b"[],", b"]}"),
    "strings in prompt": fill(b'{"model":"m","prompt":[', b'"a",', b"]}"),
    "small ids": fill(b'{"model":"m","prompt":[', b"1,", b"]}"),
    "ids": fill(b'{"model":"m","prompt":[', b"999,", b"]}"),
    "large ids in lists": fill(b'{"model":"m","prompt":[[', b"99999,", b"]]}"),
    "empty messages": fill(b'{"model":"m","messages":[', b'{"role":"user","content":""},', b"]}"),
    "assistants": fill(b'{"model":"m","messages":[', b'{"role":"assistant"},', b"]}"),
    "names": fill(b'{"model":"m","messages":[', b'{"role":"user","name":[0]},', b"]}"),
    "parts": fill(b'{"model":"m","messages":[{"role":"user","content":[', b'{"type":""},', b"]}]}"),
    "stops": fill(CHAT + b'"stop":[', b'"a",', b"]}"),
    "stop ids": fill(CHAT + b'"stop_token_ids":[', b"9999,", b"]}"),
    "biases": fill(CHAT + b'"logit_bias":{', b'"1":1,', b"}}"),
    "unknown keys": fill(b'{"model":"m","messages":1,', b'"a":1,', b"}"),
    "an unknown field": fill(CHAT + b'"x":[', b"[],", b"]}"),
    "a bad value behind ids": fill(b'{"model":"m","prompt":[', b"9999999,", b'],"n":0}'),
    "a bad value among ids": fill(b'{"model":"m","prompt":[', b"9999999,", b",1.5]}"),
    "nothing but openers": fill(b'{"model":"m","messages":', b"[", b""),
    "quotes": fill(b'{"model":"m","messages":[', b'\\"', b""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_costs_a_small_multiple_of_its_size_and_little_time(name: str) -> None:
    body = HOSTILE[name]
    tracemalloc.start()
    try:
        began = time.perf_counter()
        with contextlib.suppress(InvalidRequest):
            decode(body)
        seconds = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak <= MAX_GROWTH * len(body)
    assert seconds < MAX_SECONDS


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (HOSTILE["empty messages"], f"more than {MAX_VALUES} strings, arrays and objects"),
        (HOSTILE["lists in prompt"], f"more than {MAX_VALUES} strings, arrays and objects"),
        (HOSTILE["small ids"], f"more than {MAX_NUMBERS} numbers"),
        (
            b'{"model":"m","messages":[' + b'{"role":"user","content":""},' * 8192 + b'{"role":"user"}]}',
            "Invalid value for 'messages': expected an array of length <= 8192",
        ),
        (
            CHAT + b'"temperature":2.5,"metadata":"' + b"x" * SIZE + b'"}',
            "Invalid value for 'temperature': expected a number <= 2.0, got 2.5.",
        ),
        (
            CHAT + b'"temperature":"' + b"x" * SIZE + b'"}',
            f"Invalid value for 'temperature': expected a number, got a string of {SIZE} characters.",
        ),
    ],
)
def test_what_is_too_much_or_wrong_in_a_large_body_is_a_sentence(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(body)

    assert words in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "{[," * (SIZE // 4)}]}),
        msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": 'a"\\,' * (SIZE // 8)}]}),
        msgspec.json.encode({"model": "m", "prompt": [list(range(30_000))] * 8}),
        msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "Hi, [you]"}] * 8192}),
    ],
    ids=["brackets in a text", "escapes in a text", "many ids", "many messages"],
)
def test_a_large_body_that_asks_for_what_is_allowed_is_taken(body: bytes) -> None:
    check(decode(body))


def test_nothing_of_a_body_stays_behind_its_request() -> None:
    def request() -> ChatRequest:
        body = CHAT[:-3] + b',"name":"' + b"x" * SIZE + b'"}],"metadata":[1],"functions":[]}'
        decoded = decode_chat(body)
        check(decoded)
        forget_unread(decoded)
        return decoded

    def held(make: Callable[[], ChatRequest]) -> tuple[ChatRequest, int]:
        tracemalloc.start()
        try:
            return make(), tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    kept, num_bytes = held(request)

    assert num_bytes < 2**16
    assert kept.messages[0].content == "Hi"
    assert [field for field in (kept.messages[0].name, kept.metadata, kept.functions) if field is not None] == []
