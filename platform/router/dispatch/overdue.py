"""Requests that let others go first, because their own first token would come too late in any case. Pure.

Where more comes than can be served, replicas that take whatever comes have prompts before them for so long that nobody
is in time. So a request whose first token would come later than the target, and what its prompt takes alone, is
overdue: it goes behind those that may be in time, and to a replica only where hardly any prompt is before it. What
comes then finds replicas on which it can be in time.
"""

from penstock.perf.model import Work, predict_ttft_s
from penstock.router.routing.policy import Decision

SHARED_PART = 0.5
"""Part of the target within which a request counts as in time whose tenant has its share of the places, while other
tenants want some: the rest is for theirs."""
SLACK_PART = 0.25
"""Part of the target that may lie before an overdue request on a replica."""


def is_late(decision: Decision, waited_s: float, bound_s: float) -> bool:
    """Whether the wait so far and the prompts before a request where a decision sends it take longer than `bound_s`:
    the predicted time to first token, less what it is where nothing else is computed. Without that a prompt that takes
    longer than the target would always be late. Where nothing is predicted the wait alone counts."""
    if waited_s + (decision.predicted_ttft_s or 0.0) <= bound_s:
        return False
    return waited_s + _delay_s(decision) > bound_s


def _delay_s(decision: Decision) -> float:
    if decision.predicted_ttft_s is None or decision.basis is None:
        return 0.0
    basis = decision.basis.read()
    chosen = next(each for each in basis.compared if each.replica_id == decision.replica_id)
    if not chosen.work.prefill_tokens:
        return 0.0  # no prompt is before it: placed later it would come no sooner
    alone_s = predict_ttft_s(
        chosen.costs,
        Work(),
        basis.num_tokens - chosen.cached_tokens,
        chosen.cached_tokens,
        chosen.max_batched_tokens,
        basis.scored_tokens,
    )
    return max(0.0, decision.predicted_ttft_s - chosen.start_wait_s - alone_s)
