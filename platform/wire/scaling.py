"""Messages between gateways and the autoscaler, and their keys in Redis: numbers only, no text of anyone.

Every gateway writes a report of its pools and replicas twice a second under a key of its own that lapses; the
autoscaler reads all of them, and writes the target of each pool for gateways to show in their metrics. None of them
needs to know how many of the others there are.
"""

import msgspec

from penstock.wire.discovery import StartTimes
from penstock.wire.explanation import PoolExplanation
from penstock.wire.frames import Load

REPORT_S = 0.5
"""Seconds between two reports of a gateway."""
LAPSE_MS = 10_000
"""Milliseconds after which a report that no other follows is gone."""
GATEWAYS_KEY = "penstock:scaling:gateways"
"""Key of the set of ids of gateways that may have reports."""
TARGETS_KEY = "penstock:scaling:targets"


def report_key(gateway: str) -> str:
    return f"penstock:scaling:gateway:{gateway}"


class PoolFlow(msgspec.Struct, frozen=True, array_like=True):
    """Totals of what went through one gateway to a pool since the gateway's start."""

    num_started: int = 0
    """Sequences submitted to replicas; one that is moved counts again."""
    num_ended: int = 0
    """Submitted sequences that are over, for whatever reason."""
    prefill_tokens: int = 0
    """Prompt tokens of the submitted sequences that had to be computed."""
    cached_tokens: int = 0
    """Prompt tokens of the submitted sequences that were expected in the replica's cache."""
    output_tokens: int = 0
    num_passed: int = 0
    """Requests that went to another tier because the pool had no replica."""
    num_interactive: int = 0
    """Submitted sequences of tenants of the class interactive."""
    num_batch: int = 0
    """Submitted sequences of tenants of the class batch, and of lines of batches."""

    @property
    def num_standard(self) -> int:
        """Submitted sequences of the class standard; all of them where a gateway tells no classes."""
        return self.num_started - self.num_interactive - self.num_batch


class PoolReport(msgspec.Struct, frozen=True, array_like=True):
    """A pool as one gateway has it."""

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
    """Number of the replica's blocks in the gateway's mirror of the prefix index."""
    hit_tokens: int
    """Prompt tokens that this gateway expected in the replica's cache, since the link began."""
    start: StartTimes | None = None
    """How long the replica's own phases of its start took."""


class GatewayReport(msgspec.Struct, frozen=True, array_like=True):
    gateway: str
    number: int
    """Number of the report, which rises with each: one that is read twice is old."""
    pools: list[PoolReport]
    replicas: list[ReplicaReport]


class PoolTarget(msgspec.Struct, frozen=True, array_like=True):
    pool: str
    target: int
    """Number of replicas that the pool should have."""
    reasons: dict[str, int]
    """Number of decisions by reason, since the autoscaler's start."""
    ready_in_s: float | None = None
    """Seconds until the pool's first replica should be there, or would be if it had none; None: nobody knows."""


class Targets(msgspec.Struct, frozen=True, array_like=True):
    autoscaler: str
    """Id of the autoscaler's process: another process has another, and its counts begin again."""
    pools: list[PoolTarget]
    explanations: list[PoolExplanation] = []
    """Why each target is what it is, in the order of `pools`."""


_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(GatewayReport)
_targets = msgspec.msgpack.Decoder(Targets)


def encode(message: GatewayReport | Targets) -> bytes:
    return _encoder.encode(message)


def decode_report(data: bytes) -> GatewayReport | None:
    """Decodes a report. Returns None if the bytes are not a report of this version."""
    try:
        return _reports.decode(data)
    except msgspec.MsgspecError:
        return None


def decode_targets(data: bytes) -> Targets | None:
    """Decodes targets. Returns None if the bytes are not targets of this version."""
    try:
        return _targets.decode(data)
    except msgspec.MsgspecError:
        return None
