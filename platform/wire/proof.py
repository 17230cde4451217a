"""How a router and a replica prove to each other, at the opening of a stream, that they are of the same platform: by
the replica's stream secret, which is never sent. Gateways derive every replica's (`base.subsecrets`); a replica has
only its own, so it opens no stream to another.

Three messages: `Opening` (the router's nonce), `Challenge` (the replica's nonce and proof), `Answer` (the router's
proof). A proof is a MAC over the protocol's version, the role of who makes it, the router's id, the epoch of the
replica's process and both nonces: it holds for one connection, can't be replayed on another, and none of one role is
one of the other. The replica proves first, so a router shows nothing to whoever merely took a replica's address. It
encrypts nothing: an attacker who can change packets on their way can change what follows, or pass the proofs on from
one side to the other; TLS (`base.tls`) is against that. Pure.

Until the version before there was one message, `Hello`, whose proof held for every connection to one process. It is
spoken with replicas of that version, and taken from gateways of it, only while `stream.accept_previous_hello` is on.

Decisions: docs/decisions/stream.md
"""

import hashlib
import hmac
import secrets
from typing import TypeAlias

import msgspec

from penstock.wire.frames import PREVIOUS_PROTOCOL, PROTOCOL_VERSION, Hello

PROOF_BYTES = 32
NONCE_BYTES = 32
MAX_OPENING_BYTES = 4096
"""Longest message before the sender has proven itself, on both ends."""
MAX_ROUTER_ID = 128
"""Characters."""


class Opening(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """First message of a router on a new stream."""

    router_id: str
    nonce: bytes
    """Random, NONCE_BYTES long, for this connection."""
    protocol: int = PROTOCOL_VERSION


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """The replica's reply to an Opening."""

    nonce: bytes
    """Random, NONCE_BYTES long, for this connection."""
    proof: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The router's reply to a Challenge; the stream follows."""

    proof: bytes


OpeningMessage: TypeAlias = Opening | Challenge | Answer

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[OpeningMessage] = msgspec.msgpack.Decoder(OpeningMessage)


def encode_opening(message: OpeningMessage) -> bytes:
    return _encoder.encode(message)


def decode_opening(data: bytes) -> OpeningMessage | None:
    """A message of the opening; None for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def make_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


class StreamProofs:
    """The two proofs of one connection. secret: the stream secret. epoch: the replica process's."""

    def __init__(self, secret: bytes, opening: Opening, epoch: str, nonce: bytes) -> None:
        """nonce: the replica's."""
        self._secret = secret
        self._parts = (
            str(opening.protocol).encode(),
            opening.router_id.encode(),
            epoch.encode(),
            opening.nonce,
            nonce,
        )

    @property
    def replica(self) -> bytes:
        """The replica's proof."""
        return self._make(b"replica")

    @property
    def router(self) -> bytes:
        """The router's proof."""
        return self._make(b"router")

    def _make(self, role: bytes) -> bytes:
        state = hashlib.blake2b(digest_size=PROOF_BYTES, key=self._secret, person=b"penstock-stream")
        for part in (role, *self._parts):
            state.update(len(part).to_bytes(4, "little") + part)
        return state.digest()


def is_same(proof: bytes, expected: bytes) -> bool:
    """Whether a proof is the expected one. Takes the same time whatever it is."""
    return hmac.compare_digest(proof, expected)


# the hello of the version before


def make_hello(secret: bytes, router_id: str, epoch: str) -> Hello:
    """The previous version's first message to the replica process that has this epoch. secret: the cluster's."""
    return Hello(router_id, PREVIOUS_PROTOCOL, _make_hello_proof(secret, router_id, epoch))


def is_proved(hello: Hello, secret: bytes, epoch: str) -> bool:
    """Whether the router that sent the previous version's message knows the cluster secret. Takes the same time
    whatever the proof."""
    return hmac.compare_digest(hello.proof, _make_hello_proof(secret, hello.router_id, epoch))


def _make_hello_proof(secret: bytes, router_id: str, epoch: str) -> bytes:
    text = f"{len(router_id)} {router_id} {epoch}".encode()
    return hashlib.blake2b(text, digest_size=PROOF_BYTES, key=secret, person=b"penstock-hello").digest()
