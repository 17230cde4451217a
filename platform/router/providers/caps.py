"""Caps on what providers may cost in a calendar month: of all together, and of each.

Not a tenant's budget (`completions.admission`), which is reserved before, in a round trip of its own; what a call does
not come to is given back here, and all of it where no call is made. A call reserves its prompt, as the model of our own
counts it and longer by the provider's margin, and its bound of output, at the provider's prices; it is settled with
what the provider reports. So the caps hold unless a provider counts a prompt longer than the margin allows, or exceeds
the bound of the output: that much is counted too, and the next calls are refused. A call that was cut counts its
prompt and what had come: what the provider computed beyond that it tells nobody.
Invariant: a `Reservation` is settled once, whatever becomes of the call; that of a gateway that dies stays counted.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from penstock.base.metrics import Metrics
from penstock.router.config import ProviderConfig
from penstock.router.providers.prices import prices_of
from penstock.router.routing.retry import spread_s
from penstock.tenancy.limits import Limiter
from penstock.tenancy.tariffs import price_nano
from penstock.tenancy.tenants import Limits
from penstock.tenancy.window import PARALLEL_WAIT_MS, Verdict
from penstock.wire.errors import CapReached, Overloaded
from penstock.wire.money import shown

ALL = "all"
"""Name of the cap of all providers together, in metrics."""
MARGIN_TOKENS = 64
"""Tokens of a prompt that a provider may add, whatever its length: its template's."""


class _Cap(NamedTuple):
    """A sum that is not to be exceeded."""

    name: str
    """Name of the provider, or ALL."""
    ledger: str
    """Name of its ledger, which no tenant has as its id."""
    limits: Limits


class Reservation:
    """What one call may cost, as it stands in the ledgers."""

    def __init__(self, limiter: Limiter, ledgers: Sequence[str], call_id: str) -> None:
        self._limiter = limiter
        self._ledgers = ledgers
        self._call_id = call_id

    def settle(self, cost_nano: int) -> None:
        """Record that the call is over and what it cost; 0: it was not made. The second time nothing happens."""
        for ledger in self._ledgers:
            self._limiter.settle(ledger, self._call_id, 0, cost_nano)
        self._ledgers = ()


class ProviderCaps:
    """The caps, as one gateway knows them."""

    def __init__(
        self,
        limiter: Limiter,
        providers: Sequence[ProviderConfig],
        cap: float | None,
        metrics: Metrics,
        random: Random,
    ) -> None:
        """cap: of all providers together, a month; None: there is none."""
        self._limiter = limiter
        self._metrics = metrics
        self._random = random
        self._call_numbers = itertools.count()
        together = [] if cap is None else [_Cap(ALL, "*providers", Limits(budget=cap))]
        self._caps: Mapping[str, list[_Cap]] = {
            provider.name: [*_own_cap(provider), *together] for provider in providers
        }
        self._providers = {provider.name: provider for provider in providers}

    def has(self, provider: str) -> bool:
        """Whether calls of a provider must be reserved."""
        return bool(self._caps.get(provider))

    async def reserve(self, provider: str, request_id: str, prompt_tokens: int, max_tokens: int) -> Reservation:
        """Reserve what a call may cost, of all caps or of none. Raises CapReached, or Overloaded while caps can't be
        checked.

        prompt_tokens: as a model of our own counts them; max_tokens: the bound of the output.
        """
        call_id = f"{request_id}.{next(self._call_numbers)}"
        nano = most_cost_nano(self._providers[provider], prompt_tokens, max_tokens)
        held: list[str] = []
        try:
            for cap in self._caps[provider]:
                verdict = await self._ask(cap, call_id, nano)
                if not verdict.is_admitted:
                    raise self._refuse(cap, verdict, nano)
                held.append(cap.ledger)
        except BaseException:
            Reservation(self._limiter, held, call_id).settle(0)
            raise
        return Reservation(self._limiter, held, call_id)

    def refresh_metrics(self) -> None:
        """Set the gauge of the caps that were asked about lately."""
        names = {cap.ledger: cap.name for caps in self._caps.values() for cap in caps}
        for ledger, spent_nano, limit_nano in self._limiter.list_budgets():
            if ledger in names:
                self._metrics.provider_cap_used_ratio.labels(names[ledger]).set(spent_nano / limit_nano)

    async def _ask(self, cap: _Cap, call_id: str, nano: int) -> Verdict:
        try:
            return await self._limiter.reserve(cap.ledger, cap.limits, call_id, 0, 0, nano, is_full=True)
        except Overloaded as error:
            raise Overloaded("what providers may cost can't be checked at the moment", retry_after_s=1.0) from error

    def _refuse(self, cap: _Cap, verdict: Verdict, nano: int) -> CapReached:
        assert verdict.wait_ms is not None
        self._metrics.budget_refusals.labels("cap").inc()
        who = "Providers together" if cap.name == ALL else f"The provider {cap.name}"
        state = "reserved by requests that run" if verdict.wait_ms == PARALLEL_WAIT_MS else "spent"
        return CapReached(
            f"{who} may cost {cap.limits.budget:.10g} a month, which is {state}: {shown(verdict.spent_nano):.10g} are"
            f" spent or reserved this month, and this request may cost {shown(nano):.10g}. Nobody else may answer it.",
            retry_after_s=spread_s(verdict.wait_ms / 1000, self._random),
        )


def most_cost_nano(provider: ProviderConfig, prompt_tokens: int, max_tokens: int) -> int:
    """Most that a call may cost, in 1e-9 of the currency's unit."""
    num_prompt = math.ceil(prompt_tokens * (1.0 + provider.prompt_margin)) + MARGIN_TOKENS
    prices = prices_of(provider)
    return price_nano(prices._replace(input=max(prices.input, prices.cached)), num_prompt, 0, max_tokens)


def _own_cap(provider: ProviderConfig) -> list[_Cap]:
    if provider.cap is None:
        return []
    return [_Cap(provider.name, f"*provider:{provider.name}", Limits(budget=provider.cap))]
