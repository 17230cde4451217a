"""POST /v1/chat/completions and /v1/completions: from the body to the last byte.

Authenticate, read, decode, tokenize, check against the model, run, answer. Invariant: nothing is asked of the dispatcher before all that can
be wrong with the request has been checked.
"""

from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from penstock.router.completion import Choice, Collector, Completion, Prompt
from penstock.router.exchange import Exchange
from penstock.router.formats import Asked, ChatFormat, Format, TextFormat
from penstock.router.gateway import GatewayDeps, ServedModel
from penstock.router.generation import Generation
from penstock.router.headers import receipt_headers
from penstock.router.meters import Meters
from penstock.router.parameters import bounded, sampling_params, sibling, stop_strings
from penstock.router.pieces import Assembler
from penstock.router.prompts import chat_prompt, completion_prompts
from penstock.router.sse import EventStream
from penstock.tenancy.keys import Tenant
from penstock.text.tokenizer import Tokenizer
from penstock.wire.bodies import decode_chat, decode_completion
from penstock.wire.errors import InvalidRequest, ModelNotFound, Unauthenticated
from penstock.wire.frames import SamplingParams, pack_ids
from penstock.wire.openai import MAX_CHOICES, ChatRequest, CompletionRequest
from penstock.wire.support import check

Request = TypeVar("Request", ChatRequest, CompletionRequest)


class Endpoint(NamedTuple, Generic[Request]):
    """What the two endpoints differ in."""

    id_prefix: str
    decode: Callable[[bytes], Request]
    prompts: Callable[[Tokenizer, Request], Awaitable[list[list[int]]]]
    form: Callable[[Asked], Format]
    has_offsets: bool
    """Its logprobs tell where in the text each token is."""


CHAT = Endpoint("chatcmpl-", decode_chat, chat_prompt, ChatFormat, has_offsets=False)
COMPLETION = Endpoint("cmpl-", decode_completion, completion_prompts, TextFormat, has_offsets=True)


class Generator:
    """Serves both endpoints."""

    def __init__(self, deps: GatewayDeps, meters: Meters) -> None:
        self._deps = deps
        self._meters = meters

    async def chat(self, exchange: Exchange) -> None:
        await self._serve(exchange, CHAT)

    async def complete(self, exchange: Exchange) -> None:
        await self._serve(exchange, COMPLETION)

    async def _serve(self, exchange: Exchange, endpoint: Endpoint[Request]) -> None:
        config = self._deps.config
        tenant = await authenticate(self._deps, exchange)
        body = await exchange.client.body(_content_length(exchange), config.max_body_bytes, config.body_timeout_s)
        request = endpoint.decode(body)
        check(request)
        model = find_model(self._deps, request.model)
        exchange.model = model.name
        with exchange.client.watched(config.request_timeout_s):
            await self._answer(exchange, endpoint, request, model, tenant)

    async def _answer(self, exchange: Exchange, endpoint: Endpoint[Request], request: Request, model: ServedModel, tenant: Tenant) -> None:
        sampling = sampling_params(request, self._deps.random.getrandbits(63), model.tokenizer.vocab_size)
        has_usage_chunk = _has_usage_chunk(request)
        token_ids = await endpoint.prompts(model.tokenizer, request)
        prompts = self._prompts(exchange.request_id, endpoint, request, model, tenant, sampling, token_ids)
        asked = Asked(
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
            await self._stream(exchange, prompts, endpoint.form(asked))
        else:
            await self._whole(exchange, prompts, endpoint.form(asked))

    async def _stream(self, exchange: Exchange, prompts: list[Prompt], form: Format) -> None:
        events = EventStream(exchange, form, sum(map(len, prompts)))
        completion = Completion(prompts, self._deps.dispatcher, self._deps.clock, events)
        try:
            await completion.run()
            await events.end(completion.usage())
        finally:
            self._meters.of(exchange.model).generated(completion, exchange.began_s)

    async def _whole(self, exchange: Exchange, prompts: list[Prompt], form: Format) -> None:
        collector = Collector()
        completion = Completion(prompts, self._deps.dispatcher, self._deps.clock, collector)
        try:
            await completion.run()
        finally:
            self._meters.of(exchange.model).generated(completion, exchange.began_s)
        receipt = prompts[0][0].receipt
        assert receipt is not None
        await exchange.answer(form.whole(collector.choices(), completion.usage()), headers=receipt_headers(receipt))

    def _prompts(
        self,
        request_id: str,
        endpoint: Endpoint[Request],
        request: Request,
        model: ServedModel,
        tenant: Tenant,
        sampling: SamplingParams,
        token_ids: list[list[int]],
    ) -> list[Prompt]:
        """The sequences to run. Raises ContextTooLong or InvalidRequest."""
        num_choices = request.n or 1
        if num_choices * len(token_ids) > MAX_CHOICES:
            raise InvalidRequest(f"{len(token_ids)} prompts with n={num_choices} make more than {MAX_CHOICES} choices.", param="n")
        deadline = self._deps.now() + self._deps.config.request_timeout_s
        max_model_len = model.max_model_len()
        stops = stop_strings(request)
        has_offsets = endpoint.has_offsets and sampling.logprobs is not None
        prompts: list[Prompt] = []
        for ids in token_ids:
            fitting = bounded(sampling, len(ids), max_model_len, self._deps.config.default_max_tokens)
            packed = pack_ids(ids)
            choices = []
            for number in range(num_choices):
                index = len(prompts) * num_choices + number
                generation = Generation(
                    request_id=request_id if index == 0 else f"{request_id}-{index}",
                    pools=model.pools,
                    packed_ids=packed,
                    num_prompt_tokens=len(ids),
                    sampling=sibling(fitting, number),
                    tenant=tenant.id,
                    salt=tenant.salt,
                    deadline=deadline,
                )
                choices.append(Choice(index, generation, Assembler(model.tokenizer, stops, sampling.min_tokens, has_offsets)))
            prompts.append(choices)
        return prompts


async def authenticate(deps: GatewayDeps, exchange: Exchange) -> Tenant:
    """Whose key the request carries. Raises Unauthenticated, or Overloaded when keys can't be checked."""
    header = exchange.header(b"authorization")
    if header is None:
        raise Unauthenticated("No API key was sent; use the header 'Authorization: Bearer YOUR_KEY'.")
    scheme, _, key = header.decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("The Authorization header must be 'Bearer' and an API key.")
    return deps.keys.cached(key.strip()) or await deps.keys.tenant(key.strip())


def find_model(deps: GatewayDeps, name: str) -> ServedModel:
    """Raises ModelNotFound."""
    model = deps.models.get(name)
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
