"""A TCP connection that carries messages: four bytes of length, little-endian, then so many bytes. Both ends of the
token stream are one.

Not the meaning of the messages: `wire.frames` has that. A channel runs in callbacks of the event loop, without tasks or
threads: at a frame every few milliseconds a frame costs its wake-ups, and this takes one on each side. (Measured at a
frame every 10 ms on 2 cores: both ends together 206 us of CPU; a gRPC stream 550 us, and 354 us without gRPC's event
engine.) It does not authenticate the peer, `wire.proof` does; where the transport is TLS, it does not notice.
Invariant: messages arrive whole and in order; `on_end` is called once, and nothing after it.

Decisions: docs/decisions/stream.md
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import cast

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 64 * 2**20
"""Longest message: enough for a snapshot of four million blocks."""
WRITE_BUFFER_BYTES = 256 * 2**10
"""Bytes held for a peer that doesn't read, beyond the kernel's buffers, before `is_writable` is false."""
UNACKED_MS = 5000
"""How long a peer's machine may leave sent data unacknowledged before the connection is given up."""


TLS_S = 3.0
"""Longest agreement on TLS at the beginning, and on its end."""


def tls_timeout_s(tls: ssl.SSLContext | None) -> float | None:
    """The longest agreement on TLS as asyncio takes it: None without TLS."""
    return None if tls is None else TLS_S


def _do_nothing() -> None:
    """Default of `on_writable`, for owners that never wait to write."""


class Channel(asyncio.Protocol):
    """One end of a connection.

    on_message: called with each whole message. on_end: called when the connection is gone, whoever ended it.
    on_writable: called when `is_writable` is true again. `on_message` and `max_message_bytes` may be set anew at any
    time: the opening of a stream has its own.
    """

    def __init__(
        self,
        on_message: Callable[[bytes], None],
        on_end: Callable[[Exception | None], None],
        on_writable: Callable[[], None] = _do_nothing,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.on_message = on_message
        self.max_message_bytes = max_message_bytes
        """Longest message taken; a longer one ends the connection as soon as its length is known."""
        self.is_writable = True
        self.is_open = False
        self.peer = ""
        self._on_end = on_end
        self._on_writable = on_writable
        self._buffer = bytearray()
        """Bytes of a message that is not complete yet."""
        self._is_ended = False
        """Whether this end was closed or aborted, perhaps while TLS was still being agreed on."""
        self._transport: asyncio.Transport

    def send(self, message: bytes) -> None:
        """Send a message. Never waits; does nothing after the end. Callers that send much check `is_writable`."""
        if self.is_open:
            self._transport.write(len(message).to_bytes(HEADER_BYTES, "little") + message)

    def close(self) -> None:
        """End the connection when all that was sent has been written; one that is not made yet is never begun."""
        self._is_ended = True
        if self.is_open:
            self.is_open = False
            self._transport.close()

    def abort(self) -> None:
        """End the connection now; one that is not made yet is never begun."""
        self._is_ended = True
        if self.is_open:
            self.is_open = False
            self._transport.abort()

    @property
    def peer_names(self) -> tuple[str, ...]:
        """DNS names in the certificate of the other end, which TLS has checked; none without TLS."""
        certificate = self._transport.get_extra_info("peercert") or {}
        return tuple(name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKED_MS)
        self.peer = str(transport.get_extra_info("peername"))
        if self._is_ended:
            transport.abort()
        else:
            self.is_open = True

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        if buffer:
            buffer += data
            used = self._deliver(buffer)
            del buffer[:used]
        else:
            used = self._deliver(data)
            if used < len(data):
                buffer += data[used:]

    def _deliver(self, data: bytes | bytearray) -> int:
        """Call `on_message` with each whole message at the beginning of `data`; returns how many bytes they are."""
        begin, end = 0, len(data)
        while end - begin >= HEADER_BYTES and self.is_open:
            size = int.from_bytes(data[begin : begin + HEADER_BYTES], "little")
            if size > self.max_message_bytes:
                self.abort()
                break
            after = begin + HEADER_BYTES + size
            if after > end:
                break
            self.on_message(bytes(data[begin + HEADER_BYTES : after]))
            begin = after
        return begin

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        if self.is_open:
            self._on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._on_end(exc)
