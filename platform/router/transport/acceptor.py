"""Connections from their first moment: accepted a few at a time, and those by TLS counted, and agreed on within a time.

Not the requests on them (`connection`). A server of asyncio takes all that wait to be accepted at once, hundreds of
milliseconds in a flood; and it keeps a peer that opens a connection and agrees on nothing for a minute, and nobody
counts it. Here that one has its place among the connections that have shown no key (`connections`) as soon as it is
accepted. Invariant: a connection is in the register exactly as long as it is open, by TLS first as its handshake.
"""

import asyncio
import itertools
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial

from penstock.router.transport.addresses import Addresses
from penstock.router.transport.connections import Closable, ConnectionLimits, Connections

PAUSE_S = 1.0
"""Pause in accepting where the process or the machine has no room for a connection, as asyncio's servers make it."""

MOST_AT_ONCE = 32
"""Connections that are accepted before others on the event loop get their turn: some milliseconds, and more than are
read at once (`turns`), so that no client waits to be accepted behind a flood."""

log = logging.getLogger("penstock.listener")


class Acceptor:
    """Accepts connections on listening sockets. tls: None: without. make: the protocol of a connection; gets the
    handshake, if there is one, which it takes out of the register when it puts itself in."""

    def __init__(
        self,
        listening: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
        register: Connections,
        addresses: Addresses,
        limits: ConnectionLimits,
        make: Callable[[Closable | None], asyncio.Protocol],
    ) -> None:
        self._listening = listening
        self._tls = tls
        self._register = register
        self._addresses = addresses
        self._limits = limits
        self._make = make
        self._openings: set[_Opening] = set()

    async def run(self) -> None:
        """Accept until cancelled; closes the listening sockets and ends what has not agreed by then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for listening in self._listening:
                    tasks.create_task(self._accept(listening))
        finally:
            for listening in self._listening:
                listening.close()
            for opening in self._openings:
                opening.abort()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            if number % MOST_AT_ONCE == 0:  # `sock_accept` does not wait where a connection is there
                await asyncio.sleep(0)
            try:
                accepted, peer = await loop.sock_accept(listening)
            except ConnectionError:  # gone before it was accepted
                continue
            except OSError as error:
                log.warning("accepting pauses", extra={"cause": error.strerror})
                await asyncio.sleep(PAUSE_S)
                continue
            opening = _Opening(accepted)
            opening.task = loop.create_task(self._open(opening), name="opening of a connection")
            self._openings.add(opening)
            opening.task.add_done_callback(partial(self._forget, opening))
            is_counted = self._tls is not None
            if is_counted and not self._register.add(opening, self._addresses.of_connection(peer[0])):
                opening.abort()

    def _forget(self, opening: "_Opening", _: asyncio.Task[None]) -> None:
        self._openings.discard(opening)

    async def _open(self, opening: "_Opening") -> None:
        accepted, opening.accepted = opening.accepted, None
        assert accepted is not None
        loop = asyncio.get_running_loop()
        try:
            if self._tls is None:
                await loop.connect_accepted_socket(lambda: self._make(None), accepted)
            else:
                await loop.connect_accepted_socket(
                    lambda: self._make(opening),
                    accepted,
                    ssl=self._tls,
                    ssl_handshake_timeout=self._limits.head_timeout_s,
                    ssl_shutdown_timeout=self._limits.head_timeout_s,
                )
        except OSError:  # TimeoutError and ssl.SSLError are some
            pass
        finally:
            self._register.remove(opening)


class _Opening:
    """A connection that is no protocol's yet: by TLS its ends have not agreed on a key."""

    task: asyncio.Task[None]

    def __init__(self, accepted: socket.socket) -> None:
        self.accepted: socket.socket | None = accepted
        """The socket; None: the event loop has taken it over."""

    def abort(self) -> None:
        self.task.cancel()
        if self.accepted is not None:
            self.accepted.close()
