"""A client of the load tester before a server that says what a test wants it to, and the pieces of such answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import uvloop

from penstock_loadtest.client.client import Answer, Client, Clock
from penstock_loadtest.client.target import Target
from penstock_loadtest.planned import Message, Planned
from penstock_loadtest.results.records import Record
from tests.unit.loadtest.raw_server import Script, Site, Wire, event, response, site

SECRET = "a prompt that nobody may see"
LONG_S = 20.0
CHAT = Planned(index=3, at_s=0.0, prompt=SECRET, max_tokens=8, ignore_eos=True, tenant="acme", kind="chats")
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 4}}
DONE = event(b"[DONE]")


def changed(**fields: object) -> Planned:
    return Planned(**{name: getattr(CHAT, name) for name in CHAT.__struct_fields__} | fields)


WHOLE = changed(stream=False)


def piece(content: str | None = None, ids: list[int] | None = None, finish: str | None = None, **more: object) -> bytes:
    return event(
        {
            "choices": [{"index": 0, "delta": {"content": content}, "token_ids": ids, "finish_reason": finish}],
            "usage": None,
            **more,
        }
    )


IDS = [piece(" a", [11]), piece(" b", [12]), piece(" c", [13]), piece("", [], "length")]
TEXT = [piece(""), piece(" a"), piece(" b"), piece(" c"), piece(None, None, "length")]


class World(NamedTuple):
    client: Client
    there: Site

    async def send(
        self, planned: Planned = CHAT, *, deadline_s: float = LONG_S, history: tuple[Message, ...] = ()
    ) -> Answer:
        now_s = self.client.clock.now()
        return await self.client.send(planned, intended_s=now_s, deadline_s=now_s + deadline_s, history=history)


@asynccontextmanager
async def open_world(script: Script) -> AsyncIterator[World]:
    async with site(script) as there:
        client = Client(Target(there.url, "m", ["m"], {"acme": "sk-secret"}, None, None), Clock())
        try:
            yield World(client, there)
        finally:
            await client.close()


def says(*parts: bytes) -> Script:
    async def script(wire: Wire) -> None:
        while True:
            await wire.read_request()
            await wire.send(*parts)

    return script


def says_and_closes(*parts: bytes) -> Script:
    async def script(wire: Wire) -> None:
        await wire.read_request()
        await wire.send(*parts)

    return script


def answered(script: Script, planned: Planned = CHAT, *, deadline_s: float = LONG_S) -> Answer:
    async def main() -> Answer:
        async with open_world(script) as world:
            return await world.send(planned, deadline_s=deadline_s)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def recorded(script: Script, planned: Planned = CHAT, *, deadline_s: float = LONG_S) -> Record:
    record = answered(script, planned, deadline_s=deadline_s).record
    assert len(record.chunk_s) == len(record.chunk_tokens)
    assert record.end_s is not None
    assert SECRET not in repr(record)
    assert "sk-secret" not in repr(record)
    return record


# --- whole answers


def whole(**fields: object) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": " a b c"}, "finish_reason": "stop", **fields}
    return response(
        json.dumps({"object": "chat.completion", "choices": [choice], "usage": USAGE}).encode(),
        "content-type: application/json",
    )
