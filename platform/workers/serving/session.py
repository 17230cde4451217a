"""One router's session on the token stream: its connection, and the frames that go down to it.

Not the sequences' way through the engine (`stream`), nor who is let in (`opening`). All state belongs to one event
loop. Invariants: nothing of a connection is taken before its router has proven itself, and of its messages no more than
MAX_OPENING_BYTES are held until then; frames go out in order, when they are due; what is held for a router
that doesn't read is bounded.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from penstock.wire.channel import MAX_MESSAGE_BYTES, Channel
from penstock.wire.frames import DownFrame, Load, Op, decode_up, encode
from penstock.wire.proof import MAX_OPENING_BYTES
from penstock.workers.engine.sequence import Sequence
from penstock.workers.serving.intake import ProtocolError
from penstock.workers.serving.opening import Door, Entrance
from penstock.workers.serving.outbox import Outbox

MAX_HELD_TOKENS = 65536
"""Most tokens held for a router that doesn't read; with more, its connection is aborted."""
MAX_HELD_EVENT_BYTES = 32 * 2**20
"""Most bytes of block events held for a router that doesn't read; with more, its connection is aborted."""
OPENING_TIMEOUT_S = 5.0
"""Longest time until the router at the other end of a connection has proven itself."""
TIMER_S = 0.001
"""Resolution of the event loop's timers."""

log = logging.getLogger("penstock.stream")


class Session:
    """A connected router: its sequences, and what is to be sent to it."""

    def __init__(
        self,
        router_id: str,
        channel: Channel,
        make_load: Callable[["Session"], Load],
        clock: Callable[[], float],
        stream_interval_s: float,
    ) -> None:
        """make_load: the newest load report for this router. clock: monotonic seconds. stream_interval_s: least time
        between two frames of deltas."""
        self.router_id = router_id
        self.live: dict[int, Sequence] = {}
        """Unfinished sequences of the router, by sid."""
        self.outbox = Outbox(stream_interval_s)
        self.last_sid = 0
        """Highest sid received."""
        self.counted_sid = 0
        """Highest sid that the engine's numbers in the newest report count."""
        self.reported_credit = 0
        """Credit in the last load report that was sent to the router."""
        self.reported_changes = 0
        """Changes of the counts of adapters that load reports have told the router of."""
        self._channel = channel
        self._make_load = make_load
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0

    def schedule(self) -> None:
        """Send the next frame when it is due; while the router doesn't read, hold it, within bounds."""
        outbox = self.outbox
        if not self._channel.is_writable:
            if outbox.num_tokens > MAX_HELD_TOKENS or outbox.num_event_bytes > MAX_HELD_EVENT_BYTES:
                log.warning("router does not read", extra={"router_id": self.router_id})
                self._channel.abort()
            return
        due_s = outbox.due_s()
        if due_s is None:
            return
        delay_s = due_s - self._clock()
        if delay_s <= TIMER_S:
            self._send()
            due_s = outbox.due_s()  # a load that came too soon after the last one is still to be sent
            if due_s is None:
                return
            delay_s = due_s - self._clock()
        if self._timer is None or due_s < self._timer_due_s - TIMER_S:
            self.cancel_timer()
            loop = asyncio.get_running_loop()
            self._timer, self._timer_due_s = loop.call_later(delay_s, self._on_timer), due_s

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self.schedule()

    def _send(self) -> None:
        now_s = self._clock()
        load = self._make_load(self) if self.outbox.wants_load(now_s) else None
        if load is not None:
            self.reported_credit = load.max_inflight
        frame = self.outbox.take(now_s, load)
        if frame is None:
            return
        try:
            data = encode(frame)
        except (TypeError, ValueError, OverflowError):
            # its deltas are gone: the router must resume them, not wait for them
            log.exception("frame can't be encoded", extra={"router_id": self.router_id})
            self._channel.abort()
            return
        self._channel.send(data)


class SessionOwner(Protocol):
    """The part of the stream server that a connection needs."""

    door: Door

    def make_session(self, router_id: str, channel: Channel) -> Session: ...
    def join(self, connection: "Connection", session: Session) -> None:
        """Take in a router that has proven itself."""

    def take(self, session: Session, ops: list[Op]) -> None:
        """Carry out a router's operations. Raises ProtocolError."""

    def leave(self, connection: "Connection") -> None:
        """Forget a connection that has ended, and its session if it has one."""


class Connection:
    """A channel, and the session of the router at its other end once that has proven itself."""

    def __init__(self, owner: SessionOwner) -> None:
        self.channel = Channel(self._on_opening, self._on_end, self._on_writable, max_message_bytes=MAX_OPENING_BYTES)
        self.session: Session | None = None
        self._owner = owner
        self._entrance = Entrance(owner.door)
        self._opening_timer = asyncio.get_running_loop().call_later(OPENING_TIMEOUT_S, self._on_timeout)

    def give_up(self) -> None:
        """End a connection whose router has not proven itself, now."""
        self._end_opening()

    def _on_opening(self, data: bytes) -> None:
        try:
            reply, router_id = self._entrance.take(data, self.channel.peer_names)
        except ProtocolError as error:
            self._break(str(error))
            return
        if reply is not None:
            self.channel.send(reply)
        if router_id is not None:
            self._begin(router_id)

    def _begin(self, router_id: str) -> None:
        self._opening_timer.cancel()
        self.channel.max_message_bytes = MAX_MESSAGE_BYTES
        self.session = session = self._owner.make_session(router_id, self.channel)
        self.channel.on_message = partial(self._on_message, session)
        self._owner.join(self, session)

    def _on_message(self, session: Session, data: bytes) -> None:
        try:
            self._owner.take(session, decode_up(data).ops)
        except msgspec.MsgspecError:
            self._break("A frame can't be decoded.")
        except ProtocolError as error:
            self._break(str(error))

    def _on_timeout(self) -> None:
        self._break(f"No proof came within {OPENING_TIMEOUT_S:.0f} s.")
        self._end_opening()

    def _end_opening(self) -> None:
        """Leave nothing behind, also of a connection that was never made: its TLS may not have come to its end."""
        self._opening_timer.cancel()
        self.channel.abort()
        self._owner.leave(self)

    def _break(self, reason: str) -> None:
        log.warning("stream broken", extra={"peer": self.channel.peer, "reason": reason})
        self.channel.send(encode(DownFrame([], error=reason)))
        self.channel.close()

    def _on_writable(self) -> None:
        if self.session is not None:
            self.session.schedule()

    def _on_end(self, _error: Exception | None) -> None:
        self._opening_timer.cancel()
        self._owner.leave(self)
