"""What a tenant may still have: the arithmetic of its limits over a sliding window. Pure.

Not budgets, whose months are Redis' (`budgets.lua`).

`limits.lua` has the same arithmetic as a script in Redis, which is where it counts; this form of it decides for a
gateway whose Redis is away, and tests hold the two against each other. Time is cut into buckets. A request is charged
to the bucket in which it was admitted, first with what it may use at most, from its end on with what it has used, and a
bucket counts until all of it is older than the window. So in no window, wherever it begins, are more requests or tokens
admitted than the limit says, and none is counted for longer than a window and one bucket. What is refused is not
counted.

A request that is not over is held under its id. Only the count of parallel sequences needs that, and the settling: the
charge itself leaves with its bucket, so a gateway that dies without settling has merely used all that it had reserved.
A hold is a lease, which its gateway renews.

Decisions: docs/decisions/limits.md
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from penstock.tenancy.charges import BudgetRequest
from penstock.tenancy.tenants import Limits

PARALLEL_WAIT_MS = 1000
"""Wait to suggest where running requests hold what is wanted: nobody knows when one of them ends."""

LimitName = Literal["requests", "tokens", "parallel", "budget"]
LIMIT_NAMES: tuple[LimitName, ...] = ("requests", "tokens", "parallel", "budget")


class Window(NamedTuple):
    """The sliding window over which usage counts: `num_buckets` buckets of `bucket_ms` milliseconds each."""

    bucket_ms: int = 1000
    num_buckets: int = 60
    lease_ms: int = 15_000
    """A hold that its gateway has not renewed for so long is over."""

    def bucket(self, at_ms: int) -> int:
        """Number of the bucket that holds a time."""
        return at_ms // self.bucket_ms

    def leaves_ms(self, bucket: int) -> int:
        """Time from which on all of the bucket is older than the window."""
        return (bucket + self.num_buckets + 1) * self.bucket_ms


MINUTE = Window()


class Settled(NamedTuple):
    """A request that is over."""

    id: str
    used_tokens: int


class UnsettledUsage(NamedTuple):
    """One request, or several that are over, admitted without the ledger's knowledge and still to be charged."""

    id: str
    """Id of the request; empty: several requests, which are over."""
    age_ms: int
    """Time since the admission."""
    requests: int
    """Number of requests."""
    tokens: int
    """Tokens reserved by what is running, or used by what is over."""
    is_running: bool
    sequences: int = 1
    """Sequences of the request, as long as it runs."""


class LimitRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a gateway reports about one tenant, and perhaps one request to be admitted. Applied in the order of the
    fields.

    Every part of it may be repeated: what a ledger has applied once changes nothing the second time (unsettled usage
    without an id is charged twice: the safe side).
    """

    settled: Sequence[Settled] = ()
    unsettled: Sequence[UnsettledUsage] = ()
    renewed: Sequence[str] = ()
    """Requests that are still under way: their leases are renewed."""
    id: str | None = None
    """Id of the request to be admitted; None: there is none."""
    tokens: int = 0
    """Most tokens that the request may use, prompt included."""
    sequences: int = 1
    """Sequences of the request: its prompts times its choices; 0 where it generates nothing."""
    limits: Limits = Limits()
    budget: BudgetRequest | None = None
    """What concerns the tenant's budget; None: nothing does."""
    now_ms: int | None = None
    """Time to count with; None: the clock of whoever keeps the ledger."""


class Verdict(NamedTuple):
    """Whether a request was admitted, and what of the tenant's limits is used."""

    is_admitted: bool
    limit: LimitName | None = None
    """The limit that refuses; where there are several, the one that will do so for longest."""
    wait_ms: int | None = 0
    """Time until enough will have left the window, if nothing else is admitted meanwhile; None: it can never fit."""
    requests: int = 0
    """Requests in the window, this one included if it was admitted."""
    tokens: int = 0
    """Tokens in the window, this request's included if it was admitted."""
    reset_requests_ms: int = 0
    """Time until no request of now is left in the window."""
    reset_tokens_ms: int = 0
    """Time until no token of now is left in the window."""
    parallel: int = 0
    """Sequences under way, this request's included if it was admitted; 0 where `max_parallel` is no limit."""
    spent_nano: int = 0
    """Sum that is charged or reserved this month, this request's included if it was admitted; 0 where the request told
    nothing of a budget."""
    aside_nano: int = 0
    """Part of it that this gateway has set aside; 0 where the request did not ask for any."""


class _Hold(NamedTuple):
    """What is kept of a request under way."""

    bucket: int
    tokens: int
    lease_until_ms: int
    sequences: int = 1


_UNKNOWN = _Hold(0, 0, 0)
"""The hold of a renewed request that was forgotten: it counts as one, and has nothing to settle."""


class LimitLedger:
    """What counts against one tenant's limits."""

    def __init__(self, window: Window = MINUTE) -> None:
        self._window = window
        self._requests: dict[int, int] = {}
        """Requests charged, by bucket."""
        self._tokens: dict[int, int] = {}
        """Tokens charged, by bucket."""
        self._held: dict[str, _Hold] = {}
        self._oldest = 0
        """Oldest bucket that is kept."""
        self._first_end_ms = 0
        """No lease ends before it."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was charged or held when `apply` was called last."""
        return not (self._requests or self._tokens or self._held)

    def apply(self, request: LimitRequest, now_ms: int) -> Verdict:
        """Count what a gateway reports, then admit its request or refuse it."""
        oldest = self._window.bucket(now_ms) - self._window.num_buckets
        lease_until_ms = now_ms + self._window.lease_ms
        self._end_leases(now_ms)
        for settled in request.settled:
            self._settle(settled)
        for usage in request.unsettled:
            self._charge(usage, self._window.bucket(now_ms - usage.age_ms), oldest, lease_until_ms)
        for request_id in request.renewed:
            self._hold(request_id, self._held.get(request_id, _UNKNOWN)._replace(lease_until_ms=lease_until_ms))
        self._forget(oldest)
        limit, wait_ms = self._find_obstacle(request, now_ms)
        if request.id is not None and limit is None:
            admitted = UnsettledUsage(request.id, 0, 1, request.tokens, True, request.sequences)
            self._charge(admitted, self._window.bucket(now_ms), oldest, lease_until_ms)
        return Verdict(
            request.id is not None and limit is None,
            limit,
            wait_ms,
            sum(self._requests.values()),
            sum(self._tokens.values()),
            self._reset_ms(self._requests, now_ms),
            self._reset_ms(self._tokens, now_ms),
            0 if request.limits.max_parallel is None else self._count_sequences(),
        )

    def _settle(self, settled: Settled) -> None:
        hold = self._held.pop(settled.id, None)
        if hold is not None and hold.bucket in self._tokens:
            self._tokens[hold.bucket] += settled.used_tokens - hold.tokens

    def _charge(self, usage: UnsettledUsage, bucket: int, oldest: int, lease_until_ms: int) -> None:
        if usage.id in self._held:
            return
        if bucket >= oldest:
            self._requests[bucket] = self._requests.get(bucket, 0) + usage.requests
            self._tokens[bucket] = self._tokens.get(bucket, 0) + usage.tokens
        if usage.is_running:
            self._hold(usage.id, _Hold(bucket, usage.tokens, lease_until_ms, usage.sequences))

    def _hold(self, request_id: str, hold: _Hold) -> None:
        self._held[request_id] = hold
        self._first_end_ms = min(self._first_end_ms, hold.lease_until_ms)

    def _end_leases(self, now_ms: int) -> None:
        if now_ms >= self._first_end_ms:
            self._held = {request_id: hold for request_id, hold in self._held.items() if hold.lease_until_ms > now_ms}
            self._first_end_ms = min(
                (hold.lease_until_ms for hold in self._held.values()), default=now_ms + self._window.lease_ms
            )

    def _forget(self, oldest: int) -> None:
        """Drop buckets older than the window. What is dropped stays so when the clock goes back."""
        if oldest != self._oldest:
            self._oldest = oldest
            self._requests = {bucket: count for bucket, count in self._requests.items() if bucket >= oldest}
            self._tokens = {bucket: count for bucket, count in self._tokens.items() if bucket >= oldest}

    def _find_obstacle(self, request: LimitRequest, now_ms: int) -> tuple[LimitName | None, int | None]:
        """The limit that stands in the way for longest, and how long."""
        if request.id is None or request.id in self._held:
            return None, 0
        limits = request.limits
        counted: tuple[tuple[LimitName, int | None, dict[int, int], int], ...] = (
            ("requests", limits.requests_per_minute, self._requests, 1),
            ("tokens", limits.tokens_per_minute, self._tokens, request.tokens),
        )
        waits: list[tuple[float, LimitName]] = []
        for name, limit, counts, wanted in counted:
            excess = 0 if limit is None else sum(counts.values()) + wanted - limit
            if excess > 0:
                waits.append((self._wait_ms(counts, excess, now_ms), name))
        if limits.max_parallel is not None and self._count_sequences() + request.sequences > limits.max_parallel:
            waits.append((PARALLEL_WAIT_MS, "parallel"))
        if not waits:
            return None, 0
        longest_ms, name_of_longest = max(waits, key=lambda wait: wait[0])
        return name_of_longest, None if longest_ms == float("inf") else int(longest_ms)

    def _count_sequences(self) -> int:
        return sum(hold.sequences for hold in self._held.values())

    def _wait_ms(self, counts: dict[int, int], excess: int, now_ms: int) -> float:
        """Time until so much will have left the window; inf: that much is not in it."""
        for bucket in sorted(counts):
            excess -= counts[bucket]
            if excess <= 0:
                return self._window.leaves_ms(bucket) - now_ms
        return float("inf")

    def _reset_ms(self, counts: dict[int, int], now_ms: int) -> int:
        newest = max((bucket for bucket, count in counts.items() if count > 0), default=None)
        return 0 if newest is None else self._window.leaves_ms(newest) - now_ms


def share_limits(limits: Limits, num_gateways: int) -> Limits:
    """What each of so many gateways may give out on its own, rounded down."""

    def divide(limit: int | None) -> int | None:
        return None if limit is None else limit // num_gateways

    return Limits(
        requests_per_minute=divide(limits.requests_per_minute),
        tokens_per_minute=divide(limits.tokens_per_minute),
        max_parallel=divide(limits.max_parallel),
    )
