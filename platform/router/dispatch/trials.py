"""One at a time, requests are tried again that were on a lost replica and had no token from it.

Any of them may be why it was lost, and those that go to another replica together may be lost with it together: nothing
would tell them apart (`quarantine`). So of those that may go to the same pools the next one goes when the one before
has its first token, is over, or has lost its replica too; but no later than LONGEST_S, so prompts that take longer may
meet on a replica all the same. What waits for a place holds up nobody. Not the wait itself (`waiting`, in a lane of its
own). A gateway knows its own requests only. No I/O.
"""

from penstock.router.dispatch.quarantine import LossRecord

LONGEST_S = 2.0
"""Longest time for which a request whose turn it is waits for the one before, seconds."""
DEADLINE_PART = 0.5
"""Most of what is left until its deadline that it waits so."""

Pools = tuple[str, ...]


class Trials:
    """The requests on trial, which are on a replica and have no token from it yet, by the pools that they may go to."""

    def __init__(self) -> None:
        self._on_trial: dict[Pools, LossRecord] = {}

    def __len__(self) -> int:
        return len(self._on_trial)

    def must_wait(self, pools: Pools, record: LossRecord) -> bool:
        """Whether another one is on trial."""
        return self._on_trial.get(pools, record) is not record

    def begin(self, pools: Pools, record: LossRecord) -> None:
        """The request goes to a replica; `end` must follow. One that goes beside another is not on trial."""
        self._on_trial.setdefault(pools, record)

    def end(self, record: LossRecord) -> Pools | None:
        """The first token has come, or none will. Returns the pools whose next one may go, if it was on trial."""
        for pools, other in self._on_trial.items():
            if other is record:
                del self._on_trial[pools]
                return pools
        return None
