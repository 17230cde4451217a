"""The rule by which requests end because replicas are lost with them. No I/O.

A replica that dies says nothing of why. A request that was there at two losses is not sent to a third replica: it ends
with an error. Others may have been at both by chance, beside the one that caused them, so of a loss only the most
suspicious of those end, and for the others it does not count:

1. those that neither replica gave a token: what a prompt does to a replica, it does at once. `trials` has them go one
   at a time, as far as they can wait, so that it is one;
2. else those that got fewer than NEAR_TOKENS tokens between the losses: the second came at the place of the first;
3. else all of them.

A replica that was leaving (draining, or listed no more) is no loss. A gateway weighs its own requests only: it does not
see those of other gateways. So a request that kills each replica it runs on kills two, unless a more suspicious one was
beside it at both losses; then that one ends first, and this one at the next loss.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_LOSSES = 2
"""Losses of a replica that a request is present at, at most."""
NEAR_TOKENS = 16
"""Tokens from one loss to the next that are taken for the same place in the answer: those under way when a replica dies
are delivered by none."""

log = logging.getLogger("penstock.router")


class Loss(NamedTuple):
    """The loss of a replica that a request ran on."""

    num_tokens: int
    """Output tokens that had come, from all attempts together."""
    has_token: bool
    """Whether that replica had given one of them."""


@dataclass(slots=True)
class LossRecord:
    """A request's losses. Written by `Quarantine` alone."""

    request_id: str
    losses: list[Loss] = field(default_factory=list)
    """Losses that count against the request, oldest first."""
    is_quarantined: bool = False
    """Whether the request was at too many of them to be tried again."""

    def lacks_token(self, num_tokens: int) -> bool:
        """Whether the replica that was lost last had given the request no token, and none since has. num_tokens: output
        tokens that have come, from all attempts together."""
        return bool(self.losses) and not self.losses[-1].has_token and self.losses[-1].num_tokens == num_tokens


class Quarantine:
    """Requests that ran on replicas when those were lost, until they are judged: all of a replica's at once."""

    def __init__(self) -> None:
        self._lost: dict[str, list[LossRecord]] = {}

    def note_loss(self, replica: str, record: LossRecord, loss: Loss) -> None:
        record.losses.append(loss)
        self._lost.setdefault(replica, []).append(record)

    def judge(self) -> None:
        """Decide on all that were noted; call it before one of them is placed again."""
        lost, self._lost = self._lost, {}
        for replica, records in lost.items():
            suspects = [record for record in records if len(record.losses) >= MAX_LOSSES]
            blamed = find_most_suspicious([record.losses for record in suspects])
            for place, record in enumerate(suspects):
                if place in blamed:
                    record.is_quarantined = True
                    log.warning("quarantined", extra={"request_id": record.request_id, "replica": replica})
                else:
                    del record.losses[:-1]


def find_most_suspicious(histories: Sequence[Sequence[Loss]]) -> set[int]:
    """Indices of the requests that end, by the module's rule. histories: the losses of each request, two or more,
    oldest first; the last one is the same for all."""
    if not histories:
        return set()
    suspicions = [_suspicion(history) for history in histories]
    highest = min(suspicions)
    return {index for index, suspicion in enumerate(suspicions) if suspicion == highest}


def _suspicion(history: Sequence[Loss]) -> int:
    """Number of the rule's case: 1 is the most suspicious."""
    before, last = history[-2:]
    if not (before.has_token or last.has_token):
        return 1
    return 2 if last.num_tokens - before.num_tokens < NEAR_TOKENS else 3
