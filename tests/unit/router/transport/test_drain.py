import asyncio

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from penstock.router.transport import drain as drain_module
from penstock.router.transport.drain import DrainingApp, wait_until_known
from tests.real_time import real_time


async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-mine", b"1")]})
    await send({"type": "http.response.body", "body": b"ready"})


async def get(draining: DrainingApp, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(draining), base_url="http://test") as http:
        return await http.get(path)


async def test_before_it_leaves_nothing_is_different() -> None:
    answer = await get(DrainingApp(app), "/readyz")

    assert (answer.status_code, answer.text, "connection" in answer.headers) == (200, "ready", False)


async def test_who_leaves_is_not_ready_and_sends_its_clients_elsewhere() -> None:
    draining = DrainingApp(app)
    draining.begin()

    assert [(await get(draining, path)).status_code for path in ("/readyz", "/health", "/ping")] == [503] * 3
    answer = await get(draining, "/v1/models")
    assert (answer.status_code, answer.headers["connection"], answer.headers["x-mine"]) == (200, "close", "1"), (
        "and still answers"
    )


@real_time
async def test_one_that_arrives_is_there_once_it_is_ready_and_that_has_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "SPREAD_S", 0.2)
    monkeypatch.setattr(drain_module, "MEET_S", 0.6)

    async def took_s(ready_after_s: float) -> float:
        start = asyncio.get_running_loop().time()
        await wait_until_known(lambda: asyncio.get_running_loop().time() - start > ready_after_s)
        return asyncio.get_running_loop().time() - start

    assert 0.2 <= await took_s(-1.0) < 0.45
    assert await took_s(0.3) >= 0.5
    assert await took_s(1000.0) >= 0.8, "without a replica it arrives all the same"
