"""A circuit breaker: whether somebody who failed lately is asked again. Pure; `now` is monotonic seconds.

Closed: everything goes through. Open: nothing does, until a pause is over. Half-open: one request goes through as a trial, and its end closes
the breaker, or opens it for twice as long. Invariant: while open nothing passes, and half-open one request at most is under way.
Source: M. Nygard, Release It!, "Circuit Breaker".
"""

from enum import StrEnum

MAX_OPEN_S = 60.0
"""Longest pause that failures alone lead to."""
MAX_RETRY_AFTER_S = 600.0
"""Longest pause that is granted to who asks for one."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """failures: in a row, until it opens. open_s: the first pause; it doubles with each failed trial, up to MAX_OPEN_S."""

    def __init__(self, failures: int, open_s: float) -> None:
        self._failures = failures
        self._open_s = open_s
        self._num_failed = 0
        self._pause_s = open_s
        self._open_until: float | None = None
        self._has_trial = False

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be made now; who makes it says so by `begin`."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._has_trial)

    def open_for_s(self, now: float) -> float:
        """How long it stays open; 0 where it is not."""
        return max(0.0, self._open_until - now) if self._open_until is not None else 0.0

    def begin(self, now: float) -> bool:
        """A request is made; whether it is the trial. `succeed`, `fail`, `pause` or `forget` follows."""
        is_trial = self.state(now) is BreakerState.HALF_OPEN
        self._has_trial = self._has_trial or is_trial
        return is_trial

    def succeed(self, now: float) -> None:
        """What succeeds while it is open began before that, and changes nothing."""
        if self.state(now) is not BreakerState.OPEN:
            self._num_failed, self._pause_s = 0, self._open_s
            self._open_until, self._has_trial = None, False

    def fail(self, now: float) -> None:
        """What fails while it is open began before that, and changes nothing."""
        state = self.state(now)
        self._num_failed += 1
        if state is BreakerState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, MAX_OPEN_S)
            self._open(now + self._pause_s)
        elif state is BreakerState.CLOSED and self._num_failed >= self._failures:
            self._open(now + self._pause_s)

    def pause(self, now: float, seconds: float) -> None:
        """The other side asked to be left alone that long."""
        until = now + min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
        self._open(until if self._open_until is None else max(until, self._open_until))

    def forget(self, is_trial: bool) -> None:
        """Nothing was learned: the request ended for reasons of our own."""
        if is_trial:
            self._has_trial = False

    def _open(self, until: float) -> None:
        self._open_until, self._has_trial = until, False
