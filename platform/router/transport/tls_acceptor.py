"""Connections by TLS from their first moment: accepted, counted, and agreed on within a time.

Not the requests on them (`connection`). A server of asyncio keeps a peer that opens a connection and agrees on nothing
for a minute, and nobody counts it; here it has its place among the connections that have shown no key (`connections`)
as soon as it is accepted. Invariant: a connection is in the register exactly as long as it is open, first as its
handshake, then as itself.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial

from penstock.router.transport.addresses import Addresses
from penstock.router.transport.connections import Closable, ConnectionLimits, Connections

PAUSE_S = 1.0
"""Pause in accepting where the process or the machine has no room for a connection, as asyncio's servers make it."""

log = logging.getLogger("penstock.listener")


class TlsAcceptor:
    """Accepts connections on listening sockets. make: the protocol of a connection; gets the handshake, which it takes
    out of the register when it puts itself in."""

    def __init__(
        self,
        listening: Sequence[socket.socket],
        tls: ssl.SSLContext,
        register: Connections,
        addresses: Addresses,
        limits: ConnectionLimits,
        make: Callable[[Closable], asyncio.Protocol],
    ) -> None:
        self._listening = listening
        self._tls = tls
        self._register = register
        self._addresses = addresses
        self._limits = limits
        self._make = make
        self._handshakes: set[_Handshake] = set()

    async def run(self) -> None:
        """Accept until cancelled; closes the listening sockets and ends what has not agreed by then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for listening in self._listening:
                    tasks.create_task(self._accept(listening))
        finally:
            for listening in self._listening:
                listening.close()
            for handshake in self._handshakes:
                handshake.abort()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except ConnectionError:  # gone before it was accepted
                continue
            except OSError as error:
                log.warning("accepting pauses", extra={"cause": error.strerror})
                await asyncio.sleep(PAUSE_S)
                continue
            handshake = _Handshake(accepted)
            handshake.task = loop.create_task(self._agree(handshake), name="tls handshake")
            self._handshakes.add(handshake)
            handshake.task.add_done_callback(partial(self._forget, handshake))
            if not self._register.add(handshake, self._addresses.of_connection(peer[0])):
                handshake.abort()

    def _forget(self, handshake: "_Handshake", _: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)

    async def _agree(self, handshake: "_Handshake") -> None:
        accepted, handshake.accepted = handshake.accepted, None
        assert accepted is not None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(handshake),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.head_timeout_s,
                ssl_shutdown_timeout=self._limits.head_timeout_s,
            )
        except OSError:  # TimeoutError and ssl.SSLError are some
            pass
        finally:
            self._register.remove(handshake)


class _Handshake:
    """A connection whose ends have not agreed on a key yet."""

    task: asyncio.Task[None]

    def __init__(self, accepted: socket.socket) -> None:
        self.accepted: socket.socket | None = accepted
        """The socket; None: the event loop has taken it over."""

    def abort(self) -> None:
        self.task.cancel()
        if self.accepted is not None:
            self.accepted.close()
