"""Admission of requests: whose a request is, whether its tenant may have it now, and what it has used in the end.

Not the keys themselves (`tenancy.keys`), not the arithmetic of limits (`tenancy.window`). A request of a tenant with
limits reserves what it may use at most, prompt and `max_tokens` of every choice, before the dispatcher starts any of
its sequences; where the tenant has a budget, what that comes to at the model's tariff. Where an edge pool may send a
request on (`escalation`), the attempt there is reserved too: each prompt a second time, and the tokens that are held
back. However it ends, a request is settled with what it has used: the prompts that a replica or provider took, and the
tokens that came back; of one that was sent on both prompts and the held tokens. What was refused before that, or lost
on our side before its first token, has used nothing; a sequence with which the engine's step fails has used its prompt.
Invariant: what was admitted is settled exactly once. For a tenant without limits `admit` need not be called. Usage is
written while an answer runs (`watch`), so that a gateway that is killed loses seconds of it and not the answer: every
USAGE_EVERY_S what has been used since the last time, and at the end the rest.

A provider, or another model of the same name, may count more tokens than the first model's tokenizer did; what that
one counted is settled. The charge is never more than what was reserved.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from penstock.base.metrics import Metrics
from penstock.router.completions.completion import Completion, Prompt
from penstock.router.routing.request import Receipt
from penstock.router.routing.retry import spread_s
from penstock.router.transport.exchange import Exchange
from penstock.router.transport.headers import Headers
from penstock.tenancy.keys import KeyStore
from penstock.tenancy.limits import Limiter
from penstock.tenancy.tariffs import FREE, NO_TARIFFS, Tariff, Tariffs, charge_nano, most_nano
from penstock.tenancy.tenants import ID_PATTERN, Limits, Tenant
from penstock.tenancy.usage import UsageLog, UsageRow, Used
from penstock.tenancy.window import PARALLEL_WAIT_MS, LimitName, Verdict
from penstock.wire.errors import BudgetSpent, Forbidden, InvalidRequest, RateLimited, Unauthenticated
from penstock.wire.money import TOKENS_OF_A_PRICE, shown

USAGE_EVERY_S = 2.0
"""Time between two additions of what running requests have used, seconds; the usage log writes them a second later."""

LATE_S = 30.0
"""Longest wait for what the last steps of a request that was broken off have cost; a replica tells it within a step."""
NOTHING_USED = Used()
SHOWN = 20
"""Tenants whose budgets are among the metrics."""

_SENTENCES: dict[LimitName, str] = {
    "requests": (
        "the limit of {limits.requests_per_minute} requests per minute is reached:"
        " {verdict.requests} were admitted in the last minute"
    ),
    "tokens": (
        "the limit of {limits.tokens_per_minute} tokens per minute is reached:"
        " {verdict.tokens} are used or reserved, and this request may use {tokens}"
    ),
    "budget": (
        "the budget of {limits.budget:.10g} a month is {state}: {spent:.10g} are spent or reserved this month, and this"
        " request may come to {most:.10g}"
    ),
    "parallel": (
        "the limit of {limits.max_parallel} sequences at once is reached, each choice of each prompt being one:"
        " {verdict.parallel} are under way, and this request has {sequences}"
    ),
}

MAX_KNOWN_S = 1.0
"""How long the limiter's word that a limit of requests is reached is taken for granted. Requests leave the window at a
known time only, but a word given while Redis is away may be too strict."""


class _Reached(NamedTuple):
    """The limiter's word that a tenant's limit of requests is reached."""

    requests_per_minute: int
    at_s: float
    verdict: Verdict


@dataclass(slots=True)
class _Running:
    """A request whose answer runs, and what has been counted of it."""

    tenant_id: str
    model: str
    adapter: str
    completion: Completion
    counted: Used = NOTHING_USED
    settled_s: float = 0.0
    """Monotonic time at which its answer ended."""


class Admission:
    """Limits and usage of every tenant, as the endpoints need them; `run` runs the limiter and the usage log."""

    def __init__(
        self,
        limiter: Limiter,
        usage: UsageLog,
        metrics: Metrics,
        random: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        tariffs: Tariffs = NO_TARIFFS,
    ) -> None:
        """random: spreads the times after which refused requests may come back. clock: monotonic seconds. tariffs: what
        tenants are charged."""
        self._random = Random() if random is None else random
        self._limiter = limiter
        self._usage = usage
        self._metrics = metrics
        self._clock = clock
        self._tariffs = tariffs
        self._reached: dict[str, _Reached] = {}
        self._running: dict[str, _Running] = {}
        """Requests whose answers run, by request id."""
        self._late: list[_Running] = []
        """Requests that have ended, and of which replicas have still to tell what their last steps cost."""

    async def run(self) -> None:
        """The background work of limits and usage: a task of the gateway's, for as long as the gateway lives."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._limiter.run())
            tasks.create_task(self._usage.run())
            tasks.create_task(self._add_usage_while_running())

    def refresh_metrics(self) -> None:
        """Set the gauge of budgets: of those that are fullest at this gateway."""
        gauge = self._metrics.budget_used_ratio
        gauge.clear()
        budgets = [budget for budget in self._limiter.list_budgets() if ID_PATTERN.fullmatch(budget[0])]  # no caps
        for tenant_id, spent_nano, limit_nano in sorted(budgets, key=lambda budget: -budget[1] / budget[2])[:SHOWN]:
            gauge.labels(tenant_id).set(spent_nano / limit_nano)

    def check(self, tenant_id: str, limits: Limits) -> None:
        """Raises RateLimited if the tenant's limit of requests was reached a moment ago and still must be: that costs
        no round trip."""
        reached = self._reached.get(tenant_id)
        if reached is None:
            return
        passed_ms = int(1000 * (self._clock() - reached.at_s))
        wait_ms = (reached.verdict.wait_ms or 0) - passed_ms
        if wait_ms <= 0 or passed_ms >= 1000 * MAX_KNOWN_S or reached.requests_per_minute != limits.requests_per_minute:
            del self._reached[tenant_id]
            return
        reset_ms = max(0, reached.verdict.reset_requests_ms - passed_ms)
        known = reached.verdict._replace(wait_ms=wait_ms, reset_requests_ms=reset_ms)
        raise self._refuse(limits, known, tokens=0, sequences=0)

    def find_tariff(self, model: str, adapter: str = "") -> Tariff:
        """Tariff of a served name, and of an adapter of it; empty: none."""
        return self._tariffs.find(model, adapter)

    async def admit(
        self,
        tenant_id: str,
        limits: Limits,
        request_id: str,
        prompts: Sequence[Prompt],
        tariff: Tariff = FREE,
    ) -> Headers:
        """The response's headers about the limits; `settle` must follow. tariff: of the model that was asked for.

        Raises InvalidRequest for what can never fit, RateLimited with those headers for what does not fit now, and
        Overloaded when the limits cannot be checked.
        """
        tokens = _count_reserved_tokens(prompts)
        if limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute:
            raise InvalidRequest(
                f"The request may use {tokens} tokens, its prompt and 'max_tokens' of all choices together. That can"
                f" never fit into the limit of {limits.tokens_per_minute} tokens per minute; shorten one of them.",
                param="max_tokens",
            )
        sequences = sum(choices[0].generation.sampling.num_beams or len(choices) for choices in prompts)
        if limits.max_parallel is not None and sequences > limits.max_parallel:
            raise InvalidRequest(
                f"The request has {sequences} sequences, its prompts times 'n' or beams. That can never fit into the"
                f" limit of {limits.max_parallel} sequences at once.",
                param="n",
            )
        nano = count_most_nano(tariff, prompts)
        if limits.budget_nano is not None and nano > limits.budget_nano:
            raise InvalidRequest(
                f"The request may come to {shown(nano):.10g}, its prompt and 'max_tokens' of all choices together. That"
                f" can never fit into the budget of {limits.budget:.10g} a month; shorten one of them.",
                param="max_tokens",
            )
        return await self._reserve(tenant_id, limits, request_id, tokens, sequences, nano)

    async def charge(self, tenant_id: str, limits: Limits, request_id: str) -> Headers:
        """Admission of a request that generates nothing, a read, an upload or one that has failed: it counts against
        the requests per minute and no other limit, and is settled at once.

        Returns and raises as `admit` does; while that limit is known to be reached, without a round trip.
        """
        if limits.requests_per_minute is None:
            return ()
        self.check(tenant_id, limits)
        # nothing is charged, but a budget that is not named would be taken for one that is gone
        counted = Limits(requests_per_minute=limits.requests_per_minute, budget=limits.budget)
        headers = await self._reserve(tenant_id, counted, request_id, tokens=0, sequences=0)
        self._limiter.settle(tenant_id, request_id, 0)
        return headers

    async def _reserve(
        self, tenant_id: str, limits: Limits, request_id: str, tokens: int, sequences: int, nano: int = 0
    ) -> Headers:
        verdict = await self._limiter.reserve(tenant_id, limits, request_id, tokens, sequences, nano)
        if verdict.is_admitted:
            return limit_headers(limits, verdict)
        if verdict.limit == "requests" and limits.requests_per_minute is not None:
            self._reached[tenant_id] = _Reached(limits.requests_per_minute, self._clock(), verdict)
        if verdict.limit == "budget":
            raise self._refuse_charge(limits, verdict, nano)
        raise self._refuse(limits, verdict, tokens, sequences)

    def _refuse_charge(self, limits: Limits, verdict: Verdict, nano: int) -> BudgetSpent:
        assert verdict.wait_ms is not None
        self._metrics.budget_refusals.labels("tenant").inc()
        state = "reserved by requests that run" if verdict.wait_ms == PARALLEL_WAIT_MS else "spent"
        sentence = _SENTENCES["budget"].format(
            limits=limits, state=state, spent=shown(verdict.spent_nano), most=shown(nano)
        )
        return BudgetSpent(
            f"{sentence[0].upper()}{sentence[1:]}.",
            retry_after_s=spread_s(verdict.wait_ms / 1000, self._random),
            headers=tuple(limit_headers(limits, verdict)),
        )

    def _refuse(self, limits: Limits, verdict: Verdict, tokens: int, sequences: int) -> RateLimited:
        assert verdict.limit is not None
        assert verdict.wait_ms is not None
        self._metrics.rate_limited.labels(verdict.limit).inc()
        sentence = _SENTENCES[verdict.limit].format(limits=limits, verdict=verdict, tokens=tokens, sequences=sequences)
        return RateLimited(
            f"{sentence[0].upper()}{sentence[1:]}.",
            retry_after_s=spread_s(verdict.wait_ms / 1000, self._random),
            headers=tuple(limit_headers(limits, verdict)),
        )

    async def read_usage(self, tenant_id: str, days: Sequence[str]) -> list[UsageRow]:
        """Rows of what the tenant has used, sorted: through this gateway up to now, through others up to a second ago.
        Raises Overloaded when Redis is away."""
        return await self._usage.read(tenant_id, days)

    async def read_spent(self, tenant_id: str, month: str) -> int:
        """Sum of what a tenant with a budget is charged in a month such as 2026-11, reservations included, in 1e-9 of
        the currency's unit. Raises Overloaded when Redis is away."""
        return await self._limiter.read_spent(tenant_id, month)

    def watch(self, tenant_id: str, request_id: str, model: str, completion: Completion, adapter: str = "") -> None:
        """Write what the request uses while its answer runs; `settle` must follow."""
        self._running[request_id] = _Running(tenant_id, model, adapter, completion)

    def add_running_usage(self) -> None:
        """Add what the running requests have used since the last time, and what those that are settled have cost in the
        end. O(running)."""
        for request_id, running in self._running.items():
            used = self.count(running.model, running.adapter, running.completion)
            if used.charge_nano:
                self._limiter.note(running.tenant_id, request_id, used.charge_nano)
            if used.completion_tokens:  # else the prompt may still be lost with its replica, and would be taken back
                self._add_usage(running, used)
        for running in self._late:
            self._add_usage(running, running.counted._replace(cost_nano=count_cost_nano(running.completion)))
        now = self._clock()
        self._late = [
            running
            for running in self._late
            if now - running.settled_s < LATE_S and not is_cost_settled(running.completion)
        ]

    async def _add_usage_while_running(self) -> None:
        try:
            while True:
                await asyncio.sleep(USAGE_EVERY_S)
                self.add_running_usage()
        finally:
            self.add_running_usage()
            await self._usage.flush()

    def _add_usage(self, running: "_Running", used: Used) -> None:
        """Bring what is counted of a request to `used`; a provider may have corrected a number downward."""
        more = Used(*[now - before for now, before in zip(used, running.counted, strict=True)])
        running.counted = used
        if any(more):
            self._usage.add(running.tenant_id, running.model, running.adapter, more)

    def add_usage(self, tenant_id: str, model: str, adapter: str, used: Used) -> None:
        """Add what was used by something that was not watched, and whose limits are settled. Never waits."""
        self._usage.add(tenant_id, model, adapter, used)
        self.count_charge(model, used.charge_nano)

    def count_charge(self, model: str, nano: int) -> None:
        """Count a charge that nothing takes back any more among the metrics: a counter can only rise."""
        if nano:
            self._metrics.charge.labels(model).inc(shown(nano))

    def settle(
        self,
        tenant_id: str,
        limits: Limits | None,
        request_id: str,
        model: str,
        completion: Completion,
        adapter: str = "",
    ) -> Used:
        """Replace what the request has reserved by what it has used, which is returned, however it ended. Never
        waits."""
        used = self.count(model, adapter, completion)
        running = self._running.pop(request_id, None) or _Running(tenant_id, model, adapter, completion)
        self._add_usage(running, used)
        self.count_charge(model, used.charge_nano)
        self._follow_cost(running)
        self.settle_limits(tenant_id, limits, request_id, used)
        return used

    def follow_cost(self, tenant_id: str, model: str, adapter: str, completion: Completion, counted: Used) -> None:
        """Add what a request has cost in the end that was not watched. counted: what has been counted of it."""
        self._follow_cost(_Running(tenant_id, model, adapter, completion, counted))

    def _follow_cost(self, running: "_Running") -> None:
        if not is_cost_settled(running.completion):
            running.settled_s = self._clock()
            self._late.append(running)

    def settle_limits(self, tenant_id: str, limits: Limits | None, request_id: str, used: Used) -> None:
        """The part of `settle` that is about limits, for a request whose usage is counted elsewhere, and that was not
        watched. Never waits."""
        if limits is not None:
            num_tokens = used.prompt_tokens + used.completion_tokens
            self._limiter.settle(tenant_id, request_id, num_tokens, used.charge_nano)

    def count(self, model: str, adapter: str, completion: Completion) -> Used:
        """What a request has used so far, and its charge: never more than was reserved for it, whatever a provider
        reports. adapter: empty: none."""
        used, tariff = count_usage(completion), self._tariffs.find(model, adapter)
        if tariff == FREE:
            return used
        most_nano = count_most_nano(tariff, completion.prompts)
        return used._replace(charge_nano=min(charge_nano(tariff, used), most_nano))


async def authenticate(keys: KeyStore, exchange: Exchange) -> Tenant:
    """The tenant whose key the request carries. Raises Unauthenticated, or Overloaded when keys can't be checked."""
    key_header = None if exchange.key_header is None else exchange.header(exchange.key_header)
    if key_header is not None and key_header.strip():
        return await _identify(keys, exchange, key_header.decode("latin-1").strip())
    header = exchange.header(b"authorization")
    if header is None:
        raise Unauthenticated("No API key was sent; use the header 'Authorization: Bearer YOUR_KEY'.")
    scheme, _, key = header.decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("The Authorization header must be 'Bearer' and an API key.")
    return await _identify(keys, exchange, key.strip())


async def _identify(keys: KeyStore, exchange: Exchange, key: str) -> Tenant:
    tenant = keys.cached(key) or await keys.tenant(key)
    exchange.service_class = tenant.share.service_class
    exchange.identify(tenant.id)
    return tenant


def check_model(tenant: Tenant, model: str) -> None:
    """Raises Forbidden where the tenant may not use the model."""
    if not tenant.may_use(model):
        raise Forbidden(f"This API key may not use the model '{model[:100]}'.", param="model")


def default_max_tokens(
    limits: Limits | None, default: int, num_prompt_tokens: int, num_sequences: int, tariff: Tariff = FREE
) -> int:
    """Output bound, in tokens, of a request that names none: at most what lets it fit into the tenant's limit, and the
    budget of a month, at all."""
    bounds = [default]
    if limits is not None and limits.tokens_per_minute is not None:
        bounds.append((limits.tokens_per_minute - num_prompt_tokens) // num_sequences)
    if limits is not None and limits.budget_nano is not None and tariff.output:
        left_nano = limits.budget_nano - most_nano(tariff, num_prompt_tokens, 0) - 1  # sums are rounded up
        bounds.append(left_nano * TOKENS_OF_A_PRICE // tariff.output // num_sequences)
    return max(1, min(bounds))


def count_usage(completion: Completion) -> Used:
    """What the request has used so far. A prompt counts once, however many choices it has, and once more where an edge
    pool gave it away."""
    used = Used()
    for choices in completion.prompts:
        used = used.plus(count_prompt(choices))
    return used._replace(requests=min(1, used.requests), cost_nano=count_cost_nano(completion))


def count_prompt(choices: Prompt) -> Used:
    """What one prompt and its choices have used so far, cost and charge left out; `requests` is 0 where nothing counts
    yet."""
    receipt, trial, generation = choices[0].receipt, choices[0].trial, choices[0].generation
    num_shown = sum([choice.num_tokens for choice in choices])
    num_unshown = num_prompt = num_cached = 0
    if trial is not None:
        num_unshown = trial.num_unshown_tokens
        if trial.edge is not None:
            num_prompt, num_cached = trial.edge.num_prompt_tokens, trial.edge.num_cached_tokens
    has_begun, is_held = num_prompt > 0, num_unshown > 0 and trial is not None and trial.edge is None
    if receipt is not None and (receipt.is_taken or num_shown or is_held):  # else nobody took it, or has it yet
        has_begun = True
        num_prompt += generation.num_prompt_tokens if receipt.num_prompt_tokens is None else receipt.num_prompt_tokens
        num_cached += receipt.cached_tokens
    return Used(int(has_begun), num_prompt, num_cached, num_shown + num_unshown)


def count_cost_nano(completion: Completion) -> int:
    """What the request has cost so far, at places that have a price, in 1e-9 of the unit: also where it has used
    nothing, since a replica was lost or the caller was."""
    return sum([receipt.cost_nano for receipt in find_receipts(completion)])


def is_cost_settled(completion: Completion) -> bool:
    """Whether the request's cost is what it will be."""
    return all(receipt.is_settled for receipt in find_receipts(completion))


def find_receipts(completion: Completion) -> list[Receipt]:
    """The receipts of a request's sequences, also of attempts of which nothing was shown; the answers of a
    search have one together."""
    receipts = [choice.receipt for choices in completion.prompts for choice in choices if choice.receipt is not None]
    receipts += [
        receipt
        for choices in completion.prompts
        for choice in choices
        if choice.trial is not None
        for receipt in choice.trial.vain
    ]
    return receipts if len(receipts) < 2 else list({id(receipt): receipt for receipt in receipts}.values())


def limit_headers(limits: Limits, verdict: Verdict) -> Headers:
    """The x-ratelimit headers of OpenAI's API, for the limits that there are; durations in Go's notation."""
    headers: list[tuple[bytes, bytes]] = []
    for name, limit, count, reset_ms in (
        (b"requests", limits.requests_per_minute, verdict.requests, verdict.reset_requests_ms),
        (b"tokens", limits.tokens_per_minute, verdict.tokens, verdict.reset_tokens_ms),
    ):
        if limit is not None:
            headers += [
                (b"x-ratelimit-limit-" + name, b"%d" % limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % max(0, limit - count)),
                (b"x-ratelimit-reset-" + name, b"%dms" % reset_ms if reset_ms < 1000 else b"%gs" % (reset_ms / 1000)),
            ]
    return headers


def can_ever_fit(limits: Limits | None, prompts: Sequence[Prompt], tariff: Tariff) -> bool:
    """Whether a request would fit into its tenant's tokens per minute and budget if nothing of them were used."""
    if limits is None:
        return True
    is_in_tokens = limits.tokens_per_minute is None or _count_reserved_tokens(prompts) <= limits.tokens_per_minute
    return is_in_tokens and (limits.budget_nano is None or count_most_nano(tariff, prompts) <= limits.budget_nano)


def count_most_nano(tariff: Tariff, prompts: Sequence[Prompt]) -> int:
    """Most that the request can be charged, in 1e-9 of the currency's unit."""
    prompt_tokens = [_count_prompt_tokens(choices) for choices in prompts]
    return most_nano(tariff, sum(prompt_tokens), sum(map(_count_output_tokens, prompts)))


def _count_prompt_tokens(choices: Prompt) -> int:
    """Tokens of a prompt, twice where an edge pool may have to give it away."""
    times = 2 if _num_tried(choices) else 1
    return times * choices[0].generation.num_prompt_tokens


def _num_tried(choices: Prompt) -> int:
    """Output tokens of an attempt at the edge that comes to nothing; 0: none is made."""
    trial = choices[0].trial
    return 0 if trial is None else trial.num_reserved_tokens


def _count_output_tokens(choices: Prompt) -> int:
    sampling = choices[0].generation.sampling
    if sampling.num_beams:
        return sampling.num_beams * sampling.max_tokens
    return sum(choice.generation.sampling.max_tokens for choice in choices) + _num_tried(choices)


def _count_reserved_tokens(prompts: Sequence[Prompt]) -> int:
    """Tokens that the request may use at most: each prompt once, the output bound of every choice or beam, and what an
    attempt at the edge may compute for nothing, the prompt again and the held tokens."""
    return sum(_count_prompt_tokens(choices) + _count_output_tokens(choices) for choices in prompts)
