"""Seconds that a pool's replicas take to start, learned from those that did. Pure.

What is asked for waits in line, the oldest first; a replica that was not seen before is taken for the one that has
waited longest. It was asked for at the look before the one that saw the target rise, which comes much later where the
change took long. Of those that were asked for together the first one counts, and the median of these, not the mean:
several pods that waited a night for a node say nothing about the next one. The configured first guess, which is worth
two starts, goes with time.
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


class Starts(NamedTuple):
    """What is known of a pool's starts."""

    took_s: tuple[float, ...] = ()
    """Seconds of the last starts, the latest last."""
    asked_s: tuple[float, ...] = ()
    """Times at which those were asked for that are not there yet, the earliest first; NaN: not known."""
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
        """Replicas that are not there long after they should be: LATE_STARTS times `start_s` after they were asked for,
        or, where the first look found them starting already, `start_s` after it."""
        return sum(
            now - self.since_s > start_s if math.isnan(at_s) else now - at_s > LATE_STARTS * start_s
            for at_s in self.asked_s
        )


def note_starts(starts: Starts, serve_state: ServeState, now: float) -> Starts:
    """The starts, after a look at what Serve runs."""
    running = frozenset(serve_state.running)
    if starts.seen is None:  # nobody knows when those were asked for that start already
        unknown_s = (math.nan,) * serve_state.num_starting
        return starts._replace(asked_s=unknown_s, seen=running, target=serve_state.target, since_s=now, seen_s=now)
    asked_s = [*starts.asked_s, *[starts.seen_s] * (serve_state.target - starts.target)]
    num_new = min(len(running - starts.seen), len(asked_s))
    firsts = [at_s for at_s, _ in groupby(asked_s[:num_new]) if not math.isnan(at_s) and at_s != starts.counted_s]
    took_s = [now - at_s for at_s in firsts]
    # those that were given up, and what is started in place of a dead one, were asked for last
    num_left = min(len(asked_s) - num_new, serve_state.target - len(running))
    return starts._replace(
        took_s=(*starts.took_s, *took_s)[-KEEP:],
        asked_s=tuple(asked_s[num_new : num_new + max(0, num_left)]),
        counted_s=firsts[-1] if firsts else starts.counted_s,
        seen=running,
        target=serve_state.target,
        seen_s=now,
    )


def expected_start_s(took_s: Sequence[float], first_guess_s: float) -> float:
    """Seconds that the next start is expected to take, with the configured first guess."""
    return median([first_guess_s] * FIRST_GUESSES + list(took_s))
