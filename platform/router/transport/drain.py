"""How gateways behind a load balancer take turns without a request lost.

One that leaves says so first, and listens on for a while: from `begin` on /readyz answers 503, and every answer asks
its client to connect anew, which a load balancer then does elsewhere. Only when that has spread may the listener close.
One that arrives counts as there only when the load balancer knows it: then the next one may leave.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.base.pod import SPREAD_S

MEET_S = 30.0
"""For a first replica. Where there is none yet, gateways don't wait for it for ever."""
POLL_S = 0.1
READINESS_PATH = "/readyz"
_BODY = b'{"status":"leaving"}'


async def arrived(is_ready: Callable[[], bool]) -> None:
    """When probes have had the time to find it ready, and the load balancer to send requests there."""
    with suppress(TimeoutError):
        async with asyncio.timeout(MEET_S):
            while not is_ready():  # noqa: ASYNC110  # it is asked as a probe asks
                await asyncio.sleep(POLL_S)
    await asyncio.sleep(SPREAD_S)


class Leaving:
    """An ASGI app around another, for a gateway's end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_leaving = False

    def begin(self) -> None:
        self._is_leaving = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_leaving or scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == READINESS_PATH:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(_BODY)),
                (b"connection", b"close"),
            ]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await self._app(scope, receive, _closing(send))


def _closing(send: Send) -> Send:
    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return closing
