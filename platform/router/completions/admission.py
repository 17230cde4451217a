"""Admission of requests: whose a request is, whether its tenant may have it now, and what it has used in the end.

Not the keys themselves (`tenancy.keys`), not the arithmetic of limits (`tenancy.window`). A request of a tenant with
limits reserves what it may use at most, prompt and `max_tokens` of every choice, before the dispatcher starts any of
its sequences. However it ends, it is settled with what it has used: the prompts that a replica or provider took, and
the tokens that came back. What was refused before that, or failed on our side before its first token, has used nothing.
Invariant: what was admitted is settled exactly once. For a tenant without limits `admit` need not be called.

A provider, or another model of the same name, may count more tokens than the first model's tokenizer did; what that
one counted is settled.
"""

import asyncio
from collections.abc import Sequence

from penstock.base.metrics import Metrics
from penstock.router.completions.completion import Completion, Prompt
from penstock.router.transport.exchange import Exchange
from penstock.router.transport.headers import Headers
from penstock.tenancy.keys import KeyStore
from penstock.tenancy.limits import Limiter
from penstock.tenancy.tenants import Limits, Tenant
from penstock.tenancy.usage import UsageLog, UsageRow, Used
from penstock.tenancy.window import LimitName, Verdict
from penstock.wire.errors import Forbidden, InvalidRequest, RateLimited, Unauthenticated

_SENTENCES: dict[LimitName, str] = {
    "requests": (
        "the limit of {limits.requests_per_minute} requests per minute is reached:"
        " {verdict.requests} were admitted in the last minute"
    ),
    "tokens": (
        "the limit of {limits.tokens_per_minute} tokens per minute is reached:"
        " {verdict.tokens} are used or reserved, and this request may use {tokens}"
    ),
    "parallel": "the limit of {limits.max_parallel} requests at once is reached: {verdict.parallel} are under way",
}


class Admission:
    """Limits and usage of every tenant, as the endpoints need them; `run` runs the limiter and the usage log."""

    def __init__(self, limiter: Limiter, usage: UsageLog, metrics: Metrics) -> None:
        self._limiter = limiter
        self._usage = usage
        self._metrics = metrics

    async def run(self) -> None:
        """The background work of limits and usage: a task of the gateway's, for as long as the gateway lives."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._limiter.run())
            tasks.create_task(self._usage.run())

    async def admit(self, tenant_id: str, limits: Limits, request_id: str, prompts: Sequence[Prompt]) -> Headers:
        """The response's headers about the limits; `settle` must follow.

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
        return await self._reserve(tenant_id, limits, request_id, tokens)

    async def charge(self, tenant_id: str, limits: Limits, request_id: str) -> Headers:
        """Admission of a request that generates nothing, an upload for instance: it counts against the requests per
        minute and no other limit, and is settled at once.

        Returns and raises as `admit` does.
        """
        if limits.requests_per_minute is None:
            return ()
        headers = await self._reserve(tenant_id, Limits(requests_per_minute=limits.requests_per_minute), request_id, 0)
        self._limiter.settle(tenant_id, request_id, 0)
        return headers

    async def _reserve(self, tenant_id: str, limits: Limits, request_id: str, tokens: int) -> Headers:
        verdict = await self._limiter.reserve(tenant_id, limits, request_id, tokens)
        headers = limit_headers(limits, verdict)
        if verdict.is_admitted:
            return headers
        assert verdict.limit is not None
        assert verdict.wait_ms is not None
        self._metrics.rate_limited.labels(verdict.limit).inc()
        sentence = _SENTENCES[verdict.limit].format(limits=limits, verdict=verdict, tokens=tokens)
        raise RateLimited(
            f"{sentence[0].upper()}{sentence[1:]}.", retry_after_s=verdict.wait_ms / 1000, headers=tuple(headers)
        )

    async def read_usage(self, tenant_id: str, days: Sequence[str]) -> list[UsageRow]:
        """Rows of what the tenant has used, sorted: through this gateway up to now, through others up to a second ago.
        Raises Overloaded when Redis is away."""
        return await self._usage.read(tenant_id, days)

    def settle(
        self,
        tenant_id: str,
        limits: Limits | None,
        request_id: str,
        model: str,
        completion: Completion,
        adapter: str = "",
    ) -> None:
        """Replace what the request has reserved by what it has used, however it ended. Never waits."""
        used = count_usage(completion)
        if used.requests:
            self._usage.add(tenant_id, model, adapter, used)
        if limits is not None:
            self._limiter.settle(tenant_id, request_id, used.prompt_tokens + used.completion_tokens)


async def authenticate(keys: KeyStore, exchange: Exchange) -> Tenant:
    """The tenant whose key the request carries. Raises Unauthenticated, or Overloaded when keys can't be checked."""
    header = exchange.header(b"authorization")
    if header is None:
        raise Unauthenticated("No API key was sent; use the header 'Authorization: Bearer YOUR_KEY'.")
    scheme, _, key = header.decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("The Authorization header must be 'Bearer' and an API key.")
    tenant = keys.cached(key.strip()) or await keys.tenant(key.strip())
    exchange.identify(tenant.id)
    return tenant


def check_model(tenant: Tenant, model: str) -> None:
    """Raises Forbidden where the tenant may not use the model."""
    if not tenant.may_use(model):
        raise Forbidden(f"This API key may not use the model '{model[:100]}'.", param="model")


def default_max_tokens(limits: Limits | None, default: int, num_prompt_tokens: int, num_sequences: int) -> int:
    """Output bound, in tokens, of a request that names none: at most what lets it fit into the tenant's limit at
    all."""
    if limits is None or limits.tokens_per_minute is None:
        return default
    return max(1, min(default, (limits.tokens_per_minute - num_prompt_tokens) // num_sequences))


def count_usage(completion: Completion) -> Used:
    """What the request has used so far. A prompt counts once, however many choices it has."""
    num_prompt = num_cached = num_output = 0
    has_begun = False
    for choices in completion.prompts:
        receipt = choices[0].receipt
        num_tokens = sum([choice.num_tokens for choice in choices])
        if receipt is None or not (receipt.is_taken or num_tokens):
            continue  # nobody took it, and its other choices wait for its first token
        has_begun = True
        num_prompt += (
            choices[0].generation.num_prompt_tokens if receipt.num_prompt_tokens is None else receipt.num_prompt_tokens
        )
        num_cached += receipt.cached_tokens
        num_output += num_tokens
    return Used(int(has_begun), num_prompt, num_cached, num_output)


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


def _count_reserved_tokens(prompts: Sequence[Prompt]) -> int:
    """Tokens that the request may use at most: each prompt once, and the output bound of every choice."""
    return sum(
        choices[0].generation.num_prompt_tokens + sum(choice.generation.sampling.max_tokens for choice in choices)
        for choices in prompts
    )
