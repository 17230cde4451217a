"""What gateways and the autoscaler tell each other, and under which keys of Redis: numbers only, no text of anyone.

Every gateway writes a report of what it sees twice a second under a key of its own that lapses; the autoscaler reads
all of them, and writes what it wants of each pool for gateways to show in their metrics. Nobody needs to know how many
of the others there are.
"""

import msgspec

from penstock.wire.frames import Load

REPORT_S = 0.5
"""A gateway reports so often."""
LAPSE_MS = 10_000
"""A report that is not followed by another is gone after that."""
GATEWAYS_KEY = "penstock:scaling:gateways"
"""A set of the ids of gateways that may have reports."""
TARGETS_KEY = "penstock:scaling:targets"


def report_key(gateway: str) -> str:
    return f"penstock:scaling:gateway:{gateway}"


class PoolFlow(msgspec.Struct, frozen=True, array_like=True):
    """What went through one gateway to a pool since the gateway's start."""

    num_started: int = 0
    """Sequences submitted to replicas; one that is moved counts again."""
    num_ended: int = 0
    """Of those, over for whatever reason."""
    prefill_tokens: int = 0
    """Of those submitted, to be computed."""
    cached_tokens: int = 0
    """Of those submitted, expected in the replica's cache."""
    output_tokens: int = 0


class PoolReport(msgspec.Struct, frozen=True, array_like=True):
    pool: str
    flow: PoolFlow
    num_waiting: int
    """Requests in the gateway's queue that the pool could take."""
    oldest_wait_s: float


class ReplicaReport(msgspec.Struct, frozen=True, array_like=True):
    """A replica that the gateway can route to."""

    replica_id: str
    pool: str
    load: Load
    block_size: int
    cached_blocks: int
    """In the gateway's mirror of the prefix index."""
    hit_tokens: int
    """That this gateway sent there expecting them in the cache, since the link began."""


class GatewayReport(msgspec.Struct, frozen=True, array_like=True):
    gateway: str
    number: int
    """Rises with every report: one that is read twice is old."""
    pools: list[PoolReport]
    replicas: list[ReplicaReport]


class PoolTarget(msgspec.Struct, frozen=True, array_like=True):
    pool: str
    target: int
    """Replicas wanted."""
    reasons: dict[str, int]
    """Decisions by reason, since the autoscaler's start."""


class Targets(msgspec.Struct, frozen=True, array_like=True):
    autoscaler: str
    """Another process has another: its counts begin again."""
    pools: list[PoolTarget]


_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(GatewayReport)
_targets = msgspec.msgpack.Decoder(Targets)


def encode(message: GatewayReport | Targets) -> bytes:
    return _encoder.encode(message)


def decode_report(data: bytes) -> GatewayReport | None:
    """None for what is not of this version."""
    try:
        return _reports.decode(data)
    except msgspec.MsgspecError:
        return None


def decode_targets(data: bytes) -> Targets | None:
    """None for what is not of this version."""
    try:
        return _targets.decode(data)
    except msgspec.MsgspecError:
        return None
