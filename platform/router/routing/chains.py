"""The block chain of a request, for each kind of replica it may go to. Pure.

Replicas of one model and block size share a chain; another model's digest or another block size makes another one.
"""

from typing import NamedTuple

from penstock.prefix.hashing import ChainHasher


class ChainKind(NamedTuple):
    model_digest: str
    block_size: int


class Chain(NamedTuple):
    keys: list[bytes]
    """Keys of the full blocks, in order."""
    parent: bytes
    """Where the next block's key continues: the last key, or the salted root."""


class Chains:
    """Makes chains under one block secret (16 to 64 bytes)."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._hashers: dict[int, ChainHasher] = {}
        self._roots: dict[ChainKind, bytes] = {}

    def make(self, kind: ChainKind, salt: bytes, packed_token_ids: bytes, adapter: str | None = None) -> Chain:
        """The chain of a prompt, all of it private to `salt`. adapter: digest; KV computed with it is found by nobody
        else."""
        root = self._hasher(kind).root(kind.model_digest, adapter) if adapter is not None else self._roots.get(kind)
        if root is None:
            root = self._roots[kind] = self._hasher(kind).root(kind.model_digest)
        return self.extend(Chain([], self._hasher(kind).add_salt(root, salt)), kind, packed_token_ids)

    def extend(self, chain: Chain, kind: ChainKind, packed_token_ids: bytes) -> Chain:
        """The chain of `packed_token_ids`, which begin with the tokens of `chain`."""
        known_bytes = len(chain.keys) * kind.block_size * 4
        keys = self._hasher(kind).extend_packed(chain.parent, packed_token_ids[known_bytes:])
        return Chain(chain.keys + keys, keys[-1]) if keys else chain

    def _hasher(self, kind: ChainKind) -> ChainHasher:
        hasher = self._hashers.get(kind.block_size)
        if hasher is None:
            hasher = self._hashers[kind.block_size] = ChainHasher(self._secret, kind.block_size)
        return hasher


class RequestChains:
    """The chains of one request: the prompt's is made once for each kind of replica, and extended by the output."""

    def __init__(self, chains: Chains, salt: bytes, adapter: str | None) -> None:
        self.by_kind: dict[ChainKind, Chain] = {}
        """Chains of the prompt alone."""
        self._chains = chains
        self._salt = salt
        self._adapter = adapter

    def find(self, kind: ChainKind, packed_prompt: bytes, packed_output: bytes = b"") -> Chain:
        """The chain of prompt and output so far. packed_prompt: the prompt in the tokens of `kind`'s model."""
        chain = self.by_kind.get(kind)
        if chain is None:
            chain = self.by_kind[kind] = self._chains.make(kind, self._salt, packed_prompt, self._adapter)
        return self._chains.extend(chain, kind, packed_prompt + packed_output) if packed_output else chain
