"""How a router proves to a replica that it is of the same platform: by the cluster secret, which is never sent.

A proof holds for one router and one replica process. It authenticates the opening of a stream; it encrypts nothing, and
an attacker who can change packets can change what follows: keep the port on a private network.
"""

import hashlib
import hmac

from penstock.wire.frames import Hello

PROOF_BYTES = 32


def make_hello(secret: bytes, router_id: str, epoch: str) -> Hello:
    """The first message to the replica process that has this epoch. secret: 16 to 64 bytes."""
    return Hello(router_id, proof=_make_proof(secret, router_id, epoch))


def is_proved(hello: Hello, secret: bytes, epoch: str) -> bool:
    """Whether the router that sent the message knows the secret. Takes the same time whatever the proof."""
    return hmac.compare_digest(hello.proof, _make_proof(secret, hello.router_id, epoch))


def _make_proof(secret: bytes, router_id: str, epoch: str) -> bytes:
    text = f"{len(router_id)} {router_id} {epoch}".encode()
    return hashlib.blake2b(text, digest_size=PROOF_BYTES, key=secret, person=b"penstock-hello").digest()
