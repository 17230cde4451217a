"""How a gateway finds replicas: the names under which Serve runs them, and what a replica publishes of itself.

Pools and gateways are Serve applications of their own; a replica's `ReplicaMetadata` travels in Serve's broadcast of
the running replicas, so nothing else needs to be up for it.
"""

from typing import Any

import msgspec

from penstock.wire.frames import PREVIOUS_PROTOCOL

GATEWAY_APP = "gateway"
AUTOSCALER_APP = "autoscaler"
REPLICA_DEPLOYMENT = "replica"
"""The one deployment of a pool's application."""


def pool_app_name(pool: str) -> str:
    return f"pool-{pool}"


class StartTimes(msgspec.Struct, frozen=True, array_like=True):
    """How long the phases of a replica's start took that it sees itself, seconds."""

    weights_s: float
    """Time until the model was loaded; with vLLM the whole of its start."""
    warm_up_s: float
    """First steps, by which it knows its costs and has compiled what it needs."""


class ReplicaMetadata(msgspec.Struct, frozen=True):
    """What a replica publishes of itself."""

    address: str
    """Address (host:port) of the replica's token stream."""
    epoch: str
    """Identity of the replica's process; a new process has a new one, also under the same replica id."""
    pool: str
    model_digest: str
    max_model_len: int
    block_size: int
    protocol: int = PREVIOUS_PROTOCOL
    """Version of the stream's opening that the replica expects; those of the previous version don't publish it."""
    stream_key_id: str = ""
    """Hex digits by which a gateway derives this replica's stream secret (`base.subsecrets`)."""
    abilities: tuple[str, ...] = ()
    """What of `wire.frames.Ability` the replica's engine can do; those of earlier versions none."""
    has_private_prefixes: bool = False
    """Whether the replica's cache shares nothing between tenants, not even published prefixes: vLLM's."""
    start: StartTimes | None = None
    """Times of its start; those of earlier versions publish none."""


def to_metadata(metadata: ReplicaMetadata) -> dict[str, Any]:
    """Metadata in the form that Serve broadcasts."""
    found: dict[str, Any] = msgspec.to_builtins(metadata)
    return found


def from_metadata(data: dict[str, Any]) -> ReplicaMetadata | None:
    """Metadata out of Serve's broadcast; None for what is not a replica of this version."""
    try:
        return msgspec.convert(data, ReplicaMetadata)
    except msgspec.ValidationError:
        return None
