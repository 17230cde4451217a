import asyncio

import httpx
from starlette.types import Receive, Scope, Send

from penstock.router.leaving import Leaving


async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-mine", b"1")]})
    await send({"type": "http.response.body", "body": b"ready"})


def get(leaving: Leaving, path: str) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(leaving), base_url="http://test") as http:
            return await http.get(path)

    return asyncio.run(main())


def test_before_it_leaves_nothing_is_different() -> None:
    answer = get(Leaving(app), "/readyz")

    assert (answer.status_code, answer.text, "connection" in answer.headers) == (200, "ready", False)


def test_who_leaves_is_not_ready_and_sends_its_clients_elsewhere() -> None:
    leaving = Leaving(app)
    leaving.begin()

    assert get(leaving, "/readyz").status_code == 503
    answer = get(leaving, "/v1/models")
    assert (answer.status_code, answer.headers["connection"], answer.headers["x-mine"]) == (200, "close", "1"), "and still answers"
