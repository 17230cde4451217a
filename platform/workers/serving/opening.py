"""The opening of a stream as the replica sees it: which routers are let in, and how many connections may be at it.

Not what follows (`session`), and no I/O but nonces and a line in the log. Invariant: nothing but the opening's own
messages is read before the router has proven itself.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from penstock.wire.frames import PREVIOUS_PROTOCOL, PROTOCOL_VERSION, Hello, decode_up
from penstock.wire.proof import (
    MAX_ROUTER_ID,
    NONCE_BYTES,
    Answer,
    Challenge,
    Opening,
    StreamProofs,
    decode_opening,
    encode_opening,
    is_proved,
    is_same,
    make_nonce,
)
from penstock.workers.serving.intake import ProtocolError

MAX_UNPROVEN = 64
"""Connections that may be at their opening at once; one more ends the oldest. A router of ours takes milliseconds, so
it gets through while fewer than thousands of strangers come in a second."""


log = logging.getLogger("penstock.stream")


class Step(NamedTuple):
    """What a message of the opening led to."""

    reply: bytes | None = None
    """Message to send back; None: there is none."""
    router_id: str | None = None
    """Id of the router, which has proven itself; None: not yet."""


class Door:
    """What a replica process checks routers by. secret: the stream secret. epoch: the process's. previous_secret: the
    cluster secret where gateways of the version before are let in, else None. router_name: DNS name that a router's
    certificate must have; None: streams are without TLS."""

    def __init__(
        self,
        secret: bytes,
        epoch: str,
        previous_secret: bytes | None = None,
        router_name: str | None = None,
        make_nonce: Callable[[], bytes] = make_nonce,
    ) -> None:
        self.secret = secret
        self.epoch = epoch
        self.previous_secret = previous_secret
        self.router_name = router_name
        self.make_nonce = make_nonce


class Entrance:
    """One connection's opening. Call `take` with each message until it returns the router's id."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._proofs: StreamProofs | None = None
        self._router_id = ""

    def take(self, data: bytes, names: tuple[str, ...] = ()) -> Step:
        """Raises ProtocolError for anything that no router of ours would send. names: of its certificate."""
        if self._door.router_name is not None and self._door.router_name not in names:
            raise ProtocolError(f"The router's certificate has not the name {self._door.router_name}.")
        message = decode_opening(data)
        if self._proofs is None:
            if isinstance(message, Opening):
                return Step(reply=self._challenge(message))
            return Step(router_id=self._take_hello(data))
        if isinstance(message, Answer) and is_same(message.proof, self._proofs.router):
            return Step(router_id=self._router_id)
        raise ProtocolError("The router does not know this platform's secret.")

    def _challenge(self, opening: Opening) -> bytes:
        if opening.protocol != PROTOCOL_VERSION:
            raise ProtocolError(f"The router speaks protocol {opening.protocol}, this replica {PROTOCOL_VERSION}.")
        if len(opening.nonce) != NONCE_BYTES or len(opening.router_id) > MAX_ROUTER_ID:
            raise ProtocolError("The opening of the stream is malformed.")
        nonce = self._door.make_nonce()
        self._proofs = StreamProofs(self._door.secret, opening, self._door.epoch, nonce)
        self._router_id = opening.router_id
        return encode_opening(Challenge(nonce, self._proofs.replica))

    def _take_hello(self, data: bytes) -> str:
        """The id of a router of the version before."""
        try:
            ops = decode_up(data).ops
        except msgspec.MsgspecError:
            raise ProtocolError("The opening of the stream can't be decoded.") from None
        if len(ops) != 1 or not isinstance(hello := ops[0], Hello):
            raise ProtocolError("A stream begins with its opening.")
        if hello.protocol != PREVIOUS_PROTOCOL or self._door.previous_secret is None:
            raise ProtocolError(f"The router speaks protocol {hello.protocol}, this replica {PROTOCOL_VERSION}.")
        if not is_proved(hello, self._door.previous_secret, self._door.epoch):
            raise ProtocolError("The router does not know this platform's secret.")
        return hello.router_id


class Unproven(Protocol):
    """A connection at its opening."""

    def give_up(self) -> None:
        """End the connection, now."""


class Lobby:
    """The connections at their opening, oldest first; never more than `size`. A flood is a line in the log when it
    begins, however many come."""

    def __init__(self, size: int = MAX_UNPROVEN) -> None:
        self._size = size
        self._waiting: dict[Unproven, None] = {}
        self._is_flooded = False

    def enter(self, connection: Unproven) -> None:
        """Let a connection begin its opening; where there are `size`, the oldest is given up."""
        if len(self._waiting) >= self._size:
            if not self._is_flooded:
                self._is_flooded = True
                log.warning("strangers fill the stream's port", extra={"connections": self._size})
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.give_up()
        self._waiting[connection] = None

    def leave(self, connection: Unproven) -> None:
        """Forget a connection that has ended, or whose router has proven itself. One that is not here is ignored."""
        self._waiting.pop(connection, None)
        if len(self._waiting) <= self._size // 2:
            self._is_flooded = False

    def __len__(self) -> int:
        return len(self._waiting)
