"""The autoscaler's own two pages: /healthz for the kubelet, /metrics for Prometheus. Nothing else answers there, and
nothing is secret."""

import time
from collections.abc import Callable

import uvicorn
from starlette.types import Receive, Scope, Send

from penstock.base.metrics import CONTENT_TYPE, Metrics

STUCK_S = 60.0
"""A leader whose turn takes longer counts as stuck."""


class Pages:
    """An ASGI app of two pages."""

    def __init__(
        self, metrics: Metrics, lease: str, is_leader: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._lease = lease
        self._is_leader = is_leader
        self._clock = clock
        self._turned_s = clock()

    def note_turn(self) -> None:
        """Notes that the leader has had a turn."""
        self._turned_s = self._clock()

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, kind, body = self._page(scope["path"])
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))],
            }
        )
        await send({"type": "http.response.body", "body": body})

    def _page(self, path: str) -> tuple[int, str, bytes]:
        is_leader = self._is_leader()
        if not is_leader:
            self.note_turn()
        if path == "/metrics":
            self._metrics.autoscaler_is_leader.labels(self._lease).set(is_leader)
            return 200, CONTENT_TYPE, self._metrics.render()
        if path == "/healthz":
            is_well = self._clock() - self._turned_s < STUCK_S
            return (200, "text/plain", b"ok\n") if is_well else (503, "text/plain", b"the leader's turn does not end\n")
        return 404, "text/plain", b"not found\n"


async def serve_pages(pages: Pages, port: int) -> None:
    """Serves the two pages until cancelled, or until the process is asked to end."""
    config = uvicorn.Config(
        pages, host="", port=port, loop="none", lifespan="off", access_log=False, log_config=None, server_header=False
    )
    await uvicorn.Server(config).serve()
