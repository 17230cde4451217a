"""How a gateway leaves a load balancer without a request lost: it says so first, and listens on for a while.

From `begin` on /readyz answers 503, and every answer asks its client to connect anew, which a load balancer then does elsewhere. Only when that has
spread may the listener close.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SPREAD_S = 5.0
"""For probes to fail, and for endpoints, proxies and idle connections to follow."""
READINESS_PATH = "/readyz"
_BODY = b'{"status":"leaving"}'


class Leaving:
    """An ASGI app around another."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_leaving = False

    def begin(self) -> None:
        self._is_leaving = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_leaving or scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == READINESS_PATH:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_BODY)), (b"connection", b"close")]
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
