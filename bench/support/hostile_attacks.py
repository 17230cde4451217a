"""The attacks of bench.hostile, and a process that makes one: `python -m bench.support.hostile_attacks NAME`, which
reads its Target as a line of JSON, prints a line when it is ready, begins at the next line, and ends by printing its
Outcome.

Each attack is what a tenant with a key, or a stranger without one, can send with a small program on one core.
"""

import asyncio
import os
import random
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from bench.support.hostile_client import LEFT, Attacker, Outcome, Target, Wire
from bench.support.loopback import WORDS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ADAPTERS = "/v1/adapters"
BOUNDARY = "hostile"
TRICKLE_S = 0.5
"""Time between two bytes of a trickle, seconds."""
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
HIDDEN = 576
"""Inputs and outputs of that layer of the demo model."""


class Attack(NamedTuple):
    what: str
    """What it does, for people."""
    run: Callable[[Attacker], Awaitable[None]]
    has_key: bool = True
    """Whether it needs a key, of a tenant with 60 requests a minute."""
    is_allowed: bool = False
    """Whether all that it sends is within that tenant's limits: then it need not be refused, only bounded to its
    share."""


# bodies


def body_of(attacker: Attacker, **fields: object) -> bytes:
    """A chat, unless `prompt` is given."""
    usual: dict[str, object] = {"model": attacker.target.model}
    if "prompt" not in fields:
        usual["messages"] = [{"role": "user", "content": "hi"}]
    return msgspec.json.encode(usual | fields)


def filled(attacker: Attacker, before: str, piece: str, after: str, *, is_chat: bool = True) -> bytes:
    """A body of the largest size: `before`, `piece` as often as it fits, `after`."""
    messages = '"messages":[{"role":"user","content":"hi"}],' if is_chat and '"messages"' not in before else ""
    start = f'{{"model":"{attacker.target.model}",{messages}{before}'
    count = max(1, (attacker.target.body_bytes - len(start) - len(after)) // len(piece))
    return (start + (piece * count).removesuffix(",") + after).encode()


def large_body(
    before: str, piece: str, after: str, tasks: int, *, path: str = CHAT
) -> Callable[[Attacker], Awaitable[None]]:
    """Attack with the largest body of one kind, so many at a time."""

    async def run(attacker: Attacker) -> None:
        await attacker.flood(path, filled(attacker, before, piece, after, is_chat=path == CHAT), tasks)

    return run


def chats(tasks: int, *, path: str = CHAT, extra: str = "", **fields: object) -> Callable[[Attacker], Awaitable[None]]:
    """Attack with the same small request, so many at a time."""

    async def run(attacker: Attacker) -> None:
        await attacker.flood(path, body_of(attacker, **fields), tasks, extra=extra)

    return run


def gets(path: str) -> Callable[[Attacker], Awaitable[None]]:
    """Attack with GETs of one path, on connections that are kept."""

    async def run(attacker: Attacker) -> None:
        head = attacker.head(path, None, method="GET")

        async def work(_: int) -> None:
            async with attacker.connection() as wire:
                while attacker.is_on:
                    await attacker.pace()
                    await wire.send(head)
                    await read_answer(attacker, wire)

        await attacker.many(8, work)

    return run


async def read_answer(attacker: Attacker, wire: Wire) -> None:
    """A whole response with a Content-Length, and its status tallied. Raises ConnectionError."""
    line = await wire.reader.readline()
    if not line:
        raise ConnectionError("closed without an answer")
    attacker.tally[line.split()[1].decode()] += 1
    length = 0
    while header := (await wire.reader.readline()).strip():
        name, _, value = header.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    await wire.reader.readexactly(length)


# bodies that are much work


async def logit_bias(attacker: Attacker) -> None:
    bias = {str(token): 1.0 for token in range(1024)}
    await attacker.flood(CHAT, body_of(attacker, logit_bias=bias, n=16, max_tokens=500, stream=True), 16)


async def huge_logit_bias(attacker: Attacker) -> None:
    pieces = [f'"{token}":1,' for token in range(attacker.target.body_bytes // 12)]
    await attacker.flood(CHAT, filled(attacker, '"logit_bias":{', "".join(pieces), "}}"), 4)


async def deep_nesting(attacker: Attacker) -> None:
    half = attacker.target.body_bytes // 2 - 200
    nested = "[" * half + "]" * half
    await attacker.flood(CHAT, filled(attacker, '"metadata":', nested, "}"), 4)


async def stop_strings(attacker: Attacker) -> None:
    stops = ["".join(random.Random(number).choices("ab ", k=255)) + "z" for number in range(16)]
    await attacker.flood(CHAT, body_of(attacker, stop=stops, n=128, max_tokens=1000, ignore_eos=True, stream=True), 4)


async def long_prompts(attacker: Attacker) -> None:
    rng = random.Random(1)

    async def work(_: int) -> None:
        ids = [rng.randrange(1000, 40000) for _ in range(8000)]
        await attacker.post(COMPLETIONS, body_of(attacker, prompt=ids, max_tokens=1))

    await attacker.many(16, work)


async def long_text(attacker: Attacker) -> None:
    words = " ".join(random.Random(1).choices(WORDS, k=4096)) + " "
    await attacker.flood(COMPLETIONS, filled(attacker, '"prompt":"', words, '"}', is_chat=False), 8)


# connections


async def slow_head(attacker: Attacker) -> None:
    async def work(_: int) -> None:
        async with attacker.connection() as wire:
            await wire.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode())
            while attacker.is_on:
                await until_closed(wire, TRICKLE_S)
                await wire.send(b"X-a: b\r\n")

    await attacker.many(1000, work)


async def slow_body(attacker: Attacker) -> None:
    async def work(_: int) -> None:
        async with attacker.connection() as wire:
            await wire.send(attacker.head(CHAT, 2**20) + b'{"model"')
            while attacker.is_on:
                answer = await until_closed(wire, 2 * TRICKLE_S)
                if answer:
                    attacker.tally[answer.split()[1].decode("ascii", "replace")] += 1
                    return
                await wire.send(b" ")

    await attacker.many(2200, work)


async def until_closed(wire: Wire, seconds: float) -> bytes:
    """What came within that time; empty if nothing did. Raises ConnectionError when the other side closed."""
    try:
        async with asyncio.timeout(seconds):
            data = await wire.reader.read(2**16)
    except TimeoutError:
        return b""
    if not data:
        raise ConnectionError("closed")
    return data


async def many_headers(attacker: Attacker) -> None:
    await endless_head(attacker, b"".join(b"X-%d: %d\r\n" % (number, number) for number in range(5000)))


async def long_header(attacker: Attacker) -> None:
    await endless_head(attacker, b"x" * 65536, start=b"X-a: ")


async def endless_head(attacker: Attacker, block: bytes, start: bytes = b"") -> None:
    async def work(_: int) -> None:
        async with attacker.connection() as wire:
            await wire.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + start)
            while attacker.is_on:
                await wire.send(block)
                await attacker.pace()

    await attacker.many(20, work)


async def silent_connections(attacker: Attacker) -> None:
    async def work(_: int) -> None:
        async with attacker.connection() as wire:
            await until_closed(wire, attacker.left_s + 1)

    await attacker.many(2000, work)


async def many_addresses(attacker: Attacker) -> None:
    async def work(number: int) -> None:
        async with attacker.connection(address=f"127.1.{number // 250}.{number % 250 + 1}") as wire:
            await until_closed(wire, attacker.left_s + 1)

    await attacker.many(4000, work)


async def connection_churn(attacker: Attacker) -> None:
    async def work(_: int) -> None:
        async with attacker.connection():
            attacker.tally[LEFT] += 1

    await attacker.many(32, work)


async def idle_keep_alives(attacker: Attacker) -> None:
    head = attacker.head("/v1/models", None, key=None, method="GET")

    async def work(_: int) -> None:
        async with attacker.connection() as wire:
            await wire.send(head)
            await read_answer(attacker, wire)
            await until_closed(wire, attacker.left_s + 1)

    await attacker.many(1500, work)


async def pipelined_garbage(attacker: Attacker) -> None:
    rng = random.Random(1)
    gets_sent = attacker.head("/v1/models", None, key=None, method="GET") * 500

    async def work(_: int) -> None:
        async with attacker.connection() as wire:
            await wire.send(gets_sent + rng.randbytes(4096))
            await attacker.status(wire)
            await attacker.drain(wire)

    await attacker.many(8, work)


async def tiny_chunks(attacker: Attacker) -> None:
    chunk = b"1\r\n \r\n" * 8192
    head = attacker.head(CHAT, None, extra="Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n")

    async def work(_: int) -> None:
        async with attacker.connection() as wire:
            await wire.send(head)
            for _ in range(attacker.target.body_bytes // 8192):
                await wire.send(chunk)
                await attacker.pace()
            await wire.send(b"2\r\n{}\r\n0\r\n\r\n")
            await attacker.status(wire)

    await attacker.many(4, work)


async def disconnects(attacker: Attacker) -> None:
    body = body_of(attacker, stream=True, max_tokens=2000, ignore_eos=True, n=4)
    head = attacker.head(CHAT, len(body))

    async def work(number: int) -> None:
        async with attacker.connection() as wire:
            await wire.send(head + body)
            if await attacker.status(wire) == 200:
                await wire.reader.read(2**16)
                await asyncio.sleep(0.05 * (number % 4))

    await attacker.many(16, work)


async def slow_readers(attacker: Attacker) -> None:
    body = body_of(attacker, stream=True, max_tokens=4000, ignore_eos=True, n=8, logprobs=True, top_logprobs=20)
    head = attacker.head(CHAT, len(body))

    async def work(_: int) -> None:
        async with attacker.connection(receive_bytes=2048) as wire:
            await wire.send(head + body)
            if await attacker.status(wire) == 200:
                await asyncio.sleep(attacker.left_s)

    await attacker.many(32, work)


async def unknown_keys(attacker: Attacker) -> None:
    body = body_of(attacker)

    async def work(_: int) -> None:
        await attacker.post(CHAT, body, key=f"sk-penstock-{os.urandom(24).hex()}")

    await attacker.many(32, work)


async def unknown_paths(attacker: Attacker) -> None:
    async def work(_: int) -> None:
        async with attacker.connection() as wire:
            while attacker.is_on:
                await attacker.pace()
                await wire.send(attacker.head(f"/{os.urandom(4000).hex()}", None, key=None, method="GET"))
                await read_answer(attacker, wire)

    await attacker.many(8, work)


# adapters


def adapter_files(seed: int) -> tuple[bytes, bytes]:
    """A LoRA adapter of rank 1 for one layer of the demo model: configuration and weights."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    size = 4 * HIDDEN
    header = msgspec.json.encode(
        {
            f"{LAYER}.lora_A.weight": {"dtype": "F32", "shape": [1, HIDDEN], "data_offsets": [0, size]},
            f"{LAYER}.lora_B.weight": {"dtype": "F32", "shape": [HIDDEN, 1], "data_offsets": [size, 2 * size]},
        }
    )
    weights = struct.pack("<f", seed / 1000) * (2 * HIDDEN)
    return msgspec.json.encode(config), struct.pack("<Q", len(header)) + header + weights


def upload_form(name: str, seed: int) -> bytes:
    config, weights = adapter_files(seed)
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="name"\r\n\r\n{name}'.encode(),
        *(
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{file}"\r\n\r\n'.encode() + data
            for file, data in (("adapter_config.json", config), ("adapter_model.safetensors", weights))
        ),
    ]
    return b"\r\n".join(parts) + f"\r\n--{BOUNDARY}--\r\n".encode()


def upload_head(attacker: Attacker, length: int) -> bytes:
    extra = f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {length}\r\n"
    return attacker.head(ADAPTERS, None, extra=extra)


async def adapter_thrash(attacker: Attacker) -> None:
    async def work(number: int) -> None:
        for seed in range(number * 1000, number * 1000 + 12):
            name, form = f"thrash{seed}", upload_form(f"thrash{seed}", seed + 1)
            async with attacker.connection() as wire:
                await wire.send(upload_head(attacker, len(form)) + form)
                status = await attacker.status(wire)
            if status == 201:
                await attacker.post(CHAT, body_of(attacker, model=name, max_tokens=64, ignore_eos=True, stream=True))

    await attacker.many(4, work)


async def slow_uploads(attacker: Attacker) -> None:
    form = upload_form("slow", 1)

    async def work(_: int) -> None:
        async with attacker.connection() as wire:
            await wire.send(upload_head(attacker, 2**20))
            for byte in form[:-60]:
                await wire.send(bytes([byte]))
                answer = await until_closed(wire, TRICKLE_S)
                if answer:
                    attacker.tally[answer.split()[1].decode("ascii", "replace")] += 1
                    return

    await attacker.many(64, work)


# the replicas' port


async def hostile_hello(attacker: Attacker) -> None:
    rng = random.Random(1)
    large = (60 * 2**20).to_bytes(4, "little")
    ports = attacker.target.stream_ports

    async def work(number: int) -> None:
        async with attacker.connection(port=ports[number % len(ports)]) as wire:
            if number % 2:
                noise = rng.randbytes(64)
                await wire.send(len(noise).to_bytes(4, "little") + noise)
            else:
                await wire.send(large)
                for _ in range(50):
                    await wire.send(bytes(2**20))
                    await attacker.pace()
            await until_closed(wire, attacker.left_s + 1)

    await attacker.many(200, work)


ATTACKS: dict[str, Attack] = {
    # bodies that cost more than they weigh
    "empty-messages": Attack(
        "2 bodies of 8 MB of empty messages", large_body('"messages":[', '{"role":"user","content":""},', "]}", 2)
    ),
    "content-parts": Attack(
        "2 bodies of 8 MB of empty parts of a message",
        large_body('"messages":[{"role":"user","content":[', '{"type":"text","text":""},', "]}]}", 2),
    ),
    "metadata-lists": Attack("6 bodies of 8 MB of lists in metadata", large_body('"metadata":[', "[],", "]}", 6)),
    "user-objects": Attack("6 bodies of 8 MB of objects in user", large_body('"user":[', '{"a":{}},', "]}", 6)),
    "tools": Attack("6 bodies of 8 MB of numbers in tools", large_body('"tools":[', "1.5,", "]}", 6)),
    "deep-nesting": Attack("4 bodies of 8 MB of brackets", deep_nesting),
    "prompt-lists": Attack(
        "4 bodies of 8 MB of prompts of one token", large_body('"prompt":[', "[1],", "]}", 4, path=COMPLETIONS)
    ),
    "prompt-ids": Attack("4 bodies of 8 MB of token ids", large_body('"prompt":[', "1,", "]}", 4, path=COMPLETIONS)),
    "prompt-strings": Attack(
        "4 bodies of 8 MB of empty prompts", large_body('"prompt":[', '"",', "]}", 4, path=COMPLETIONS)
    ),
    "prompt-text": Attack("8 prompts of 8 MB of text", long_text),
    "stop-list": Attack("4 bodies of 8 MB of stop strings", large_body('"stop":[', '"a",', "]}", 4)),
    "logit-bias-list": Attack("4 bodies of 8 MB of logit_bias", huge_logit_bias),
    "bad-large": Attack(
        "4 bodies of 8 MB that end in a 400", large_body('"metadata":[', "[],", '],"temperature":9}', 4)
    ),
    "bad-small": Attack("16 at a time that end in a 400", chats(16, temperature=9)),
    "tiny-chunks": Attack("4 bodies of 8 MB in chunks of one byte", tiny_chunks),
    # answers that cost more than they say
    "many-choices": Attack(
        "8 requests of 128 choices and 4000 tokens",
        chats(8, n=128, max_tokens=4000, ignore_eos=True, stream=True),
        is_allowed=True,
    ),
    "one-token-choices": Attack("8 at a time of 128 choices of one token", chats(8, n=128, max_tokens=1)),
    "stop-strings": Attack("4 streams of 128 choices with 16 long stop strings", stop_strings, is_allowed=True),
    "top-logprobs": Attack(
        "4 whole answers of 128 choices, 500 tokens and 20 logprobs each",
        chats(4, n=128, max_tokens=500, logprobs=True, top_logprobs=20, ignore_eos=True),
    ),
    "logit-bias": Attack("16 streams of 16 choices with 1024 biases", logit_bias, is_allowed=True),
    "largest-answers": Attack(
        "64 requests of the longest answers", chats(64, max_tokens=8000, ignore_eos=True, stream=True)
    ),
    "largest-number": Attack("16 at a time with max_tokens of 10^15", chats(16, max_tokens=10**15)),
    "fifty-streams": Attack("50 streams without a pause", chats(50, max_tokens=512, ignore_eos=True, stream=True)),
    "long-prompts": Attack("16 new prompts of 8000 tokens at a time", long_prompts),
    "disconnects": Attack("16 streams at a time, hung up in the middle", disconnects),
    "slow-readers": Attack("32 streams of 8 choices that are not read", slow_readers),
    "traced": Attack(
        "16 at a time, each traced by its traceparent",
        chats(16, max_tokens=4, extra="traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"),
    ),
    # connections
    "slow-heads": Attack("1000 heads, a line each half second", slow_head, has_key=False),
    "slow-bodies": Attack("2200 bodies, a byte a second", slow_body),
    "many-headers": Attack("20 heads of headers without end", many_headers, has_key=False),
    "long-header": Attack("20 heads of one header without end", long_header, has_key=False),
    "silent": Attack("2000 connections without a byte", silent_connections, has_key=False),
    "silent-addresses": Attack(
        "4000 connections without a byte, each from another address", many_addresses, has_key=False
    ),
    "churn": Attack("connections that are reset at once", connection_churn, has_key=False),
    "keep-alives": Attack("1500 connections, idle after one request", idle_keep_alives, has_key=False),
    "garbage": Attack("8 connections of 500 requests at once and noise", pipelined_garbage, has_key=False),
    # requests that generate nothing
    "unknown-keys": Attack("32 at a time with keys that nobody has", unknown_keys, has_key=False),
    "unknown-paths": Attack("8 connections of long paths that lead nowhere", unknown_paths, has_key=False),
    "get-models": Attack("8 connections of GET /v1/models", gets("/v1/models")),
    "get-usage": Attack("8 connections of GET /v1/usage", gets("/v1/usage")),
    "get-receipts": Attack("8 connections of GET /v1/receipts/ID", gets("/v1/receipts/0123456789abcdef01234567")),
    # adapters
    "adapter-thrash": Attack("adapters uploaded and used at once, more than there are slots", adapter_thrash),
    "slow-uploads": Attack("64 uploads, a byte each half second", slow_uploads),
    # the replicas' port
    "hostile-hello": Attack(
        "200 connections to the replicas: 50 MB or noise before a Hello", hostile_hello, has_key=False
    ),
}
"""The attacks by name."""


async def attack(name: str, target: Target) -> Outcome:
    """Make one attack, from its first byte to its end."""
    attacker = Attacker(target)
    await ATTACKS[name].run(attacker)
    return attacker.outcome()


def main() -> None:
    name, target = sys.argv[1], msgspec.json.decode(sys.stdin.readline(), type=Target)
    os.nice(5)
    print("ready", flush=True)
    sys.stdin.readline()
    print(msgspec.json.encode(asyncio.run(attack(name, target))).decode(), flush=True)


if __name__ == "__main__":
    main()
