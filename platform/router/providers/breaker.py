"""A circuit breaker: whether a server that failed lately is called again. Pure; `now` is monotonic seconds.

Closed: everything goes through. Open: nothing does, until a pause is over. Half-open: one request goes through as a
trial; its first answer closes the breaker, its failure opens it for twice as long. A request belongs to the term in
which it began, and each opening and closing begins a new one: the outcome of a request of an earlier term does not
count. Invariant: while open nothing passes, and half-open one request at most is under way. Source: M. Nygard, Release
It!, "Circuit Breaker".
"""

from enum import StrEnum

MAX_OPEN_S = 60.0
"""Longest pause that failures alone lead to."""
MAX_RETRY_AFTER_S = 600.0
"""Longest pause that is granted to a server that demands one."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """The circuit breaker of one server. failures: how many in a row open it. open_s: length of the first pause,
    seconds; each further one without a success between is twice as long, up to MAX_OPEN_S."""

    def __init__(self, failures: int, open_s: float) -> None:
        self._failures = failures
        self._open_s = open_s
        self._num_failed = 0
        self._pause_s = open_s
        """Length of the next pause, in seconds."""
        self._open_until: float | None = None
        self._has_trial = False
        self._term = 0

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be made now; whoever makes it calls `begin`."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._has_trial)

    def open_for_s(self, now: float) -> float:
        """Seconds for which the breaker stays open; 0 if it is not open."""
        return max(0.0, self._open_until - now) if self._open_until is not None else 0.0

    def begin(self) -> int:
        """Record that a request begins, which `allows` has permitted. Returns the request's term. Later call `succeed`,
        `fail`, `pause` or `forget` with it; `answer` may come before that."""
        self._has_trial = self._open_until is not None
        return self._term

    def answer(self, term: int) -> int:
        """Record that the answer to a request has begun. If the request was a trial, others may go through now. Returns
        the request's term from now on. If the request still fails, that is one more failure in the row."""
        if term != self._term or self._open_until is None:
            return term
        self._open_until, self._has_trial = None, False
        self._term += 1
        return self._term

    def succeed(self, term: int) -> None:
        term = self.answer(term)
        if term == self._term:
            self._num_failed, self._pause_s = 0, self._open_s

    def fail(self, now: float, term: int) -> None:
        if term != self._term:
            return
        self._num_failed += 1
        if self._num_failed >= self._failures:
            self._open(now + self._pause_s)
            self._pause_s = min(2 * self._pause_s, MAX_OPEN_S)

    def pause(self, now: float, seconds: float) -> None:
        """Open the breaker for `seconds`, at most MAX_RETRY_AFTER_S, because the server asked for a pause
        (Retry-After). The term of the request does not matter. A pause that ends later stays as it is."""
        until = now + min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
        self._open(until if self._open_until is None else max(until, self._open_until))

    def forget(self, term: int) -> None:
        """Record that a request ended for reasons of our own, which tell nothing about the server."""
        if term == self._term:
            self._has_trial = False

    def _open(self, until: float) -> None:
        """Open the breaker until `until`. After that a single failure opens it again."""
        self._open_until, self._has_trial = until, False
        self._num_failed = self._failures - 1
        self._term += 1
