"""What a hostile body costs before it is refused, or taken: memory and time."""

import contextlib
import json
import random
import time
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from penstock.wire import bodies as bodies_module
from penstock.wire.bodies import MAX_NUMBERS, MAX_VALUES, count_values, decode_chat, decode_completion
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatRequest, CompletionRequest
from penstock.wire.support import check
from tests.yardstick import rested

SIZE = 8 * 2**20
MAX_GROWTH = 6.0
"""Peak memory of decoding over the size of the body, which itself is not counted."""
MAX_SECONDS = 0.3
"""CPU time for one body, by the yardstick: most take a hundredth of that, the one that is read to its end a sixth."""
MAX_STEP_SECONDS = 0.005
"""CPU time of the longest step of counting one body, by the yardstick: it takes 0.2 ms, and 15 or more where a body is
counted in one step."""
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
    "numbers for the template": fill(CHAT + b'"chat_template_kwargs":{"a":[', b"1.5,", b"]}}"),
    "literals for the template": fill(CHAT + b'"chat_template_kwargs":{"a":[', b"true,", b"]}}"),
    "objects for the template": fill(CHAT + b'"chat_template_kwargs":{"a":[', b"{},", b"]}}"),
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
        with contextlib.suppress(InvalidRequest):
            decode(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    began = time.thread_time()
    with contextlib.suppress(InvalidRequest):
        decode(body)
    seconds = time.thread_time() - began

    assert peak <= MAX_GROWTH * len(body)
    assert rested(seconds) < MAX_SECONDS


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


def steps_of_counting(body: bytes) -> list[float]:
    """CPU seconds of each step."""
    steps, began = list[float](), time.thread_time()
    with contextlib.suppress(InvalidRequest):
        for _ in count_values(body):
            steps.append(time.thread_time() - began)
            began = time.thread_time()
    return [*steps, time.thread_time() - began]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_counted_in_short_steps(name: str) -> None:
    """The lowest of three for each step: a virtual machine's clock of CPU time goes on where its host takes the core
    away."""
    passes = [steps_of_counting(HOSTILE[name]) for _ in range(3)]

    assert rested(max(map(min, zip(*passes, strict=True)))) < MAX_STEP_SECONDS


def random_value(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(6 if depth < 4 else 4)
    if kind < 2:
        return "".join(rng.choices('ab"\\,[{}]\n\u00e9', k=rng.randrange(12)))
    if kind < 4:
        return rng.choice([rng.randrange(1000), None, True])
    if kind == 4:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {f"{number}": random_value(rng, depth + 1) for number in range(rng.randrange(5))}


def num_values_of(value: object) -> int:
    """Strings, keys included, arrays and objects."""
    if isinstance(value, list):
        return 1 + sum(map(num_values_of, value))
    if isinstance(value, dict):
        return 1 + sum(1 + num_values_of(member) for member in value.values())
    return isinstance(value, str)


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 64])
def test_values_are_counted_exactly_wherever_the_steps_end(slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "MAX_UNCOUNTED_BYTES", 0)
    monkeypatch.setattr(bodies_module, "_SLICE_BYTES", slice_bytes)
    rng = random.Random(slice_bytes)
    for _ in range(300):
        value = random_value(rng)
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        monkeypatch.setattr(bodies_module, "MAX_VALUES", num_values_of(value))
        list(count_values(body))
        if num_values_of(value):
            monkeypatch.setattr(bodies_module, "MAX_VALUES", num_values_of(value) - 1)
            with pytest.raises(InvalidRequest):
                list(count_values(body))


def test_nothing_of_a_body_stays_behind_its_request() -> None:
    def request() -> ChatRequest:
        body = CHAT[:-3] + b',"name":"' + b"x" * SIZE + b'"}],"metadata":[1],"functions":[]}'
        decoded = decode_chat(body)
        check(decoded)
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
