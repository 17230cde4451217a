"""Receipts of the latest requests, for GET /v1/receipts/{request_id}: why each sequence was answered where it was.

They lie in the memory of the gateway that served the requests; the oldest are forgotten; a tenant sees its own only.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.router.completions.completion import Completion
from penstock.router.routing.request import Receipt, RouteAttempt
from penstock.wire.errors import NotFound
from penstock.wire.openai import ChoiceReceipt, ConsideredRoute, RequestReceipt


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str
    model: str
    created: int
    receipts: Sequence[Receipt]


class Receipts:
    """The latest receipts. max_kept: requests; with one more the oldest is forgotten."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def keep(self, request_id: str, tenant: str, model: str, created: int, completion: Completion) -> None:
        """Keep the receipts of the sequences that were placed. created: Unix time, seconds."""
        receipts = [choice.receipt for prompt in completion.prompts for choice in prompt if choice.receipt is not None]
        if receipts:
            self._kept[request_id] = _Kept(tenant, model, created, receipts)
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)

    def find(self, request_id: str, tenant: str) -> RequestReceipt:
        """Find the receipts of a request. request_id: from the response's header, or the id of an answer. Raises
        NotFound, also if the request is another tenant's."""
        plain = request_id.rpartition("-")[2]
        kept = self._kept.get(plain)
        if kept is None or kept.tenant != tenant:
            raise NotFound(
                f"There is no receipt of a request '{request_id[:100]}'; only the latest are kept, each by the gateway"
                " that answered."
            )
        return RequestReceipt(
            id=plain, created=kept.created, model=kept.model, choices=[_choice(receipt) for receipt in kept.receipts]
        )


def _choice(receipt: Receipt) -> ChoiceReceipt:
    return ChoiceReceipt(
        id=receipt.request_id,
        tier=receipt.tier,
        tier_reason=receipt.tier_reason,
        pool=receipt.pool,
        replica=receipt.replica,
        reason=receipt.reason,
        predicted_ttft_s=receipt.predicted_ttft_s,
        predicted_cached_tokens=receipt.predicted_cached_tokens,
        cached_tokens=receipt.cached_tokens,
        queued_s=receipt.queued_s,
        attempts=receipt.attempts,
        scores=receipt.scores,
        considered=[_route(attempt) for attempt in receipt.considered],
    )


def _route(attempt: RouteAttempt) -> ConsideredRoute:
    return ConsideredRoute(
        tier=attempt.tier,
        places=list(attempt.places),
        predicted_ttft_s=attempt.predicted_ttft_s,
        obstacle=attempt.obstacle,
    )
