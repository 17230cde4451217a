"""What a waiting request is tried with, and what may come of it."""

from collections.abc import Callable
from enum import Enum, auto


class AttemptResult(Enum):
    """What came of an attempt to place a request; each one but MUST_WAIT and OVERDUE ends the wait."""

    PLACED = auto()
    MUST_WAIT = auto()
    """No place is free now, or those that are, are kept for other tenants; to be tried again."""
    OVERDUE = auto()
    """There is a place, but the first token would come too late: those that may be in time go first. Told once in a
    wait."""
    NEEDS_TOKENIZATION = auto()
    """A route that may be taken needs the prompt in another model's tokens first."""
    NEEDS_RESERVATION = auto()
    """A provider may be asked once what it may cost is reserved."""
    CLOSED = auto()
    """The request was given up meanwhile."""

    @property
    def must_prepare(self) -> bool:
        """Whether something must be awaited before the next attempt."""
        return self in (AttemptResult.NEEDS_TOKENIZATION, AttemptResult.NEEDS_RESERVATION)

    @property
    def ends_wait(self) -> bool:
        return self not in (AttemptResult.MUST_WAIT, AttemptResult.OVERDUE)


Attempt = Callable[[], AttemptResult]
"""Tries to place a request now. What it raises ends the wait."""

MayHelp = Callable[[str], bool]
"""Tells whether a change at a replica, by its id, may let the next attempt succeed, or fail. Asked after each change
since an attempt that had to wait; False only where the next one would have to wait as well."""


def always(_replica_id: str) -> bool:
    """Every change may help."""
    return True
