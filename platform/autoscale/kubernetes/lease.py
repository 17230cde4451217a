"""Who of several equals may act: a Lease of coordination.k8s.io, held by one of them at a time. Pure; the elector does
the calls.

The rules are those of client-go's leaderelection, so that its tools read our Lease. No two clocks meet: what counts is
how long a record has stood unchanged by one's own clock. A leader is sure of itself until `deadline_s` after it *sent*
the last renewal that succeeded; another takes the Lease only when it has seen the same record for `duration_s`, which
began after that renewal arrived. So while clocks run alike to within deadline_s / duration_s, and whoever acts looks at
the clock before, there are never two.
"""

import math
from typing import NamedTuple


class Times(NamedTuple):
    duration_s: int = 15
    """So long an unchanged Lease belongs to its holder."""
    deadline_s: float = 10.0
    """So long after its last renewal was sent a leader goes on."""
    retry_s: float = 2.0
    """Between two attempts, to renew or to take it."""


class Record(NamedTuple):
    """What stands in a Lease, as far as it matters here."""

    holder: str
    """Empty: given back."""
    transitions: int = 0
    """How often it has changed hands: the leader's term."""
    duration_s: int = 15
    renewed: str = ""
    """The holder's time of renewal, as it wrote it: changes with each."""


class Seen(NamedTuple):
    record: Record
    version: str
    """resourceVersion, to write over exactly this."""
    since_s: float
    """By this clock, how long it has stood so, at least."""


class State(NamedTuple):
    seen: Seen | None = None
    """None: there is no Lease, or it must be read first."""
    sure_until_s: float = -math.inf
    """We are the leader until then."""


def noticed(state: State, me: str, record: Record, version: str, now: float) -> State:
    """It was read. Who finds it in other hands is no leader any more."""
    if record.holder != me:
        state = state._replace(sure_until_s=-math.inf)
    if state.seen is not None and state.seen.record == record:
        return state._replace(seen=state.seen._replace(version=version))
    return state._replace(seen=Seen(record, version, now))


def wanted(state: State, me: str, times: Times, now: float, renewed: str) -> Record | None:
    """What to write; None: it is another's. State.seen must be fresh, or None where there is no Lease."""
    if state.seen is None:
        return Record(me, 0, times.duration_s, renewed)
    record, _, since_s = state.seen
    if record.holder == me:
        return record._replace(duration_s=times.duration_s, renewed=renewed)
    if record.holder and now < since_s + record.duration_s:
        return None
    return Record(me, record.transitions + 1, times.duration_s, renewed)


def written(record: Record, version: str, times: Times, sent_s: float, now: float) -> State:
    """It stands there. sent_s: when that was sent; the server may have had it at once."""
    sure_until_s = sent_s + times.deadline_s if record.holder else -math.inf
    return State(Seen(record, version, now), sure_until_s)


def is_leader(state: State, now: float, margin_s: float = 0.0) -> bool:
    """And will be for `margin_s` more."""
    return now + margin_s < state.sure_until_s
