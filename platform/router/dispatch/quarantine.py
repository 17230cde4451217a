"""Which requests end because replicas are lost with them. No I/O.

A replica that dies says nothing of why. A request that was there at two losses is not sent to a third replica: it ends
with an error. Others may have been at both by chance, beside the one that caused them, so of a loss only the most
suspicious of those end, and for the others it does not count:

1. those that neither replica gave a token: what a prompt does to a replica, it does at once;
2. else those that got fewer than NEAR_TOKENS tokens between the losses: the second came at the place of the first;
3. else all of them.

A replica that was leaving (draining, or listed no more) is no loss. A gateway weighs its own requests only: it does not
see those of other gateways. So a request that kills each replica it runs on kills two, unless a more suspicious one was
beside it at both losses; then that one ends first, and this one at the next loss.
"""

import logging
from collections.abc import Sequence

from penstock.router.dispatch.state import Loss, RequestState

MAX_LOSSES = 2
"""Losses of a replica that a request is present at, at most."""
NEAR_TOKENS = 16
"""Tokens from one loss to the next that are taken for the same place in the answer: those under way when a replica dies
are delivered by none."""

log = logging.getLogger("penstock.router")


class Quarantine:
    """Requests that ran on replicas when those were lost, until they are judged: all of a replica's at once."""

    def __init__(self) -> None:
        self._lost: dict[str, list[RequestState]] = {}

    def note_loss(self, state: RequestState, num_tokens: int) -> None:
        """Record that a request's replica was lost. num_tokens: output that has come, from all attempts together."""
        state.losses.append(Loss(num_tokens, has_token=num_tokens > len(state.output)))
        self._lost.setdefault(state.receipt.replica, []).append(state)

    def judge(self) -> None:
        """Decide on all that were noted, before one of them is placed again: sets `is_quarantined` of those that
        end."""
        lost, self._lost = self._lost, {}
        for replica, states in lost.items():
            suspects = [state for state in states if len(state.losses) >= MAX_LOSSES]
            blamed = find_most_suspicious([state.losses for state in suspects])
            for place, state in enumerate(suspects):
                if place in blamed:
                    state.is_quarantined = True
                    log.warning("quarantined", extra={"request_id": state.generation.request_id, "replica": replica})
                else:
                    del state.losses[:-1]


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
