"""Seconds that a pool's replicas take to start, learned from those that did. Pure.

What is asked for waits in line, the oldest first; a replica that was not seen before is taken for the one that has
waited longest. Of those that were asked for together the first one counts, and the median of these, not the mean:
several pods that waited a night for a node say nothing about the next one. The configured first guess, which is worth
two starts, goes with time. A start counts from the look that sees the target risen; but late is what was decided on
long ago, at the look before, however long the change itself took.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import NamedTuple

from penstock.autoscale.observation import ServeState

KEEP = 15
"""Number of starts that are remembered."""
FIRST_GUESSES = 2
"""Number of starts that the configured time is worth."""
LATE_STARTS = 1.25
"""Multiple of the expected start after which a replica that was asked for is late."""


class PodTimes(NamedTuple):
    """How long the phases of a pod's start took that Kubernetes sees, seconds."""

    schedule_s: float
    """Time from its creation until it had a node."""
    image_s: float
    """Time from then until its container ran."""


class PendingStart(NamedTuple):
    """A replica that was asked for."""

    seen_s: float
    """Time of the look that saw the target risen; NaN: not known."""
    decided_s: float
    """Time of the look before."""


class Starts(NamedTuple):
    """What is known of a pool's starts."""

    took_s: tuple[float, ...] = ()
    """Seconds of the last starts, the latest last."""
    pending: tuple[PendingStart, ...] = ()
    """Replicas that are not there yet, the earliest first."""
    counted_s: float = math.nan
    """Time at which the one was asked for that was counted last."""
    seen: frozenset[str] | None = None
    """Ids of the replicas that ran at the last look; None: there was no look yet."""
    target: int = 0
    """Target at the last look."""
    since_s: float = math.nan
    """Time of the first look."""
    seen_s: float = math.nan
    """Time of the last look."""

    def num_late(self, start_s: float, now: float) -> int:
        """Replicas that are not there long after they should be: LATE_STARTS times `start_s` after they were decided
        on, or, where the first look found them starting already, `start_s` after it."""
        return sum(
            now - self.since_s > start_s if math.isnan(each.seen_s) else now - each.decided_s > LATE_STARTS * start_s
            for each in self.pending
        )


def note_starts(starts: Starts, serve_state: ServeState, now: float) -> Starts:
    """The starts, after a look at what Serve runs."""
    running = frozenset(serve_state.running)
    if starts.seen is None:  # nobody knows when those were asked for that start already
        unknown = (PendingStart(math.nan, math.nan),) * serve_state.num_starting
        return starts._replace(pending=unknown, seen=running, target=serve_state.target, since_s=now, seen_s=now)
    asked = [*starts.pending, *[PendingStart(now, starts.seen_s)] * (serve_state.target - starts.target)]
    num_new = min(len(running - starts.seen), len(asked))
    times_s = [each.seen_s for each in asked[:num_new]]
    firsts = [at_s for at_s, _ in groupby(times_s) if not math.isnan(at_s) and at_s != starts.counted_s]
    took_s = [now - at_s for at_s in firsts]
    # those that were given up, and what is started in place of a dead one, were asked for last
    num_left = min(len(asked) - num_new, serve_state.target - len(running))
    return starts._replace(
        took_s=(*starts.took_s, *took_s)[-KEEP:],
        pending=tuple(asked[num_new : num_new + max(0, num_left)]),
        counted_s=firsts[-1] if firsts else starts.counted_s,
        seen=running,
        target=serve_state.target,
        seen_s=now,
    )


def expected_start_s(took_s: Sequence[float], first_guess_s: float) -> float:
    """Seconds that the next start is expected to take, with the configured first guess."""
    return median([first_guess_s] * FIRST_GUESSES + list(took_s))
