"""A TCP connection that carries messages: four bytes of length, little-endian, then so many bytes. Both ends of the
token stream are one.

What the bytes mean is the owner's affair. It runs in callbacks of the event loop, without tasks or threads: at a frame
every few milliseconds a frame costs its wake-ups, and this takes one on each side. (Measured at a frame every 10 ms on
2 cores: both ends together 206 us of CPU; a gRPC stream 550 us, and 354 us without gRPC's event engine.) Who the peer
is, `wire.proof` shows, not this: keep the port on a private network. Invariant: messages arrive whole and in order;
`on_end` is called once, and nothing after it.

Decisions: docs/decisions/stream.md
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 64 * 2**20
"""A snapshot of four million blocks."""
WRITE_BUFFER_BYTES = 256 * 2**10
"""Held for a peer that doesn't read, beyond the kernel's buffers, before `is_writable` is false."""
UNACKED_MS = 5000
"""A peer's machine that doesn't acknowledge what was sent to it for so long is gone."""


def _nothing() -> None:
    """For owners that never hold anything back."""


class Channel(asyncio.Protocol):
    """on_message: a whole message. on_end: the connection is gone, whoever ended it. on_writable: `is_writable` is true
    again."""

    def __init__(
        self,
        on_message: Callable[[bytes], None],
        on_end: Callable[[Exception | None], None],
        on_writable: Callable[[], None] = _nothing,
    ) -> None:
        self.is_writable = True
        self.is_open = False
        self.peer = ""
        self._on_message = on_message
        self._on_end = on_end
        self._on_writable = on_writable
        self._buffer = bytearray()
        """The beginning of a message."""
        self._transport: asyncio.Transport

    def send(self, message: bytes) -> None:
        """Never waits; nothing happens after the end. Who sends much looks at `is_writable`."""
        if self.is_open:
            self._transport.write(len(message).to_bytes(HEADER_BYTES, "little") + message)

    def close(self) -> None:
        """End it when all that was sent is on its way."""
        self.is_open = False
        self._transport.close()

    def abort(self) -> None:
        """End it now."""
        self.is_open = False
        self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKED_MS)
        self.peer = str(transport.get_extra_info("peername"))
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        if buffer:
            buffer += data
            used = self._pass_on(buffer)
            del buffer[:used]
        else:
            used = self._pass_on(data)
            if used < len(data):
                buffer += data[used:]

    def _pass_on(self, data: bytes | bytearray) -> int:
        """The whole messages at the beginning of `data`; how many bytes they are."""
        begin, end = 0, len(data)
        while end - begin >= HEADER_BYTES and self.is_open:
            size = int.from_bytes(data[begin : begin + HEADER_BYTES], "little")
            if size > MAX_MESSAGE_BYTES:
                self.abort()
                break
            after = begin + HEADER_BYTES + size
            if after > end:
                break
            self._on_message(bytes(data[begin + HEADER_BYTES : after]))
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
