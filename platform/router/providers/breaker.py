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
    """failures: in a row, until it opens. open_s: the first pause; each one that follows without a success between is
    twice as long, up to MAX_OPEN_S."""

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
        """How long it stays open; 0 where it is not."""
        return max(0.0, self._open_until - now) if self._open_until is not None else 0.0

    def begin(self) -> int:
        """A request is made, because it is allowed now; its term. `succeed`, `fail`, `pause` or `forget` follows,
        perhaps `answer` before."""
        self._has_trial = self._open_until is not None
        return self._term

    def answer(self, term: int) -> int:
        """A request has begun to be answered: if it is a trial, the others may go through. The request's term from now
        on. If it fails yet, that is one more failure in the row."""
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
        """Nothing was learned: the request ended for reasons of our own."""
        if term == self._term:
            self._has_trial = False

    def _open(self, until: float) -> None:
        """One failure more, and it opens again."""
        self._open_until, self._has_trial = until, False
        self._num_failed = self._failures - 1
        self._term += 1
