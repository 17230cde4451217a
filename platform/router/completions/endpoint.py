"""POST /v1/chat/completions and /v1/completions: from the body to the last byte.

Authenticate, decode, plan, admit, run, and format the answer on the way. Invariant: nothing is asked of the dispatcher
before everything that can be wrong with the request has been checked.
"""

from collections.abc import Sequence

from penstock.router.completions import spans
from penstock.router.completions.admission import authenticate
from penstock.router.completions.completion import Collector, Completion, Prompt
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.completions.formats import ChatFormat, TextFormat
from penstock.router.completions.plan import EndpointKind, Request, RequestPlan, plan
from penstock.router.completions.prompts import tokenize_chat, tokenize_completion
from penstock.router.completions.receipts import Receipts
from penstock.router.completions.request_metrics import RequestMetrics
from penstock.router.completions.sse import EventStream
from penstock.router.transport.exchange import Exchange
from penstock.router.transport.headers import receipt_headers
from penstock.tenancy.tenants import Tenant
from penstock.wire.bodies import decode_chat, decode_completion
from penstock.wire.support import check

CHAT = EndpointKind("chatcmpl-", decode_chat, tokenize_chat, ChatFormat, has_offsets=False)
COMPLETION = EndpointKind("cmpl-", decode_completion, tokenize_completion, TextFormat, has_offsets=True)


class CompletionsEndpoint:
    """Handler of both paths."""

    def __init__(self, deps: GatewayDependencies, metrics: RequestMetrics, receipts: Receipts) -> None:
        self._deps = deps
        self._metrics = metrics
        self._receipts = receipts

    async def chat(self, exchange: Exchange) -> None:
        await self._serve(exchange, CHAT)

    async def complete(self, exchange: Exchange) -> None:
        await self._serve(exchange, COMPLETION)

    async def _serve(self, exchange: Exchange, kind: EndpointKind[Request]) -> None:
        deps = self._deps
        tenant = await authenticate(deps.keys, exchange)
        exchange.traced = spans.begin(deps.tracing, exchange, tenant.id)
        request = await self._decode(exchange, kind)
        model = await deps.find_model(tenant, request.model)
        exchange.model, exchange.adapter = model.label, model.adapter_name
        with exchange.client.watched(deps.config.request_timeout_s):
            planned = await plan(deps, exchange, tenant, model, kind, request)
            await self._admit(exchange, tenant, planned.prompts)
            if planned.is_stream:
                await self._run_stream(exchange, tenant, planned)
            else:
                await self._run_whole(exchange, tenant, planned)

    async def _decode(self, exchange: Exchange, kind: EndpointKind[Request]) -> Request:
        """Raises InvalidRequest, and what reading the body raises."""
        config = self._deps.config
        body = await exchange.client.body(exchange.content_length, config.max_body_bytes, config.body_timeout_s)
        request = kind.decode(body)
        exchange.client.drop_body()
        check(request)
        return request

    async def _admit(self, exchange: Exchange, tenant: Tenant, prompts: Sequence[Prompt]) -> None:
        """Reserve what the request may use, where its tenant has limits; `_settle` must follow."""
        if tenant.limits is not None:
            exchange.limit_headers = await self._deps.admission.admit(
                tenant.id, tenant.limits, exchange.request_id, prompts
            )

    async def _run_stream(self, exchange: Exchange, tenant: Tenant, planned: RequestPlan) -> None:
        events = EventStream(exchange, planned.answer_format, sum(map(len, planned.prompts)))
        completion = Completion(planned.prompts, self._deps.dispatcher, self._deps.clock, events)
        try:
            await completion.run()
            await events.end(completion.usage())
        finally:
            self._settle(exchange, tenant, completion)

    async def _run_whole(self, exchange: Exchange, tenant: Tenant, planned: RequestPlan) -> None:
        collector = Collector()
        completion = Completion(planned.prompts, self._deps.dispatcher, self._deps.clock, collector)
        try:
            await completion.run()
        finally:
            self._settle(exchange, tenant, completion)
        receipt = planned.prompts[0][0].receipt
        assert receipt is not None
        planned.answer_format.set_answering_model(receipt)
        body = planned.answer_format.whole(collector.choices(), completion.usage())
        await exchange.answer(body, headers=receipt_headers(receipt))

    def _settle(self, exchange: Exchange, tenant: Tenant, completion: Completion) -> None:
        """Account for what the request has used, however it ended: limits and usage, metrics, trace, receipts."""
        assert exchange.model is not None
        self._deps.admission.settle(
            tenant.id, tenant.limits, exchange.request_id, exchange.model, completion, exchange.adapter
        )
        self._metrics.for_model(exchange.model).record_completion(completion, exchange.began_s)
        spans.record_completion(exchange, completion)
        self._receipts.keep(exchange.request_id, tenant.id, exchange.model, int(self._deps.now()), completion)
