"""A simulated request: what was planned, where it is, and what became of it.

The queue tells it its turn, the replica's client its end, and the fair shares ask it how far it has come; so it stands
for a gateway's waiting future, mailbox and reader in one. Plain data otherwise.
"""

from collections.abc import Callable

from penstock.router.dispatch.attempt import AttemptResult
from penstock.router.replicas.replica_client import ReplicaClient
from penstock.router.routing.spending import NOWHERE, Spending
from penstock.router.routing.tiers import Tier, TierReason
from penstock.sim.content import Segment, make_keys
from penstock.sim.sequence import ModelledSequence
from penstock.tenancy.share import DEFAULT_SHARE, Share
from penstock.wire.frames import Delta
from penstock_loadtest.planned import Planned


class SimulatedRequest:
    """One request. at_s: its intended time. segments: its whole prompt, earlier turns included."""

    __slots__ = (
        "_is_told",
        "_keys",
        "arrival",
        "at_s",
        "begun_s",
        "client",
        "count_output",
        "end_s",
        "error",
        "is_cancelled",
        "is_finished",
        "is_over",
        "is_overdue",
        "num_prompt_tokens",
        "on_end",
        "on_turn",
        "planned",
        "predicted_ttft_s",
        "replica",
        "segments",
        "sent_s",
        "seq",
        "share",
        "sid",
        "tier",
        "tier_reason",
        "timeout_s",
        "token_times_s",
    )

    def __init__(
        self,
        planned: Planned,
        at_s: float,
        segments: list[Segment],
        arrival: int,
        timeout_s: float,
        share: Share = DEFAULT_SHARE,
    ) -> None:
        self.planned = planned
        self.at_s = at_s
        self.segments = segments
        self.arrival = arrival
        self.timeout_s = timeout_s
        self.share = share
        self.num_prompt_tokens = sum([segment.num_tokens for segment in segments])
        self.begun_s = at_s
        self.sent_s: float | None = None
        self.end_s: float | None = None
        self.seq: ModelledSequence | None = None
        self.count_output: Callable[[ModelledSequence], int]
        self.token_times_s: list[float] = []
        self.client: ReplicaClient | None = None
        self.sid = 0
        self.replica: str | None = None
        self.predicted_ttft_s: float | None = None
        self.tier: Tier | None = None
        self.tier_reason: TierReason | None = None
        self.error: Exception | None = None
        self.is_over = False
        self.is_overdue = False
        self.is_cancelled = False
        self.is_finished = False
        self.on_turn: Callable[[SimulatedRequest, Exception | None], None]
        self.on_end: Callable[[SimulatedRequest], None]
        self._is_told = False
        self._keys: tuple[int, list[bytes]] | None = None

    @property
    def spending(self) -> Spending:
        """A new one each time: nobody asks here what a sequence costs."""
        return Spending(NOWHERE)

    @property
    def max_tokens(self) -> int:
        return self.planned.max_tokens

    @property
    def account(self) -> str:
        """Name under which the fair order counts it."""
        return self.planned.tenant

    def keys(self, block_size: int) -> list[bytes]:
        """Keys of the leading full blocks that other requests may have too; of a session's turn the answer's as well,
        which the next turn begins with."""
        if self._keys is None or self._keys[0] != block_size:
            segments = self.segments if self.planned.is_last_turn else [*self.segments, self.answer]
            self._keys = block_size, make_keys(segments, block_size)
        return self._keys[1]

    @property
    def answer(self) -> Segment:
        """The answer's tokens, as a later turn has them in front."""
        return Segment(-2 - self.planned.index, self.max_tokens)

    # the queue's turn

    def done(self) -> bool:
        return self._is_told

    def set_result(self, result: AttemptResult, /) -> None:  # noqa: ARG002 (there is one end of a wait without an error)
        self._is_told = True
        self.on_turn(self, None)

    def set_exception(self, error: Exception, /) -> None:
        self._is_told = True
        self.on_turn(self, error)

    # the client's sink

    def push(self, delta: Delta) -> None:
        if delta.finish is not None:
            self.on_end(self)

    def lose(self, *, is_planned: bool) -> None:
        raise AssertionError(f"a simulated replica was lost (planned: {is_planned})")

    # the fair shares' progress

    @property
    def num_computed_tokens(self) -> int:
        return 0 if self.seq is None else self.count_output(self.seq)

    @property
    def num_cached_tokens(self) -> int | None:
        return None if self.seq is None else self.seq.num_cached_tokens
