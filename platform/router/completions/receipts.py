"""Receipts of the latest requests, for GET /v1/receipts/{request_id}: why each sequence was answered where it was.

They lie in the memory of the gateway that served the requests; where they are too many, the oldest of
a tenant with more than an even share are forgotten; a tenant sees its own only. Invariant: no more receipts are kept
than `max_kept`, one for each choice.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.router.completions.admission import count_prompt
from penstock.router.completions.completion import Choice, Completion, Prompt
from penstock.router.completions.escalation import EdgeAttempt, Trial
from penstock.router.routing.recorded import show_basis
from penstock.router.routing.request import Receipt, RouteAttempt
from penstock.router.routing.tiers import STAY
from penstock.tenancy.tariffs import Tariff, charge_nano
from penstock.tenancy.usage import Used
from penstock.wire.accounts import (
    ChoiceReceipt,
    ConsideredRoute,
    EdgeAttemptReceipt,
    EscalationReceipt,
    RequestPrices,
    RequestReceipt,
    TargetReceipt,
    TariffPrices,
)
from penstock.wire.errors import NotFound
from penstock.wire.money import shown


class Charge(NamedTuple):
    """What a request is charged, and by what."""

    nano: int
    """Sum in 1e-9 of the unit of prices."""
    tariff: Tariff


class KeptChoice(NamedTuple):
    """A sequence's receipt, and its part of the request's charge: the prompt is the first choice's."""

    receipt: Receipt
    charge_nano: int | None
    """Amount in 1e-9 of the unit of prices; None: the model has no tariff."""
    trial: Trial | None

    @property
    def receipts(self) -> list[Receipt]:
        """Receipts of all attempts, those of which nothing was shown included."""
        return [self.receipt] if self.trial is None else [self.receipt, *self.trial.vain]


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str
    model: str
    created: int
    choices: Sequence[KeptChoice]
    charge: Charge | None
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
        charge: Charge | None = None,
    ) -> None:
        """Keep the receipts of the sequences that were placed. created: Unix time, seconds. target: None: the request
        was not measured. charge: None where the model has no tariff."""
        choices = _choices(completion, charge)
        if not choices:
            return
        kept = _Kept(tenant, model, created, choices[: self._max_kept], charge, target)
        self._kept[request_id] = kept
        share = self._shares.setdefault(tenant, _Share())
        share.request_ids.append(request_id)
        self._count(share, len(kept.choices))
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
        self._count(share, -len(kept.choices))
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
        return _show(plain, kept)


def _choices(completion: Completion, charge: Charge | None) -> list[KeptChoice]:
    """The sequences that were placed."""
    placed = [
        (choice, choice.receipt, choices)
        for choices in completion.prompts
        for choice in choices
        if choice.receipt is not None
    ]
    shares: Sequence[int | None] = [None] * len(placed)
    if charge is not None:
        shares = _shares(charge, [_used(choice, choices) for choice, _, choices in placed])
    return [
        KeptChoice(receipt, share, choice.trial) for (choice, receipt, _), share in zip(placed, shares, strict=True)
    ]


def _used(choice: Choice, choices: Prompt) -> Used:
    """What of a prompt's usage is one choice's own: all that is no other's is the first one's."""
    if choice is not choices[0]:
        return Used(completion_tokens=choice.num_tokens)
    used = count_prompt(choices)
    num_others = sum(each.num_tokens for each in choices[1:])
    return used._replace(completion_tokens=used.completion_tokens - num_others)


def _shares(charge: Charge, used: Sequence[Used]) -> Sequence[int]:
    """A request's charge by its sequences, in 1e-9 of the unit of prices. The first one has what the others leave: the
    sum is rounded once, and never more than what was reserved."""
    shares, left_nano = list[int](), charge.nano
    for each in reversed(used[1:]):
        shares.append(min(left_nano, charge_nano(charge.tariff, each)))
        left_nano -= shares[-1]
    return [left_nano, *reversed(shares)] if used else []


def _show(request_id: str, kept: _Kept) -> RequestReceipt:
    receipts = list({id(each): each for choice in kept.choices for each in choice.receipts}.values())
    charge = kept.charge
    places = {spending.prices.place: spending.prices for receipt in receipts for spending in receipt.spendings}
    return RequestReceipt(
        id=request_id,
        created=kept.created,
        model=kept.model,
        choices=[_choice(choice) for choice in kept.choices],
        cost=_shown_cost(receipts),
        charge=None if charge is None else shown(charge.nano),
        prices=RequestPrices(
            places=list(places.values()),
            tariff=None if charge is None else _tariff(charge.tariff),
        ),
        target=kept.target,
    )


def _tariff(tariff: Tariff) -> TariffPrices:
    return TariffPrices(input=shown(tariff.input), cached=shown(tariff.cached), output=shown(tariff.output))


def _shown_cost(receipts: Sequence[Receipt]) -> float | None:
    if not any(receipt.has_cost for receipt in receipts):
        return None
    return shown(sum(receipt.cost_nano for receipt in receipts))


def _choice(choice: KeptChoice) -> ChoiceReceipt:
    receipt, share_nano, trial = choice
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
        step_s=receipt.step_s,
        cost=shown(receipt.cost_nano) if receipt.has_cost else None,
        charge=_shown(share_nano),
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
        cost=shown(receipt.cost_nano) if receipt.has_cost else None,
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
