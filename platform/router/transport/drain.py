"""Replacement of gateways behind a load balancer without a request lost.

A gateway that is to go is drained first, and listens on for a while: from `begin` on /readyz answers 503, and every
response has its client connect anew, which a load balancer then does elsewhere. Only when that has spread may the
listener close. A new gateway counts as started only when the load balancer knows it: then the next one may go.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.base.pod import SPREAD_S
from penstock.router.transport.connection_balance import add_close_header

MEET_S = 30.0
"""Longest wait of a new gateway for its first replica, seconds."""
POLL_S = 0.1
READINESS_PATHS = frozenset({"/readyz", "/health", "/ping"})
"""Pages that say whether requests can be served; the latter two are other servers' names for it."""
_BODY = b'{"status":"leaving"}'


async def wait_until_known(is_ready: Callable[[], bool]) -> None:
    """Return when probes have had the time to find the gateway ready, and the load balancer to send requests there."""
    with suppress(TimeoutError):
        async with asyncio.timeout(MEET_S):
            while not is_ready():  # noqa: ASYNC110  # polled as a probe polls it
                await asyncio.sleep(POLL_S)
    await asyncio.sleep(SPREAD_S)


class DrainingApp:
    """An ASGI app around another, which stays as it is until the gateway is to go."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_draining = False

    def begin(self) -> None:
        """Answer 503 on READINESS_PATHS, and close each connection after its response, from now on."""
        self._is_draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_draining or scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in READINESS_PATHS:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(_BODY)),
                (b"connection", b"close"),
            ]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await self._app(scope, receive, add_close_header(send))
