"""POST /tokenize, /detokenize and /v1/messages/count_tokens: what a model's prompts are made of, without an answer.

A request counts among its tenant's requests per minute; a long one is worked on where prompts are tokenized, by turns
of tenants. Invariant: a prompt is read as the completion endpoints read it, up to the model's context.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from penstock.router.api.reads import admit_read
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.completions.endpoint import note_ignored
from penstock.router.completions.parameters import check_token_ids
from penstock.router.completions.prompts import INLINE_COST, Reader, tokenize_chat, tokenize_completion
from penstock.router.completions.request_metrics import RequestMetrics
from penstock.router.completions.turns import BodyDecoder
from penstock.router.dialects.endpoints import decode_count
from penstock.router.models.served_model import ServedModel
from penstock.router.transport.exchange import Exchange
from penstock.tenancy.tenants import Tenant
from penstock.text.tokenizer import Tokenizer
from penstock.wire.anthropic import TokenCount
from penstock.wire.bodies import decode_detokenize, decode_tokenize
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatRequest, CompletionRequest
from penstock.wire.support import check
from penstock.wire.tokenization import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from penstock.wire.tools import read_tools
from penstock.wire.unread import IgnoredField

Request = TypeVar("Request", TokenizeRequest, DetokenizeRequest, ChatRequest)
Decode = Callable[..., Request]
TOKENIZE_PATH, DETOKENIZE_PATH = "/tokenize", "/detokenize"


class TokenizationPages:
    """Handlers of these paths."""

    def __init__(self, deps: GatewayDependencies, metrics: RequestMetrics) -> None:
        self._deps = deps
        self._metrics = metrics
        self._decoder = BodyDecoder(deps.clock)

    async def tokenize(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        request = await self._request(exchange, tenant, decode_tokenize)
        prompt = _prompt_of(request)
        check(prompt)
        model = await self._find_model(exchange, tenant, request.model)
        with exchange.client.watched(self._deps.config.request_timeout_s):
            token_ids = await self._read(tenant, model, prompt)
            cost = len(token_ids) if request.return_token_strs else 0
            answer = await self._work(tenant, cost, partial(_tokenized, model, token_ids, request.return_token_strs))
            await exchange.answer(answer)

    async def detokenize(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        request = await self._request(exchange, tenant, decode_detokenize)
        tokenizer = (await self._find_model(exchange, tenant, request.model)).tokenizer
        with exchange.client.watched(self._deps.config.request_timeout_s):
            answer = await self._work(tenant, len(request.tokens), partial(_detokenized, tokenizer, request))
            await exchange.answer(answer)

    async def count_tokens(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        prompt = await self._request(exchange, tenant, _decode_count)
        check(prompt)
        model = await self._find_model(exchange, tenant, prompt.model)
        with exchange.client.watched(self._deps.config.request_timeout_s):
            token_ids = await self._read(tenant, model, prompt)
            await exchange.answer(msgspec.json.encode(TokenCount(input_tokens=len(token_ids))))

    async def _request(self, exchange: Exchange, tenant: Tenant, decode: Decode[Request]) -> Request:
        """The decoded body. Raises InvalidRequest, and what reading the body raises."""
        config = self._deps.config
        body = await exchange.client.body(exchange.content_length, config.max_body_bytes, config.body_timeout_s)
        ignored: list[IgnoredField] = []
        request = await self._decoder.decode(tenant.id, body, partial(decode, ignored=ignored, is_counted=True))
        note_ignored(exchange, ignored, config, self._metrics)
        return request

    async def _find_model(self, exchange: Exchange, tenant: Tenant, name: str | None) -> ServedModel:
        """The model of that name, or the only one. Raises as `find_model`, InvalidRequest where a name is needed."""
        if name is None:
            if len(self._deps.models) != 1:
                raise InvalidRequest("Several models are served; 'model' must name one of them.", param="model")
            (name,) = self._deps.models
        model = await self._deps.find_model(tenant, name)
        exchange.model, exchange.adapter = model.label, model.adapter_name
        return model

    async def _read(self, tenant: Tenant, model: ServedModel, prompt: ChatRequest | CompletionRequest) -> list[int]:
        tools = read_tools(prompt) if isinstance(prompt, ChatRequest) else None
        reader = Reader(model.tokenizer, model.max_model_len(), self._deps.threads, tenant.id, tools)
        if isinstance(prompt, ChatRequest):
            (token_ids,) = await tokenize_chat(prompt, reader)
        elif prompt.prompt:
            (token_ids,) = await tokenize_completion(prompt, reader)
        else:  # nothing to go on from, but something to count
            token_ids = model.tokenizer.encode("", add_special=prompt.add_special_tokens is not False)
        return token_ids

    async def _work(self, tenant: Tenant, cost: int, work: Callable[[], bytes]) -> bytes:
        """Do the work here, or by turns of tenants when it costs much."""
        return work() if cost <= INLINE_COST else await self._deps.threads.run(tenant.id, cost, work)


def _decode_count(body: bytes, *, ignored: list[IgnoredField], is_counted: bool) -> ChatRequest:  # noqa: ARG001 (one form)
    return decode_count(body, ignored)


def _prompt_of(request: TokenizeRequest) -> ChatRequest | CompletionRequest:
    """The request as one of the completion endpoints would have it. Raises InvalidRequest unless it has one prompt."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Either 'prompt' or 'messages' must be given, and not both.", param="prompt")
    if request.messages is None:
        return CompletionRequest(model="-", prompt=request.prompt or "", add_special_tokens=request.add_special_tokens)
    if request.add_special_tokens:
        raise InvalidRequest(
            "The chat template alone adds special tokens; leave out 'add_special_tokens'.", param="add_special_tokens"
        )
    return ChatRequest(
        model="-",
        messages=request.messages,
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _tokenized(model: ServedModel, token_ids: list[int], has_texts: bool | None) -> bytes:
    return msgspec.json.encode(
        Tokenized(
            count=len(token_ids),
            max_model_len=model.max_model_len(),
            tokens=token_ids,
            token_strs=model.tokenizer.spell(token_ids) if has_texts else None,
        )
    )


def _detokenized(tokenizer: Tokenizer, request: DetokenizeRequest) -> bytes:
    """Raises InvalidRequest for an id that the model has not."""
    check_token_ids(request.tokens, tokenizer.vocab_size, "tokens")
    return msgspec.json.encode(Detokenized(prompt=tokenizer.decode(request.tokens, skip_special=False)))
