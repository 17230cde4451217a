"""The gateway's HTTP sockets: uvicorn over an ASGI app, in the gateway's own event loop, stopped without cutting
answers short.

Serve can listen for a deployment itself ("direct ingress"), and we don't let it. It binds without SO_REUSEADDR, so a
gateway that was killed while clients were connected can't have its port again for the minute those connections stay in
TIME_WAIT; Serve's controller then marks the port as taken for good. It also puts a task, a queue and metrics around
every request, and keeps a proxy on the head node.

Decisions: docs/decisions/gateway.md
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Sequence
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from penstock.base.errors import ConfigError
from penstock.router.transport.acceptor import Acceptor
from penstock.router.transport.addresses import Addresses
from penstock.router.transport.connection import Connection
from penstock.router.transport.connections import ConnectionLimits, Connections
from penstock.router.transport.turns import Turns

BACKLOG = 2048
MOST_READ = 8
"""Connections that are read in one iteration of the event loop."""
DEFAULT_LIMITS = ConnectionLimits()

log = logging.getLogger("penstock.listener")


class Listener:
    """The gateway's sockets and the server behind them. Call `start`, and later `stop`, once each."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        ports: Sequence[int],
        drain_s: int,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        trusted_proxies: Sequence[str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """drain_s: time for answers under way at the end, before they are cut. trusted_proxies: see `Addresses`. tls:
        None: HTTP, else HTTPS only."""
        self.connections = Connections(limits, time.monotonic)
        self._sockets = [bind(host, port) for port in ports]
        addresses = Addresses(trusted_proxies)
        make_connection = partial(Connection, self.connections, addresses, limits, Turns(MOST_READ))
        config = uvicorn.Config(
            app,
            loop="none",
            http=cast("type[asyncio.Protocol]", make_connection),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=cast("int", limits.keep_alive_s),  # uvicorn hands it to the loop, which takes a float
            timeout_graceful_shutdown=drain_s,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._acceptor = Acceptor(
            self._sockets,
            tls,
            self.connections,
            addresses,
            limits,
            lambda opening: make_connection(
                opening=opening, config=config, server_state=self._server.server_state, app_state={}
            ),
        )
        self._accepting: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """The task that serves; it doesn't end before `stop`."""
        self._serving = asyncio.create_task(self._serve(), name="http")
        return self._serving

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._accepting = tasks.create_task(self._acceptor.run())
            await self._server.serve(sockets=[])
            self._accepting.cancel()

    async def stop(self) -> None:
        """Take no more connections, let answers under way finish, for `drain_s`, and cut the others."""
        self._server.should_exit = True
        if self._accepting is not None:
            self._accepting.cancel()
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"the gateway can't listen on {host}:{port}: {error.strerror}") from error
    listening.setblocking(False)
    return listening
