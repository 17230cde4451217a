"""The rules by which one of several equal processes may act: it holds a Lease of coordination.k8s.io. Pure; the elector
makes the calls.

The rules are those of client-go's leaderelection, so that its tools read our Lease. No two clocks are compared: what
counts is how long a record has stood unchanged by one's own clock. A leader is sure of itself until `deadline_s` after
it *sent* the last renewal that succeeded; another process takes the Lease only when it has seen the same record for
`duration_s`, which began after that renewal arrived. So while clocks run alike to within deadline_s / duration_s, and
whoever acts checks the clock before, there are never two leaders.
"""

import math
from typing import NamedTuple


class Times(NamedTuple):
    """Times of an election, in seconds."""

    duration_s: int = 15
    """An unchanged Lease belongs to its holder for so long."""
    deadline_s: float = 10.0
    """A leader stays one for so long after its last renewal was sent."""
    retry_s: float = 2.0
    """Time between two attempts to renew the Lease or to take it."""


class Record(NamedTuple):
    """The fields of a Lease that the election reads and writes."""

    holder: str
    """The leader's identity; empty: the Lease was given back."""
    transitions: int = 0
    """Number of changes of hands so far: the leader's term."""
    duration_s: int = 15
    renewed: str = ""
    """Time of the last renewal by the holder's clock: changes with each renewal, and is compared with nothing else."""


class Observed(NamedTuple):
    """A record as this process last read or wrote it."""

    record: Record
    version: str
    """The Lease's resourceVersion, so that a write replaces exactly this."""
    since_s: float
    """Time since which the record has stood unchanged, by this process's clock; it may have stood for longer."""


class State(NamedTuple):
    """What one process knows about the Lease."""

    observed: Observed | None = None
    """The Lease as it was last read; None if there is no Lease, or if it must be read first."""
    sure_until_s: float = -math.inf
    """End of the time for which this process is the leader, by its own clock."""


def observe(state: State, me: str, record: Record, version: str, now: float) -> State:
    """The state after the Lease was read. A leader that finds it in other hands is none any more."""
    if record.holder != me:
        state = state._replace(sure_until_s=-math.inf)
    if state.observed is not None and state.observed.record == record:
        return state._replace(observed=state.observed._replace(version=version))
    return state._replace(observed=Observed(record, version, now))


def next_record(state: State, me: str, times: Times, now: float, renewed: str) -> Record | None:
    """The record to write. Returns None if another process holds the Lease. State.observed must be fresh, or None where
    there is no Lease."""
    if state.observed is None:
        return Record(me, 0, times.duration_s, renewed)
    record, _, since_s = state.observed
    if record.holder == me:
        return record._replace(duration_s=times.duration_s, renewed=renewed)
    if record.holder and now < since_s + record.duration_s:
        return None
    return Record(me, record.transitions + 1, times.duration_s, renewed)


def record_written(record: Record, version: str, times: Times, sent_s: float, now: float) -> State:
    """The state after a write succeeded. sent_s: when it was sent; the server may have applied it at once."""
    sure_until_s = sent_s + times.deadline_s if record.holder else -math.inf
    return State(Observed(record, version, now), sure_until_s)


def is_leader(state: State, now: float, margin_s: float = 0.0) -> bool:
    """Whether this process is the leader now, and will be for `margin_s` seconds more."""
    return now + margin_s < state.sure_until_s
