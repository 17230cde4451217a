"""Replicas that get no place: how long a pool waits for one, where its target goes back to, and when it tries again.
Pure.

A node may be on its way, so a shortage counts once it has lasted `unplaced_s`. Then the pool may have what has a place,
for a pause as long as that, twice as long each time up to MAX_PAUSE_S, and tries again behind it,
as many as before: what has come to wait meanwhile asks for more, which would have no place either. Once more than that
run, the pauses begin anew. Invariant: a pool that is to have a replica keeps asking for at least one.
"""

from typing import Literal, NamedTuple

from penstock.autoscale.policy import Reason
from penstock.autoscale.range import Range

MAX_PAUSE_S = 3600.0


class Shortage(NamedTuple):
    """Replicas of a pool that have no place."""

    kind: Literal["unschedulable", "quota", "refused"]
    """Whether no node has room, a quota is used up, or the pods are refused for another reason."""
    num_placed: int
    """Replicas that have a place."""
    num_unplaced: int
    message: str
    """What the cluster says about it."""


class Retreat(NamedTuple):
    """What is remembered of a pool's shortages between two decisions. Times are monotonic seconds."""

    since_s: float | None = None
    """Time since which there has been a shortage without a gap; None: there is none."""
    most: int | None = None
    """Replicas that the pool may have until `retry_s`; None: it is not bound."""
    retry_s: float = 0.0
    """Time at which it tries again."""
    pause_s: float = 0.0
    """Length of the latest pause; 0: there was none."""
    held: int = 0
    """Replicas that had a place in the latest pause."""
    asked: int | None = None
    """Replicas that were asked for before the latest pause, until more run than had a place; None: it is over."""


def note_shortage(
    retreat: Retreat, shortage: Shortage | None, num_running: int, unplaced_s: float, now: float
) -> Retreat:
    """What is known after another look. shortage: None where every replica has a place. num_running: replicas that
    run."""
    if retreat.most is not None:
        if now < retreat.retry_s:
            return retreat
        retreat = retreat._replace(most=None, since_s=None)
    if shortage is None:
        is_over = num_running > retreat.held
        if is_over:
            return Retreat(held=retreat.held)
        return retreat._replace(since_s=None)
    since_s = now if retreat.since_s is None else retreat.since_s
    if now - since_s < unplaced_s:
        return retreat._replace(since_s=since_s)
    pause_s = min(max(unplaced_s, 2 * retreat.pause_s), MAX_PAUSE_S)
    num_placed = shortage.num_placed
    return Retreat(since_s, num_placed, now + pause_s, pause_s, num_placed, num_placed + shortage.num_unplaced)


def bound_by_shortage(allowed: Range, retreat: Retreat) -> Range:
    """The range with the bound of a pause, or of the try behind it."""
    if retreat.most is None:
        return allowed if retreat.asked is None else allowed.at_most(max(retreat.asked, 1), Reason.SHORTAGE)
    return allowed.at_most(max(retreat.most, min(1, allowed.least)), Reason.SHORTAGE)
