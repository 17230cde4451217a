"""The definition of a block key. Gateways and replicas both import this one; a second definition would silently find
nothing.

key(i) = blake2b-128(kind | key(i-1) | token ids of block i), keyed by the block secret, so that a caller who knows the
tokens still can't compute a key. Every input is tagged by its kind: a namespace can never equal a salt or a block.
The chain starts from a namespace root (model digest, adapter digest, block size, format version); where the shared part
ends, the tenant's salt is mixed in as a step of its own, and everything after it is private to that salt. Only full
blocks have a key.

Invariant: equal keys mean equal tokens, model, adapter and (behind the shared part) salt, up to blake2b's collision
bound.
"""

import hashlib
from collections.abc import Sequence

from penstock.wire.frames import KEY_BYTES, pack_token_ids

FORMAT_VERSION = 1
_BLOCK, _ROOT, _SALT = b"penstock-block", b"penstock-root", b"penstock-salt"  # blake2b person: at most 16 bytes


class ChainHasher:
    """Makes block keys under one block secret.

    secret: 16 to 64 bytes, the same on every gateway and replica (`base.subsecrets`). block_size: tokens to a block.
    """

    def __init__(self, secret: bytes, block_size: int) -> None:
        if not 16 <= len(secret) <= 64:
            raise ValueError(f"the block secret must have 16 to 64 bytes, this one has {len(secret)}")
        self.block_size = block_size
        # a keyed state is copied for each block: half the price of a new one
        self._block = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=_BLOCK)
        self._root = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=_ROOT)
        self._salt = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=_SALT)

    def root(self, model_digest: str, adapter_digest: str | None = None) -> bytes:
        """The chain's start for one model and adapter."""
        state = self._root.copy()
        parts = (
            str(FORMAT_VERSION),
            str(self.block_size),
            "model",
            model_digest,
            "adapter" if adapter_digest else "base",
            adapter_digest or "",
        )
        for part in parts:
            data = part.encode()
            state.update(len(data).to_bytes(4, "little") + data)
        return state.digest()

    def add_salt(self, parent: bytes, salt: bytes) -> bytes:
        """The chain key behind which everything is private to `salt`."""
        state = self._salt.copy()
        state.update(parent)
        state.update(salt)
        return state.digest()

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """Keys of the full blocks of `token_ids`, which follow `parent`; a rest shorter than a block is left out."""
        return self.extend_packed(parent, pack_token_ids(token_ids))

    def extend_packed(self, parent: bytes, packed_token_ids: bytes) -> list[bytes]:
        """The same as `extend`, of packed token ids (little-endian uint32)."""
        size = 4 * self.block_size
        keys: list[bytes] = []
        for end in range(size, len(packed_token_ids) + 1, size):
            state = self._block.copy()
            state.update(parent)
            state.update(packed_token_ids[end - size : end])
            parent = state.digest()
            keys.append(parent)
        return keys
