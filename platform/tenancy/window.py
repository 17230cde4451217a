"""What a tenant may still have: the arithmetic of its limits over a sliding window. Pure.

`limits` has the same arithmetic as a script in Redis, which is where it counts; this form of it decides for a gateway
whose Redis is away, and tests hold the two against each other. Time is cut into buckets. A request is charged to the
bucket in which it was admitted, first with what it may use at most, from its end on with what it has used, and a bucket
counts until all of it is older than the window. So in no window, wherever it begins, are more requests or tokens
admitted than the limit says, and none is counted for longer than a window and one bucket. What is refused is not
counted.

A request that is not over is held under its id. Only the count of parallel requests needs that, and the settling: the
charge itself leaves with its bucket, so whoever dies without settling has merely used all that it had reserved. A hold
is a lease, which its gateway renews.

Decisions: docs/decisions/limits.md
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from penstock.tenancy.tenants import Limits

PARALLEL_WAIT_MS = 1000
"""When one of the requests under way ends is not known."""

LimitName = Literal["requests", "tokens", "parallel"]
LIMIT_NAMES: tuple[LimitName, ...] = ("requests", "tokens", "parallel")


class Window(NamedTuple):
    """bucket_ms times num_buckets is the window."""

    bucket_ms: int = 1000
    num_buckets: int = 60
    lease_ms: int = 15_000
    """A hold that its gateway has not renewed for so long is over."""

    def bucket(self, at_ms: int) -> int:
        return at_ms // self.bucket_ms

    def leaves_ms(self, bucket: int) -> int:
        """From then on all of the bucket is older than the window."""
        return (bucket + self.num_buckets + 1) * self.bucket_ms


MINUTE = Window()


class Settled(NamedTuple):
    """A request that is over."""

    id: str
    used_tokens: int


class UnsettledUsage(NamedTuple):
    """What was admitted without this book's knowledge."""

    id: str
    """Empty: several requests, which are over."""
    age_ms: int
    requests: int
    tokens: int
    is_running: bool


class LimitRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a gateway has to say about one tenant, and perhaps one request to be admitted. Applied in the order of
    the fields.

    Every part of it may be repeated: what a book has heard once changes nothing the second time (debts without an id
    are charged twice: the safe side).
    """

    settled: Sequence[Settled] = ()
    debts: Sequence[UnsettledUsage] = ()
    renewed: Sequence[str] = ()
    """Requests that are still under way."""
    id: str | None = None
    """Of the request to be admitted."""
    tokens: int = 0
    """What it may use at most, prompt included."""
    limits: Limits = Limits()
    now_ms: int | None = None
    """None: the time of whoever keeps the book."""


class Verdict(NamedTuple):
    is_admitted: bool
    limit: LimitName | None = None
    """That stands in the way, the one for longest."""
    wait_ms: int | None = 0
    """Until enough will have left the window, if nothing else is admitted meanwhile; None: it can never fit."""
    requests: int = 0
    """In the window, this one included if it was admitted."""
    tokens: int = 0
    reset_requests_ms: int = 0
    """Until there is nothing left of it."""
    reset_tokens_ms: int = 0
    parallel: int = 0


class _Hold(NamedTuple):
    bucket: int
    tokens: int
    lease_until_ms: int


_UNKNOWN = _Hold(0, 0, 0)
"""Of a renewed request that was forgotten: it counts as one, and has nothing to settle."""


class LimitLedger:
    """What counts against one tenant's limits."""

    def __init__(self, window: Window = MINUTE) -> None:
        self._window = window
        self._requests: dict[int, int] = {}
        """By bucket."""
        self._tokens: dict[int, int] = {}
        self._held: dict[str, _Hold] = {}
        self._oldest = 0
        """Bucket; older ones are gone."""
        self._first_end_ms = 0
        """No lease ends before it."""

    @property
    def is_empty(self) -> bool:
        """As of the last `apply`."""
        return not (self._requests or self._tokens or self._held)

    def apply(self, ask: LimitRequest, now_ms: int) -> Verdict:
        oldest = self._window.bucket(now_ms) - self._window.num_buckets
        lease_until_ms = now_ms + self._window.lease_ms
        self._end_leases(now_ms)
        for settled in ask.settled:
            self._settle(settled)
        for debt in ask.debts:
            self._charge(debt, self._window.bucket(now_ms - debt.age_ms), oldest, lease_until_ms)
        for name in ask.renewed:
            self._hold(name, self._held.get(name, _UNKNOWN)._replace(lease_until_ms=lease_until_ms))
        self._forget(oldest)
        limit, wait_ms = self._obstacle(ask, now_ms)
        if ask.id is not None and limit is None:
            self._charge(
                UnsettledUsage(ask.id, 0, 1, ask.tokens, True), self._window.bucket(now_ms), oldest, lease_until_ms
            )
        return Verdict(
            ask.id is not None and limit is None,
            limit,
            wait_ms,
            sum(self._requests.values()),
            sum(self._tokens.values()),
            self._reset_ms(self._requests, now_ms),
            self._reset_ms(self._tokens, now_ms),
            len(self._held),
        )

    def _settle(self, settled: Settled) -> None:
        hold = self._held.pop(settled.id, None)
        if hold is not None and hold.bucket in self._tokens:
            self._tokens[hold.bucket] += settled.used_tokens - hold.tokens

    def _charge(self, debt: UnsettledUsage, bucket: int, oldest: int, lease_until_ms: int) -> None:
        if debt.id in self._held:
            return
        if bucket >= oldest:
            self._requests[bucket] = self._requests.get(bucket, 0) + debt.requests
            self._tokens[bucket] = self._tokens.get(bucket, 0) + debt.tokens
        if debt.is_running:
            self._hold(debt.id, _Hold(bucket, debt.tokens, lease_until_ms))

    def _hold(self, name: str, hold: _Hold) -> None:
        self._held[name] = hold
        self._first_end_ms = min(self._first_end_ms, hold.lease_until_ms)

    def _end_leases(self, now_ms: int) -> None:
        if now_ms >= self._first_end_ms:
            self._held = {name: hold for name, hold in self._held.items() if hold.lease_until_ms > now_ms}
            self._first_end_ms = min(
                (hold.lease_until_ms for hold in self._held.values()), default=now_ms + self._window.lease_ms
            )

    def _forget(self, oldest: int) -> None:
        """A clock that went back finds what has been forgotten gone."""
        if oldest != self._oldest:
            self._oldest = oldest
            self._requests = {bucket: count for bucket, count in self._requests.items() if bucket >= oldest}
            self._tokens = {bucket: count for bucket, count in self._tokens.items() if bucket >= oldest}

    def _obstacle(self, ask: LimitRequest, now_ms: int) -> tuple[LimitName | None, int | None]:
        """The limit that stands in the way for longest, and how long."""
        if ask.id is None or ask.id in self._held:
            return None, 0
        limits = ask.limits
        counted: tuple[tuple[LimitName, int | None, dict[int, int], int], ...] = (
            ("requests", limits.requests_per_minute, self._requests, 1),
            ("tokens", limits.tokens_per_minute, self._tokens, ask.tokens),
        )
        waits: list[tuple[float, LimitName]] = []
        for name, limit, counts, wanted in counted:
            excess = 0 if limit is None else sum(counts.values()) + wanted - limit
            if excess > 0:
                waits.append((self._wait_ms(counts, excess, now_ms), name))
        if limits.max_parallel is not None and len(self._held) >= limits.max_parallel:
            waits.append((PARALLEL_WAIT_MS, "parallel"))
        if not waits:
            return None, 0
        longest_ms, name_of_longest = max(waits, key=lambda wait: wait[0])
        return name_of_longest, None if longest_ms == float("inf") else int(longest_ms)

    def _wait_ms(self, counts: dict[int, int], excess: int, now_ms: int) -> float:
        """Until so much will have left; inf: that much is not there."""
        for bucket in sorted(counts):
            excess -= counts[bucket]
            if excess <= 0:
                return self._window.leaves_ms(bucket) - now_ms
        return float("inf")

    def _reset_ms(self, counts: dict[int, int], now_ms: int) -> int:
        newest = max((bucket for bucket, count in counts.items() if count > 0), default=None)
        return 0 if newest is None else self._window.leaves_ms(newest) - now_ms


def share(limits: Limits, parts: int) -> Limits:
    """What each of so many gateways may give out on its own, rounded down."""

    def part(limit: int | None) -> int | None:
        return None if limit is None else limit // parts

    return Limits(
        requests_per_minute=part(limits.requests_per_minute),
        tokens_per_minute=part(limits.tokens_per_minute),
        max_parallel=part(limits.max_parallel),
    )
