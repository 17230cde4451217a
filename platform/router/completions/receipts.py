"""Receipts of the latest requests, for GET /v1/receipts/{request_id}: why each sequence was answered where it was.

They lie in the memory of the gateway that served the requests; where they are too many, the oldest of
a tenant with more than an even share are forgotten; a tenant sees its own only. Invariant: no more receipts are kept
than `max_kept`, one for each choice.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.router.completions.completion import Completion
from penstock.router.completions.escalation import EdgeAttempt, Trial
from penstock.router.routing.recorded import show_basis
from penstock.router.routing.request import Receipt, RouteAttempt
from penstock.router.routing.tiers import STAY
from penstock.wire.errors import NotFound
from penstock.wire.money import shown
from penstock.wire.openai import (
    ChoiceReceipt,
    ConsideredRoute,
    EdgeAttemptReceipt,
    EscalationReceipt,
    RequestReceipt,
    TargetReceipt,
)


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str
    model: str
    created: int
    receipts: Sequence[tuple[Receipt, Trial | None]]
    target: TargetReceipt | None


@dataclass(slots=True)
class _Share:
    """What is kept of one tenant: its requests, oldest first."""

    request_ids: deque[str] = field(default_factory=deque)
    num_receipts: int = 0


class Receipts:
    """The latest receipts. max_kept: choices of all requests; of one request with more the first ones are kept."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._kept: dict[str, _Kept] = {}
        self._num_kept = 0
        self._shares: dict[str, _Share] = {}

    def keep(
        self,
        request_id: str,
        tenant: str,
        model: str,
        created: int,
        completion: Completion,
        target: TargetReceipt | None = None,
    ) -> None:
        """Keep the receipts of the sequences that were placed. created: Unix time, seconds. target: None: the request
        was not measured."""
        receipts = [
            (choice.receipt, choice.trial)
            for prompt in completion.prompts
            for choice in prompt
            if choice.receipt is not None
        ]
        if not receipts:
            return
        kept = _Kept(tenant, model, created, receipts[: self._max_kept], target)
        self._kept[request_id] = kept
        share = self._shares.setdefault(tenant, _Share())
        share.request_ids.append(request_id)
        self._count(share, len(kept.receipts))
        while self._num_kept > self._max_kept:
            self._forget_oldest(self._find_payer(tenant))

    def _find_payer(self, tenant: str) -> str:
        """The tenant that must give up receipts: this one, if it has more than its even share and not only its newest
        request's; else the one that has most."""
        own = self._shares[tenant]
        if len(own.request_ids) > 1 and own.num_receipts * len(self._shares) > self._max_kept:
            return tenant
        return max((name for name in self._shares if name != tenant), key=lambda name: self._shares[name].num_receipts)

    def _forget_oldest(self, tenant: str) -> None:
        share = self._shares[tenant]
        kept = self._kept.pop(share.request_ids.popleft())
        self._count(share, -len(kept.receipts))
        if not share.request_ids:
            del self._shares[tenant]

    def _count(self, share: _Share, change: int) -> None:
        share.num_receipts += change
        self._num_kept += change

    def find(self, request_id: str, tenant: str) -> RequestReceipt:
        """Find the receipts of a request. request_id: from the response's header, or the id of an answer. Raises
        NotFound, also if the request is another tenant's."""
        plain = request_id.replace("_", "-").rpartition("-")[2]
        kept = self._kept.get(plain)
        if kept is None or kept.tenant != tenant:
            raise NotFound(
                f"There is no receipt of a request '{request_id[:100]}'; only the latest are kept, each by the gateway"
                " that answered."
            )
        return RequestReceipt(
            id=plain,
            created=kept.created,
            model=kept.model,
            choices=[_choice(*each) for each in kept.receipts],
            target=kept.target,
        )


def _choice(receipt: Receipt, trial: Trial | None) -> ChoiceReceipt:
    return ChoiceReceipt(
        id=receipt.request_id,
        tier=receipt.tier,
        tier_reason=receipt.tier_reason,
        stay=STAY if receipt.stays else None,
        pool=receipt.pool,
        replica=receipt.replica,
        reason=receipt.reason,
        predicted_ttft_s=receipt.predicted_ttft_s,
        predicted_cost=_shown(receipt.predicted_cost_nano),
        predicted_cached_tokens=receipt.predicted_cached_tokens,
        cached_tokens=receipt.cached_tokens,
        queued_s=receipt.queued_s,
        attempts=receipt.attempts,
        scores=receipt.scores,
        basis=None if receipt.basis is None else show_basis(receipt.basis.read()),
        considered=[_route(attempt) for attempt in receipt.considered],
        escalation=None if trial is None else _escalation(trial),
    )


def _escalation(trial: Trial) -> EscalationReceipt | None:
    """None: the choice did not come to an edge pool, or ended before anything was decided."""
    if trial.outcome is None:
        return None
    return EscalationReceipt(
        outcome=trial.outcome.value,
        escalated=trial.is_away,
        reason=trial.reason or None,
        mean_logprob=trial.mean_logprob,
        min_mean_logprob=trial.escalation.rule.min_mean_logprob,
        held_tokens=trial.num_held,
        held_s=trial.held_s,
        edge=None if trial.edge is None else _edge_attempt(trial.edge),
    )


def _edge_attempt(edge: EdgeAttempt) -> EdgeAttemptReceipt:
    receipt = edge.receipt
    return EdgeAttemptReceipt(
        pool=receipt.pool,
        replica=receipt.replica,
        prompt_tokens=edge.num_prompt_tokens,
        cached_tokens=edge.num_cached_tokens,
        completion_tokens=edge.num_tokens,
    )


def _route(attempt: RouteAttempt) -> ConsideredRoute:
    return ConsideredRoute(
        tier=attempt.tier,
        places=list(attempt.places),
        predicted_ttft_s=attempt.predicted_ttft_s,
        obstacle=attempt.obstacle,
        predicted_cost=_shown(attempt.predicted_cost_nano),
        predicted_tpot_s=attempt.predicted_tpot_s,
    )


def _shown(nano: int | None) -> float | None:
    return None if nano is None else shown(nano)
