"""Seconds that a pool's replicas take to start, learned from those that did. Pure.

What is asked for waits in line, the oldest first; a replica that was not seen before is taken for the one that has
waited longest. The median counts, not the mean: a pod that waited a night for a node says nothing about the next one,
and the configured first guess, which is worth two starts, goes with time.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from penstock.autoscale.observation import ServeState

KEEP = 15
"""Number of starts that are remembered."""
FIRST_GUESSES = 2
"""Number of starts that the configured time is worth."""


class Starts(NamedTuple):
    """What is known of a pool's starts."""

    took_s: tuple[float, ...] = ()
    """Seconds of the last starts, the latest last."""
    asked_s: tuple[float, ...] = ()
    """Times at which those were asked for that are not there yet, the earliest first."""
    seen: frozenset[str] | None = None
    """Ids of the replicas that ran at the last look; None: there was no look yet."""
    target: int = 0
    """Target at the last look."""


def note_starts(starts: Starts, serve_state: ServeState, now: float) -> Starts:
    """The starts, after a look at what Serve runs."""
    running = frozenset(serve_state.running)
    if starts.seen is None:  # nobody knows when those were asked for that start already
        return starts._replace(seen=running, target=serve_state.target)
    asked_s = [*starts.asked_s, *[now] * (serve_state.target - starts.target)]
    num_new = min(len(running - starts.seen), len(asked_s))
    took_s = [now - at_s for at_s in asked_s[:num_new]]
    # those that were given up, and what is started in place of a dead one, were asked for last
    num_left = min(len(asked_s) - num_new, serve_state.target - len(running))
    return Starts(
        took_s=(*starts.took_s, *took_s)[-KEEP:],
        asked_s=tuple(asked_s[num_new : num_new + max(0, num_left)]),
        seen=running,
        target=serve_state.target,
    )


def expected_start_s(took_s: Sequence[float], first_guess_s: float) -> float:
    """Seconds that the next start is expected to take, with the configured first guess."""
    return median([first_guess_s] * FIRST_GUESSES + list(took_s))
