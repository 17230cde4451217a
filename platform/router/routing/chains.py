"""The block chain of a request, for each kind of replica it may go to. Pure.

Replicas of one model and block size share a chain; another model's digest or another block size makes another one. A
chain begins with the blocks of a published prefix where the prompt begins with all of them: these are the same for
every tenant. Everything behind them, and every other chain from its first block on, is private to the tenant's salt.
Where a replica's cache shares nothing between tenants, no chain begins so: its keys would promise one tenant's blocks
to another.
Invariant: a key without a salt is the key of tokens that an operator has published, for the base model.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.prefix.hashing import ChainHasher


class ChainKind(NamedTuple):
    model_digest: str
    block_size: int
    is_private: bool = False
    """Whether the replica shares not even published prefixes between tenants."""


class Chain(NamedTuple):
    keys: list[bytes]
    """Keys of the full blocks, in order."""
    parent: bytes
    """Where the next block's key continues: the last key, or the salted root."""


class _PublicBlocks(NamedTuple):
    """The full blocks of a published prefix, for one kind of replica."""

    packed_token_ids: bytes
    keys: list[bytes]


class Chains:
    """Makes chains under one block secret (16 to 64 bytes)."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._hashers: dict[int, ChainHasher] = {}
        self._roots: dict[ChainKind, bytes] = {}
        self._published: Mapping[str, Sequence[bytes]] = {}
        self._public: dict[ChainKind, list[_PublicBlocks]] = {}
        """Blocks of what is published, made when a kind is first asked for; longest first."""

    def publish(self, prefixes: Mapping[str, Sequence[bytes]]) -> None:
        """Replace what is published: by model digest, the packed token ids of each prefix. Chains that were made before
        stay as they are."""
        self._published = prefixes
        self._public = {}

    def make(self, kind: ChainKind, salt: bytes, packed_token_ids: bytes, adapter: str | None = None) -> Chain:
        """The chain of a prompt, private to `salt` but for the blocks of a published prefix. adapter: digest; KV
        computed with it is found by nobody else."""
        if adapter is not None:
            root, keys = self._hasher(kind).root(kind.model_digest, adapter), list[bytes]()
        else:
            root = self._root(kind)
            keys = self._public_keys(kind, packed_token_ids) if self._published and not kind.is_private else []
        salted = self._hasher(kind).add_salt(keys[-1] if keys else root, salt)
        return self.extend(Chain(keys, salted), kind, packed_token_ids)

    def extend(self, chain: Chain, kind: ChainKind, packed_token_ids: bytes) -> Chain:
        """The chain of `packed_token_ids`, which begin with the tokens of `chain`."""
        known_bytes = len(chain.keys) * kind.block_size * 4
        keys = self._hasher(kind).extend_packed(chain.parent, packed_token_ids[known_bytes:])
        return Chain(chain.keys + keys, keys[-1]) if keys else chain

    def _root(self, kind: ChainKind) -> bytes:
        root = self._roots.get(kind)
        if root is None:
            root = self._roots[kind] = self._hasher(kind).root(kind.model_digest)
        return root

    def _public_keys(self, kind: ChainKind, packed_token_ids: bytes) -> list[bytes]:
        """Keys of the longest published prefix whose full blocks all stand at the beginning; none: an empty list."""
        public = self._public.get(kind)
        if public is None:
            public = self._public[kind] = self._public_blocks(kind)
        for prefix in public:
            if packed_token_ids.startswith(prefix.packed_token_ids):
                return list(prefix.keys)
        return []

    def _public_blocks(self, kind: ChainKind) -> list[_PublicBlocks]:
        size = kind.block_size * 4
        cut = {packed[: len(packed) // size * size] for packed in self._published.get(kind.model_digest, ())} - {b""}
        hasher, root = self._hasher(kind), self._root(kind)
        return [
            _PublicBlocks(packed, hasher.extend_packed(root, packed)) for packed in sorted(cut, key=len, reverse=True)
        ]

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
