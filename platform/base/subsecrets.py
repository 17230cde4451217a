"""Sub-secrets of the cluster secret, a purpose each: HKDF with SHA-256 (RFC 5869), so that who has one can compute
neither the cluster secret nor another one.

Not the digests of API keys and the salts of tenants: they are keyed with the cluster secret itself, as they always
were, so that what was made before stays valid (`tenancy.keys`, `tenancy.tenants`).

Decisions: docs/decisions/secrets.md
"""

import hashlib
import hmac
import secrets
from typing import NamedTuple

from penstock.base.errors import ConfigError

SUBSECRET_BYTES = 32
KEY_ID_BYTES = 16
REPLICA_FIELDS = ("block-secret", "stream-secret", "stream-key-id")
"""Names in a replica's file of secrets, in the order of `ReplicaSecrets`."""
_SALT = b"penstock"
_HASH_BYTES = 32


class ReplicaSecrets(NamedTuple):
    """All secrets that a replica has. Gateways derive the same ones."""

    block: bytes
    """Key of the block hashes (`prefix.hashing`), the same for all replicas."""
    stream: bytes
    """Key of the proofs at the opening of a stream (`wire.proof`), this replica's own."""
    stream_key_id: bytes
    """What the stream secret was derived by besides the cluster secret: random, public, KEY_ID_BYTES long."""


def derive(secret: bytes, purpose: str) -> bytes:
    """The sub-secret of a purpose, SUBSECRET_BYTES long. secret: the cluster's."""
    return hkdf(secret, _SALT, f"penstock {purpose} 1".encode(), SUBSECRET_BYTES)


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """Key material of `length` bytes, at most 8160: RFC 5869, extract and expand, with SHA-256."""
    key = hmac.digest(salt or bytes(_HASH_BYTES), secret, hashlib.sha256)
    material = block = b""
    for number in range(1, -(-length // _HASH_BYTES) + 1):
        block = hmac.digest(key, block + info + bytes([number]), hashlib.sha256)
        material += block
    return material[:length]


def block_secret(secret: bytes) -> bytes:
    """Key of the block hashes. secret: the cluster's."""
    return derive(secret, "blocks")


def stream_secret(secret: bytes, key_id: bytes) -> bytes:
    """The stream secret of the replica that publishes this key id. secret: the cluster's."""
    return derive(secret, f"stream {key_id.hex()}")


def replica_secrets(secret: bytes) -> ReplicaSecrets:
    """New secrets for a replica. secret: the cluster's."""
    key_id = secrets.token_bytes(KEY_ID_BYTES)
    return ReplicaSecrets(block_secret(secret), stream_secret(secret, key_id), key_id)


def format_replica_secrets(found: ReplicaSecrets) -> str:
    """The text of a replica's file of secrets: a name and hex digits a line."""
    return "".join(f"{name} {value.hex()}\n" for name, value in zip(REPLICA_FIELDS, found, strict=True))


def parse_replica_secrets(text: str) -> ReplicaSecrets:
    """The secrets in a replica's file. Raises ConfigError, whose text holds none of them."""
    try:
        found = {name: bytes.fromhex(value) for name, value in (line.split() for line in text.splitlines())}
        own = ReplicaSecrets(*(found[name] for name in REPLICA_FIELDS))
    except (ValueError, KeyError):
        raise ConfigError(f"a replica's file of secrets has the lines {', '.join(REPLICA_FIELDS)}") from None
    if [len(value) for value in own] != [SUBSECRET_BYTES, SUBSECRET_BYTES, KEY_ID_BYTES]:
        raise ConfigError(f"a replica's secrets have {SUBSECRET_BYTES} bytes each, its key id {KEY_ID_BYTES}, in hex")
    return own
