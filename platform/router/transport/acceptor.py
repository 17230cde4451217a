"""Connections from their first moment: accepted, counted, opened in turn, and those by TLS agreed on within a time.

Not the requests on them (`connection`). A server of asyncio opens all that wait at once, which in a flood takes
hundreds of milliseconds, in the order in which they came; and it keeps a peer that opens a connection by TLS and agrees
on nothing for a minute, and nobody counts it. Here each has its place among the connections that have shown no key
(`connections`) as soon as it is accepted, which costs little, and is opened when it is its address's turn (`turns`).
Invariant: a connection is in the register exactly as long as it is open, first as its opening, then as itself.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial

from penstock.router.transport.addresses import Addresses
from penstock.router.transport.connections import Closable, ConnectionLimits, Connections
from penstock.router.transport.turns import Turns

PAUSE_S = 1.0
"""Pause in accepting where the process or the machine has no room for a connection, as asyncio's servers make it."""
MOST_ACCEPTED = 64
"""Connections that are accepted before others on the event loop get their turn: about a millisecond."""
MOST_OPENED = 16
"""Connections that are opened in one iteration of the event loop: a tenth of a millisecond each, by TLS more."""

log = logging.getLogger("penstock.listener")


class Acceptor:
    """Accepts connections on listening sockets. tls: None: without. make: the protocol of a connection; gets the
    opening, which it takes out of the register when it puts itself in."""

    def __init__(
        self,
        listening: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
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
        self._turns = Turns(MOST_OPENED)
        self._openings: set[_Opening] = set()
        self._is_over = False

    async def run(self) -> None:
        """Accept until cancelled; closes the listening sockets and ends what is not open by then."""
        try:
            for listening in self._listening:
                self._resume(listening)
            await asyncio.Event().wait()
        finally:
            self._is_over = True
            for listening in self._listening:
                asyncio.get_running_loop().remove_reader(listening)
                listening.close()
            for opening in list(self._openings):
                opening.abort()

    def _resume(self, listening: socket.socket) -> None:
        if not self._is_over:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Take what waits to be accepted; the event loop calls again while there is more."""
        for _ in range(MOST_ACCEPTED):
            try:
                accepted, peer = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # gone before it was accepted
                continue
            except OSError as error:
                log.warning("accepting pauses", extra={"cause": error.strerror})
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(PAUSE_S, self._resume, listening)
                return
            accepted.setblocking(False)
            self._take(accepted, peer[0])

    def _take(self, accepted: socket.socket, peer: str) -> None:
        opening = _Opening(accepted, self._openings)
        if not self._register.add(opening, self._addresses.of_connection(peer)):
            opening.abort()
        elif self._turns.take():
            self._begin(opening)
        else:
            self._turns.wait(peer, partial(self._begin, opening), is_known=self._register.is_known(peer))

    def _begin(self, opening: "_Opening") -> None:
        if opening.accepted is not None:
            opening.task = asyncio.get_running_loop().create_task(self._open(opening), name="opening of a connection")

    async def _open(self, opening: "_Opening") -> None:
        accepted, opening.accepted = opening.accepted, None
        assert accepted is not None
        loop = asyncio.get_running_loop()
        timeout_s = None if self._tls is None else self._limits.head_timeout_s
        try:
            await loop.connect_accepted_socket(
                lambda: self._make(opening),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=timeout_s,
            )
        except OSError:  # TimeoutError and ssl.SSLError are some
            pass
        finally:
            self._register.remove(opening)
            self._openings.discard(opening)


class _Opening:
    """A connection that is no protocol's yet: it waits for its turn, or by TLS its ends have not agreed on a key."""

    def __init__(self, accepted: socket.socket, openings: "set[_Opening]") -> None:
        self.accepted: socket.socket | None = accepted
        """The socket; None: the event loop has taken it over, or it is closed."""
        self.task: asyncio.Task[None] | None = None
        self._openings = openings
        openings.add(self)

    def abort(self) -> None:
        self._openings.discard(self)
        if self.task is not None:
            self.task.cancel()
        if self.accepted is not None:
            self.accepted.close()
            self.accepted = None
