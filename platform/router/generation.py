"""The seam between the HTTP surface and dispatch: what is asked for, what comes back, and who says so.

The HTTP side builds a `Generation`, awaits `Dispatcher.start` (queueing happens in there), reads the stream until a delta has a
`finish`, and closes the stream whatever happened. Retries, other replicas and resumption are invisible from here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.wire.frames import Delta, SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence that a caller waits for; `n` choices are n generations."""

    request_id: str
    pools: tuple[str, ...]
    """Candidate pools, in no order."""
    packed_ids: bytes
    """Prompt token ids as they travel."""
    num_prompt_tokens: int
    sampling: SamplingParams
    tenant: str
    salt: bytes
    """The tenant's server-derived cache salt."""
    deadline: float
    """Unix time."""


@dataclass(slots=True)
class Receipt:
    """Why this replica; what is known when the first token is there goes into the response's headers."""

    request_id: str
    tier: str = ""
    tier_reason: str = ""
    pool: str = ""
    replica: str = ""
    reason: str = ""
    predicted_ttft_s: float | None = None
    predicted_cached_tokens: int = 0
    cached_tokens: int = 0
    queued_s: float = 0.0
    attempts: int = 1
    scores: dict[str, float] = field(default_factory=dict)
    """Predicted TTFT in seconds of each candidate replica."""


class Stream(Protocol):
    """The answer to one Generation."""

    receipt: Receipt

    async def next(self) -> Delta:
        """What has come since the last call, merged into one delta; waits until there is something.

        The delta with a `finish` is the last. Raises ReplicaLost, EngineFault, Overloaded or DeadlineExceeded instead of a delta whose
        finish says so: what is returned finished as stop or length.
        """

    def listen(self, listener: Callable[[Delta], bool]) -> None:
        """Offer plain deltas (tokens, no end) to `listener` as they come, which saves waking the reader for each.

        What the listener declines (False), and whatever is not a plain delta, waits for `next`; so does what comes while something waits.
        """

    def close(self) -> None:
        """Release everything; aborts the sequence unless it finished. Safe to call twice."""


class Dispatcher(Protocol):
    async def start(self, generation: Generation) -> Stream:
        """Queue, route and submit. Raises Overloaded (with retry_after_s) or DeadlineExceeded."""
