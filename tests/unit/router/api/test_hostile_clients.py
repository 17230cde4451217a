"""What one client does to others at the HTTP surface: bodies that fill the memory, requests that take every place, keys
that are guessed."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager

import httpx
import msgspec
from starlette.types import Message

from bench.support.free_ports import free_port
from penstock.router.completions.prompts import INLINE_COST
from penstock.router.config import GatewayConfig, ProviderConfig
from penstock.router.models.served_model import ServedModel
from penstock.router.routing.request import Route
from penstock.router.transport.connection import EXTENSION
from penstock.router.transport.failures import ADDRESS_BURST, ADDRESS_RATE
from penstock.router.transport.listener import Listener
from penstock.tenancy.keys import record_of
from penstock.tenancy.tenants import Record, Settings, settings_key
from penstock.text.draft import Cut
from penstock.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import CONTEXT, KEY, MODEL, SECRET, TOKENIZER, Script, World, running_gateway

OTHER_KEY = "sk-penstock-" + "fedcba9876543210" * 3
BODY = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "x"}]})

NUM_LATE = 8
"""Guesses beyond those that are answered at once; the last one waits for seconds."""


def add_tenant(world: World, tenant: str, key: str) -> None:
    name, value = record_of(SECRET, tenant, key)
    world.store.data |= {
        name: value,
        settings_key(tenant): msgspec.json.encode(Record(settings=Settings(), created=0, updated=0)),
    }


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def at_its_listener(world: World, trusted_proxies: list[str] | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway's app behind the gateway's own listener."""
    port = free_port()
    listener = Listener(world.app, "127.0.0.1", [port], 1, trusted_proxies=trusted_proxies)
    listener.start()
    try:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30, trust_env=False) as client:
            yield client
    finally:
        await listener.stop()


class TrickledBody:
    """A body of which the first part comes at once, and the rest when it may."""

    def __init__(self, num_bytes: int) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self._num_bytes = num_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b" " * self._num_bytes
        self.has_begun.set()
        await self.may_end.wait()
        yield BODY


async def test_one_tenants_bodies_leave_room_for_anothers() -> None:
    config = GatewayConfig(max_body_bytes=50_000, max_held_body_bytes=100_000)
    async with running_gateway(config=config) as world:
        add_tenant(world, "tenant-2", OTHER_KEY)
        bodies = [TrickledBody(45_000), TrickledBody(45_000)]
        posts = [asyncio.create_task(world.client.post("/v1/chat/completions", content=body)) for body in bodies]
        for body in bodies:
            await body.has_begun.wait()

        refused = await world.client.post("/v1/chat/completions", content=b" " * 1000 + BODY)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "bytes of request bodies" in refused.json()["error"]["message"]
        answer = await world.client.post("/v1/chat/completions", content=BODY, headers=bearer(OTHER_KEY))
        assert answer.status_code == 200
        for body in bodies:
            body.may_end.set()
        assert {post.status_code for post in await asyncio.gather(*posts)} <= {200, 429}, "the share was used up"
        assert (await world.client.post("/v1/chat/completions", content=b" " * 45_000 + BODY)).status_code == 200


class LateTokenizer(Tokenizer):
    """Reads long texts only when it may."""

    def __init__(self) -> None:
        self.__dict__ = {**TOKENIZER.__dict__, "may_read": threading.Event()}

    def encode(
        self, text: str, add_special: bool = False, max_tokens: int | None = None, cut: Cut | None = None
    ) -> list[int]:
        if len(text) > INLINE_COST:
            assert self.may_read.wait(10)
        return super().encode(text, add_special, max_tokens, cut)


async def test_a_body_counts_until_its_prompt_is_read() -> None:
    config = GatewayConfig(max_body_bytes=50_000, max_held_body_bytes=100_000)
    tokenizer = LateTokenizer()
    model = ServedModel(MODEL, ("pool-a",), tokenizer, lambda: 100_000, "0123456789abcdef")
    async with running_gateway(config=config, model=model) as world:
        posts = [asyncio.create_task(world.complete(prompt="x" * 45_000)) for _ in range(2)]
        await asyncio.wait(posts, timeout=0.2)
        refused = await world.complete(prompt="x" * 4000)
        tokenizer.may_read.set()

        assert refused.status_code == 429
        assert "bytes of request bodies" in refused.json()["error"]["message"]
        assert [post.status_code for post in await asyncio.gather(*posts)] == [200, 200]
        assert (await world.complete(prompt="x" * 4000)).status_code == 200


async def test_a_body_counts_as_long_as_the_answer_where_a_provider_may_need_it() -> None:
    gate = asyncio.Event()
    config = GatewayConfig(max_body_bytes=50_000, max_held_body_bytes=100_000)
    provider = ProviderConfig(name="far", base_url="http://far/v1", model="m", served_names=(MODEL,))
    routes = (Route("edge", ("pool-a",)), Route("cloud", (), provider="far"))
    model = ServedModel(MODEL, ("pool-a",), TOKENIZER, lambda: CONTEXT, "0123456789abcdef", routes=routes)
    async with running_gateway(Script(hold_start=gate), config, model=model, providers=[provider]) as world:
        posts = [
            asyncio.create_task(world.client.post("/v1/chat/completions", content=b" " * 45_000 + BODY))
            for _ in range(2)
        ]
        await world.dispatcher.until(lambda: world.dispatcher.num_waiting == 2)
        refused = await world.client.post("/v1/chat/completions", content=b" " * 4000 + BODY)
        gate.set()

        assert refused.status_code == 429
        assert [post.status_code for post in await asyncio.gather(*posts)] == [200, 200]
        assert (await world.chat()).status_code == 200


async def test_a_body_is_counted_off_once_its_prompt_is_read_however_long_the_answer_takes() -> None:
    gate = asyncio.Event()
    config = GatewayConfig(max_body_bytes=50_000, max_held_body_bytes=100_000)
    async with running_gateway(Script(hold_start=gate), config) as world:
        posts = [
            asyncio.create_task(world.client.post("/v1/chat/completions", content=b" " * 45_000 + BODY))
            for _ in range(5)
        ]
        await world.dispatcher.until(lambda: world.dispatcher.num_waiting == 5)
        gate.set()

        assert [post.status_code for post in await asyncio.gather(*posts)] == [200] * 5


async def test_one_tenants_requests_leave_places_for_anothers_and_for_none_without_a_key() -> None:
    gate = asyncio.Event()
    async with running_gateway(Script(hold_start=gate), GatewayConfig(max_ongoing_requests=10)) as world:
        add_tenant(world, "tenant-2", OTHER_KEY)
        posts = [asyncio.create_task(world.chat()) for _ in range(10)]
        await world.dispatcher.until(lambda: world.dispatcher.num_waiting == 8)
        async with asyncio.timeout(10):
            while sum(post.done() for post in posts) < 2:
                await asyncio.wait([post for post in posts if not post.done()], return_when=asyncio.FIRST_COMPLETED)
        other = asyncio.create_task(world.client.post("/v1/chat/completions", content=BODY, headers=bearer(OTHER_KEY)))
        await world.dispatcher.until(lambda: world.dispatcher.num_waiting == 9)

        pending = [post for post in posts if not post.done()]
        assert [post.result().status_code for post in posts if post.done()] == [429, 429]
        unknown = await world.client.post("/v1/chat/completions", content=BODY, headers=bearer(KEY[:-1] + "0"))
        assert unknown.status_code == 401
        gate.set()
        assert {post.status_code for post in await asyncio.gather(*pending, other)} == {200}


class FakeConnection:
    """A connection on which keys are shown, and which is cut."""

    is_cut = False

    def prove(self, tenant: str) -> None:
        assert tenant == "tenant-1"

    def abort(self) -> None:
        self.is_cut = True


async def test_a_connection_whose_client_is_gone_or_reads_no_more_is_cut_at_once() -> None:
    connection = FakeConnection()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"authorization", f"Bearer {KEY}".encode())],
        "extensions": {EXTENSION: connection},
    }

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(f"there is nobody to answer: {message}")

    async with running_gateway() as world:
        await world.app(scope, receive, send)

    assert connection.is_cut


async def refused_at_once(guesses: Iterable[Coroutine[None, None, None]]) -> set[asyncio.Task[None]]:
    """Begin them all, wait until as many are answered as are answered at once, and return the others."""
    pending = {asyncio.create_task(trial) for trial in guesses}
    num_pending = len(pending) - int(ADDRESS_BURST)
    while len(pending) > num_pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        assert {task.exception() for task in done} == {None}
    return pending


async def end(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_guessed_keys_are_answered_ever_later_and_a_valid_one_at_once() -> None:
    async with running_gateway() as world, at_its_listener(world, []) as client:
        began_s = time.monotonic()

        async def try_key(number: int) -> None:
            response = await client.get("/v1/models", headers=bearer(f"sk-penstock-{number:048x}"))
            assert response.status_code == 401

        pending = await refused_at_once(try_key(number) for number in range(int(ADDRESS_BURST) + NUM_LATE))
        for key in (KEY, OTHER_KEY):
            add_tenant(world, key[-4:], key)
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        assert any(not task.done() for task in pending)
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        assert {task.exception() for task in done} == {None}
        assert time.monotonic() - began_s >= 0.9 / ADDRESS_RATE
        await end(pending)

        assert (await client.get("/v1/models", headers=bearer(KEY))).status_code == 200


async def test_what_is_on_the_admin_port_only_is_refused_ever_later_too() -> None:
    config = GatewayConfig(admin_port=1)
    async with running_gateway(config=config) as world, at_its_listener(world, []) as client:

        async def scrape() -> None:
            assert (await client.get("/metrics")).status_code == 404

        pending = await refused_at_once(scrape() for _ in range(int(ADDRESS_BURST) + NUM_LATE))

        assert (await client.get("/healthz")).status_code == 200
        assert any(not task.done() for task in pending)
        await end(pending)


async def test_behind_a_proxy_that_is_not_listed_only_all_failures_together_count() -> None:
    async with running_gateway() as world, at_its_listener(world, None) as client:
        began_s = time.monotonic()
        for number in range(5 * int(ADDRESS_BURST)):
            response = await client.get("/v1/models", headers=bearer(f"sk-penstock-{number:048x}"))
            assert response.status_code == 401

        assert time.monotonic() - began_s < 5 * ADDRESS_BURST / ADDRESS_RATE / 2


async def test_behind_a_listed_proxy_each_client_is_counted_by_itself() -> None:
    async with running_gateway() as world, at_its_listener(world, ["127.0.0.0/8"]) as client:

        async def try_key(client_address: str) -> None:
            headers = {"X-Forwarded-For": f"9.9.9.9, {client_address}"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 401

        pending = await refused_at_once(try_key("1.1.1.1") for _ in range(int(ADDRESS_BURST) + NUM_LATE))
        await try_key("2.2.2.2")

        assert any(not task.done() for task in pending)
        await end(pending)
