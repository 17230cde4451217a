"""POST /v1/chat/completions and /v1/completions: from the body to the last byte.

Authenticate, read, decode, tokenize, check against the model, run, answer. Invariant: nothing is asked of the
dispatcher before all that can be wrong with the request has been checked.
"""

from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from penstock.router.completions import spans
from penstock.router.completions.admission import check_model, default_max_tokens
from penstock.router.completions.candidates import Candidates, LazyPrompts, find_candidates
from penstock.router.completions.completion import Choice, Collector, Completion, Prompt
from penstock.router.completions.dependencies import GatewayDeps
from penstock.router.completions.formats import ChatFormat, Format, ResponseMeta, TextFormat
from penstock.router.completions.parameters import bounded, sampling_params, sibling, stop_strings
from penstock.router.completions.prompts import chat_prompt, completion_prompts
from penstock.router.completions.receipts import Receipts
from penstock.router.completions.request_metrics import Meters
from penstock.router.completions.sse import EventStream
from penstock.router.completions.text_assembly import Assembler
from penstock.router.models.served_model import ServedModel
from penstock.router.routing.request import Generation, ProviderRequest
from penstock.router.transport.exchange import Exchange
from penstock.router.transport.headers import receipt_headers
from penstock.tenancy.tenants import Tenant
from penstock.text.tokenizer import Tokenizer
from penstock.wire.bodies import decode_chat, decode_completion
from penstock.wire.errors import InvalidRequest, ModelNotFound, Unauthenticated
from penstock.wire.frames import SamplingParams, pack_token_ids
from penstock.wire.openai import MAX_CHOICES, ChatRequest, CompletionRequest
from penstock.wire.support import check

Request = TypeVar("Request", ChatRequest, CompletionRequest)


class Endpoint(NamedTuple, Generic[Request]):
    """What the two endpoints differ in."""

    id_prefix: str
    decode: Callable[[bytes], Request]
    prompts: Callable[[Tokenizer, Request], Awaitable[list[list[int]]]]
    form: Callable[[ResponseMeta], Format]
    has_offsets: bool
    """Its logprobs tell where in the text each token is."""


CHAT = Endpoint("chatcmpl-", decode_chat, chat_prompt, ChatFormat, has_offsets=False)
COMPLETION = Endpoint("cmpl-", decode_completion, completion_prompts, TextFormat, has_offsets=True)


class Generator:
    """Serves both endpoints."""

    def __init__(self, deps: GatewayDeps, meters: Meters, receipts: Receipts) -> None:
        self._deps = deps
        self._meters = meters
        self._receipts = receipts

    async def chat(self, exchange: Exchange) -> None:
        await self._serve(exchange, CHAT)

    async def complete(self, exchange: Exchange) -> None:
        await self._serve(exchange, COMPLETION)

    async def _serve(self, exchange: Exchange, endpoint: Endpoint[Request]) -> None:
        config = self._deps.config
        tenant = await authenticate(self._deps, exchange)
        exchange.traced = spans.begin(self._deps.tracing, exchange, tenant.id)
        body = await exchange.client.body(_content_length(exchange), config.max_body_bytes, config.body_timeout_s)
        request = endpoint.decode(body)
        check(request)
        model = await find_model(self._deps, tenant, request.model)
        check_model(tenant, model.label)
        exchange.model = model.label
        exchange.adapter = "" if model.adapter is None else model.name.rpartition(":")[2]
        with exchange.client.watched(config.request_timeout_s):
            await self._answer(exchange, endpoint, request, model, tenant)

    async def _answer(
        self, exchange: Exchange, endpoint: Endpoint[Request], request: Request, model: ServedModel, tenant: Tenant
    ) -> None:
        reach = find_candidates(model, tenant.tier_policy, request, self._deps.providers)
        sampling = sampling_params(request, self._deps.random.getrandbits(63), reach.model.tokenizer.vocab_size)
        has_usage_chunk = _has_usage_chunk(request)
        reach, token_ids = await _read(endpoint, request, reach, sampling)
        model = reach.model
        prompts = self._prompts(exchange, endpoint, request, reach, tenant, sampling, token_ids)
        asked = ResponseMeta(
            endpoint.id_prefix + exchange.request_id,
            int(self._deps.now()),
            model.name,
            model.fingerprint,
            model.tokenizer,
            has_usage_chunk,
            has_token_ids=bool(request.return_token_ids),
            has_logprobs=sampling.logprobs is not None,
        )
        if request.stream:
            await self._stream(exchange, tenant, prompts, endpoint.form(asked))
        else:
            await self._whole(exchange, tenant, prompts, endpoint.form(asked))

    async def _stream(self, exchange: Exchange, tenant: Tenant, prompts: list[Prompt], form: Format) -> None:
        events = EventStream(exchange, form, sum(map(len, prompts)))
        completion = Completion(prompts, self._deps.dispatcher, self._deps.clock, events)
        await self._admit(exchange, tenant, prompts)
        try:
            await completion.run()
            await events.end(completion.usage())
        finally:
            self._ended(exchange, tenant, completion)

    async def _whole(self, exchange: Exchange, tenant: Tenant, prompts: list[Prompt], form: Format) -> None:
        collector = Collector()
        completion = Completion(prompts, self._deps.dispatcher, self._deps.clock, collector)
        await self._admit(exchange, tenant, prompts)
        try:
            await completion.run()
        finally:
            self._ended(exchange, tenant, completion)
        receipt = prompts[0][0].receipt
        assert receipt is not None
        form.answered_by(receipt)
        await exchange.answer(form.whole(collector.choices(), completion.usage()), headers=receipt_headers(receipt))

    async def _admit(self, exchange: Exchange, tenant: Tenant, prompts: list[Prompt]) -> None:
        """`_ended` must follow."""
        if tenant.limits is not None:
            exchange.limit_headers = await self._deps.admission.admit(
                tenant.id, tenant.limits, exchange.request_id, prompts
            )

    def _ended(self, exchange: Exchange, tenant: Tenant, completion: Completion) -> None:
        """However it ended."""
        assert exchange.model is not None
        self._deps.admission.ended(
            tenant.id, tenant.limits, exchange.request_id, exchange.model, completion, exchange.adapter
        )
        self._meters.of(exchange.model).generated(completion, exchange.began_s)
        spans.generated(exchange, completion)
        self._receipts.keep(exchange.request_id, tenant.id, exchange.model, int(self._deps.now()), completion)

    def _prompts(
        self,
        exchange: Exchange,
        endpoint: Endpoint[Request],
        request: Request,
        reach: Candidates,
        tenant: Tenant,
        sampling: SamplingParams,
        token_ids: list[list[int]],
    ) -> list[Prompt]:
        """The sequences to run. Raises ContextTooLong or InvalidRequest."""
        num_choices = request.n or 1
        if num_choices * len(token_ids) > MAX_CHOICES:
            raise InvalidRequest(
                f"{len(token_ids)} prompts with n={num_choices} make more than {MAX_CHOICES} choices.", param="n"
            )
        deadline = self._deps.now() + self._deps.config.request_timeout_s
        max_model_len, pools, model = reach.max_model_len(), reach.pools, reach.model
        max_tokens = default_max_tokens(
            tenant.limits, self._deps.config.default_max_tokens, sum(map(len, token_ids)), num_choices * len(token_ids)
        )
        readings = LazyPrompts(
            reach.others, lambda tokenizer: endpoint.prompts(tokenizer, request), sampling, max_tokens
        )
        stops = stop_strings(request)
        has_offsets = endpoint.has_offsets and sampling.logprobs is not None
        prompts: list[Prompt] = []
        for ids in token_ids:
            fitting = bounded(sampling, len(ids), max_model_len, max_tokens)
            packed = pack_token_ids(ids)
            choices = []
            for number in range(num_choices):
                index = len(prompts) * num_choices + number
                generation = Generation(
                    request_id=exchange.request_id if index == 0 else f"{exchange.request_id}-{index}",
                    pools=pools,
                    packed_token_ids=packed,
                    num_prompt_tokens=len(ids),
                    sampling=sibling(fitting, number),
                    tenant=tenant.id,
                    salt=tenant.salt,
                    deadline=deadline,
                    adapter=reach.model.adapter,
                    traced=exchange.traced,
                    routes=reach.routes,
                    lazy_prompts=readings.of(len(prompts), number) if reach.others else (),
                    skipped=reach.skipped,
                    provider_request=ProviderRequest(request, len(prompts)) if reach.has_provider else None,
                )
                choices.append(
                    Choice(index, generation, Assembler(model.tokenizer, stops, sampling.min_tokens, has_offsets))
                )
            prompts.append(choices)
        return prompts


async def _read(
    endpoint: Endpoint[Request], request: Request, reach: Candidates, sampling: SamplingParams
) -> tuple[Candidates, list[list[int]]]:
    """The prompts for the first model whose context holds them; where there is none, for the last."""
    while True:
        token_ids = await endpoint.prompts(reach.model.tokenizer, request)
        if max(map(len, token_ids)) + (sampling.max_tokens or 1) <= reach.max_model_len():
            return reach, token_ids
        beyond = reach.beyond_first_model()
        if beyond is None:
            return reach, token_ids
        reach = beyond
        if not any(route.provider is None for route in reach.routes):
            return reach, token_ids


async def authenticate(deps: GatewayDeps, exchange: Exchange) -> Tenant:
    """Whose key the request carries. Raises Unauthenticated, or Overloaded when keys can't be checked."""
    header = exchange.header(b"authorization")
    if header is None:
        raise Unauthenticated("No API key was sent; use the header 'Authorization: Bearer YOUR_KEY'.")
    scheme, _, key = header.decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("The Authorization header must be 'Bearer' and an API key.")
    return deps.keys.cached(key.strip()) or await deps.keys.tenant(key.strip())


async def find_model(deps: GatewayDeps, tenant: Tenant, name: str) -> ServedModel:
    """A served model, or one of the tenant's adapters. Raises ModelNotFound, or Overloaded when adapters can't be
    looked up."""
    model = deps.models.get(name)
    if model is None and deps.adapters is not None:
        model = await deps.adapters.models.find(tenant.id, name)
    if model is None:
        raise ModelNotFound(f"The model '{name[:100]}' does not exist or you do not have access to it.", param="model")
    return model


def _content_length(exchange: Exchange) -> int | None:
    value = exchange.header(b"content-length")
    return int(value[:20]) if value is not None and value.isdigit() else None


def _has_usage_chunk(request: ChatRequest | CompletionRequest) -> bool:
    if request.stream_options is None:
        return False
    if not request.stream:
        raise InvalidRequest("'stream_options' may only be set when 'stream' is true.", param="stream_options")
    return bool(request.stream_options.include_usage)
