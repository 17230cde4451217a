"""The router's end of the token stream to one replica: one channel, used once, from its opening on.

Not the keeper of links: who wants another after a loss connects again. Invariants: what is sent in one turn of the
event loop travels in one frame, in order; a loss is reported once, within seconds also when the replica hangs or its
machine vanishes; no frame is passed on after that, nor after the link was closed.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from penstock.base.subsecrets import stream_secret
from penstock.router.replicas.replica_client import Member
from penstock.wire.channel import MAX_MESSAGE_BYTES, Channel, tls_timeout_s
from penstock.wire.errors import ReplicaLost
from penstock.wire.frames import (
    PREVIOUS_PROTOCOL,
    PROTOCOL_VERSION,
    Abort,
    Announce,
    DownFrame,
    DropAdapter,
    LoadAdapter,
    Op,
    Submit,
    UpFrame,
    decode_down,
    encode,
)
from penstock.wire.proof import (
    MAX_OPENING_BYTES,
    NONCE_BYTES,
    Answer,
    Challenge,
    Opening,
    StreamProofs,
    decode_opening,
    encode_opening,
    is_same,
    make_hello,
    make_nonce,
)
from penstock.wire.stream_config import REPLICA_NAME

CONNECT_TIMEOUT_S = 3.0
"""Longest time from the first packet to the replica's first load report."""
SILENCE_S = 4.0
"""Silence after which a replica is lost; while it has nothing else to send it sends a load every second."""
NUM_LOOKS = 4
"""How often a link looks in that time whether something came."""

log = logging.getLogger("penstock.link")


class Greeting(NamedTuple):
    """What a router opens a stream with."""

    router_id: str
    epoch: str
    """Epoch of the replica's process."""
    secret: bytes
    """The replica's stream secret; for one of the previous version the cluster secret."""
    is_previous: bool = False
    """Whether the replica is of the version before, which says `Hello` and proves nothing."""


class Greeter:
    """Chooses how to open the stream to a replica, by what that publishes through Serve and never by what somebody says
    on the network. secret: the cluster's. accepts_previous: whether replicas of the version before are spoken to."""

    def __init__(self, router_id: str, secret: bytes, *, accepts_previous: bool) -> None:
        self._router_id = router_id
        self._secret = secret
        self._accepts_previous = accepts_previous

    def greet(self, member: Member) -> Greeting:
        """Raises ReplicaLost for a replica that is not spoken to."""
        if member.protocol == PROTOCOL_VERSION:
            key_id = _read_key_id(member)
            return Greeting(self._router_id, member.epoch, stream_secret(self._secret, key_id))
        if member.protocol == PREVIOUS_PROTOCOL and self._accepts_previous:
            return Greeting(self._router_id, member.epoch, self._secret, is_previous=True)
        raise ReplicaLost(
            f"The replica at {member.address} speaks protocol {member.protocol}, this gateway {PROTOCOL_VERSION}; "
            "stream.accept_previous_hello allows the previous one."
        )


def _read_key_id(member: Member) -> bytes:
    try:
        return bytes.fromhex(member.stream_key_id)
    except ValueError:
        raise ReplicaLost(f"The replica at {member.address} publishes no key id but garbage.") from None


class ChannelLink:
    """One token stream to a replica, as `connect` opens it. Its methods never wait; after a loss they do nothing."""

    def __init__(
        self,
        address: str,
        greeting: Greeting,
        on_frame: Callable[[DownFrame], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.channel = Channel(self._on_challenge, self._on_end, max_message_bytes=MAX_OPENING_BYTES)
        self._greeting = greeting
        self._opening = Opening(greeting.router_id, make_nonce())
        self._address = address
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self._early: list[DownFrame] | None = []
        """Frames from before the owner had the link; None: it has been given them."""
        self._is_ready = False
        """The owner has the link."""
        self._ops: list[Op] = []
        self._is_over = False
        self._loss: str | None = None
        """Why the stream ended by itself."""
        self._num_in_vain = 0
        """Looks in a row that found nothing new."""
        self._watchdog: asyncio.TimerHandle | None = None

    def submit(self, submit: Submit) -> None:
        self._push(submit)

    def abort(self, sid: int) -> None:
        self._push(Abort(sid))

    def announce(self) -> None:
        """Request a snapshot of the replica's blocks."""
        self._push(Announce())

    def load_adapter(self, digest: str, tenant: str = "") -> None:
        self._push(LoadAdapter(digest, tenant))

    def drop_adapter(self, digest: str) -> None:
        self._push(DropAdapter(digest))

    async def handshake(self) -> None:
        """Open the stream and wait for the first frame. Raises ReplicaLost, with the replica's words where it
        refuses."""
        router_id, epoch, secret, is_previous = self._greeting
        if is_previous:
            self._begin()
            self._push(make_hello(secret, router_id, epoch))
        else:
            self.channel.send(encode_opening(self._opening))
        await self._answered
        if self._loss is not None:
            raise ReplicaLost(f"No stream to the replica at {self._address}: {self._loss}.")

    def open(self) -> None:
        """Begin to deliver frames to the owner, from the next turn of the event loop on; those that came before are
        delivered first. From now on the loss of the stream is reported too."""
        self._is_ready = True
        self._loop.call_soon(self._release)
        self._watch()

    def close(self) -> None:
        """Close the stream. No frame and no loss is reported after that."""
        self._is_over = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self.channel.is_open:
            self.channel.close()

    def _push(self, op: Op) -> None:
        if not self._ops:
            self._loop.call_soon(self._flush)
        self._ops.append(op)

    def _flush(self) -> None:
        ops, self._ops = self._ops, []
        try:
            frame = encode(UpFrame(ops))
        except Exception:  # whatever it was, nothing of this turn was sent, and those who wait for it must know
            log.exception("link failed", extra={"address": self._address})
            self._lose("the router failed on a frame")
            return
        self.channel.send(frame)

    def _on_challenge(self, data: bytes) -> None:
        """Take the replica's reply to the Opening, and prove ourselves only to one that has."""
        challenge = decode_opening(data)
        if not isinstance(challenge, Challenge):
            self._lose(_read_refusal(data))
            return
        proofs = StreamProofs(self._greeting.secret, self._opening, self._greeting.epoch, challenge.nonce)
        if len(challenge.nonce) != NONCE_BYTES or not is_same(challenge.proof, proofs.replica):
            self._lose("it is not the replica of this platform that it was taken for")
            return
        self._begin()
        self.channel.send(encode_opening(Answer(proofs.router)))

    def _begin(self) -> None:
        """Take frames from now on."""
        self.channel.max_message_bytes = MAX_MESSAGE_BYTES
        self.channel.on_message = self._on_message

    def _on_message(self, data: bytes) -> None:
        self._num_in_vain = 0
        try:
            frame = decode_down(data)
        except msgspec.MsgspecError:
            self._lose("it is not a replica of this version")
            return
        if frame.error is not None:
            self._lose(frame.error)
        elif self._early is None:
            self._deliver(frame)
        else:
            self._early.append(frame)
            self._end_handshake()

    def _end_handshake(self) -> None:
        if not self._answered.done():
            self._answered.set_result(None)

    def _release(self) -> None:
        early, self._early = self._early or [], None
        for frame in early:
            self._deliver(frame)

    def _deliver(self, frame: DownFrame) -> None:
        if self._is_over:
            return
        try:
            self._on_frame(frame)
        except Exception:  # whatever it was, the stream can't be trusted any more, and its owner must know
            log.exception("link failed", extra={"address": self._address})
            self._lose("the router failed on a frame")

    def _watch(self) -> None:
        # looks are counted and not seconds: when this process stood still, what came meanwhile is not read yet, and
        # all the replicas would be lost at once; however long that took, it is one look
        self._num_in_vain += 1
        if self._num_in_vain > NUM_LOOKS:
            self._lose(f"nothing came for {SILENCE_S:.0f} s")
        elif not self._is_over:
            self._watchdog = self._loop.call_later(SILENCE_S / NUM_LOOKS, self._watch)

    def _on_end(self, error: Exception | None) -> None:
        self._lose("the connection ended" if error is None else f"the connection broke ({type(error).__name__})")

    def _lose(self, reason: str) -> None:
        if self._is_over:
            return
        self.close()
        self._loss = reason
        self._end_handshake()
        if self._is_ready:
            log.warning("replica lost", extra={"address": self._address, "reason": reason})
            self._on_lost()


def _read_refusal(data: bytes) -> str:
    """The reason in a frame that ends the stream, or that it is no such frame."""
    try:
        reason = decode_down(data).error
    except msgspec.MsgspecError:
        reason = None
    return reason or "it is not a replica of this version"


@asynccontextmanager
async def connect(
    address: str,
    greeting: Greeting,
    on_frame: Callable[[DownFrame], None],
    on_lost: Callable[[], None],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[ChannelLink]:
    """Open the stream to the replica at `address` (host:port); leaving closes it.

    greeting: whom the replica is to take us for, and we it. on_frame: called with every frame, from the first, which
    has a load. on_lost: called once, when the stream ends otherwise than by leaving. Raises ReplicaLost when the
    replica can't be reached, refuses, proves to be another one, or does not answer within CONNECT_TIMEOUT_S. tls: by
    which the replica's certificate is checked and ours shown; None: the stream is not encrypted.
    """
    link = ChannelLink(address, greeting, on_frame, on_lost)
    host, _, port = address.rpartition(":")
    try:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: link.channel,
                    host.strip("[]"),
                    int(port),
                    ssl=tls,
                    server_hostname=None if tls is None else REPLICA_NAME,
                    ssl_handshake_timeout=tls_timeout_s(tls),
                    ssl_shutdown_timeout=tls_timeout_s(tls),
                )
                await link.handshake()
        except TimeoutError:
            raise ReplicaLost(f"The replica at {address} did not answer within {CONNECT_TIMEOUT_S:.0f} s.") from None
        except OSError as error:
            raise ReplicaLost(
                f"No connection to the replica at {address}: {error.strerror or type(error).__name__}."
            ) from None
        link.open()
        yield link
    finally:
        link.close()
