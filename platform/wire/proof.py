"""How a router proves to a replica that it is of the same platform: by the cluster secret, which never travels.

What it sends holds for one router and one replica process. It proves who opens a stream; it encrypts nothing, and who
can change packets on their way can change what follows: keep the port on a private network.
"""

import hashlib
import hmac

from penstock.wire.frames import Hello

PROOF_BYTES = 32


def hello(secret: bytes, router_id: str, epoch: str) -> Hello:
    """The first message to the replica process that has this epoch. secret: 16 to 64 bytes."""
    return Hello(router_id, proof=_proof(secret, router_id, epoch))


def is_proved(said: Hello, secret: bytes, epoch: str) -> bool:
    """In constant time."""
    return hmac.compare_digest(said.proof, _proof(secret, said.router_id, epoch))


def _proof(secret: bytes, router_id: str, epoch: str) -> bytes:
    text = f"{len(router_id)} {router_id} {epoch}".encode()
    return hashlib.blake2b(text, digest_size=PROOF_BYTES, key=secret, person=b"penstock-hello").digest()
