"""POST /v1/chat/completions and /v1/completions: from the body to the last byte.

Authenticate, decode, plan, admit, run, and format the answer on the way. Invariants: nothing is asked of the dispatcher
before everything that can be wrong with the request has been checked; while the answer runs, neither the body nor the
decoded request is held, but for what another model or a provider may need of it; what is held is in the body budget.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial

from penstock.router.completions import spans
from penstock.router.completions.admission import authenticate
from penstock.router.completions.arrivals import Arrivals
from penstock.router.completions.best_choices import select_best
from penstock.router.completions.completion import Collector, Completion, Prompt
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.completions.formats import ChatFormat, TextFormat
from penstock.router.completions.goodput.outcome import has_left
from penstock.router.completions.goodput.recorder import Goodput, MeasuredRequest
from penstock.router.completions.heartbeats import Heartbeats
from penstock.router.completions.plan import AnswerFormat, EndpointKind, Request, RequestPlan, plan
from penstock.router.completions.prompts import tokenize_chat, tokenize_completion
from penstock.router.completions.receipts import Charge, Receipts
from penstock.router.completions.request_metrics import RequestMetrics
from penstock.router.completions.sse import EventStream
from penstock.router.completions.turns import BodyDecoder, in_turns
from penstock.router.config import GatewayConfig
from penstock.router.transport.client import ClientGone
from penstock.router.transport.exchange import JSON, Exchange
from penstock.router.transport.headers import Headers, receipt_headers
from penstock.tenancy.tariffs import FREE
from penstock.tenancy.tenants import Tenant
from penstock.wire.accounts import TargetReceipt
from penstock.wire.bodies import decode_chat, decode_completion
from penstock.wire.errors import RateLimited, RequestError
from penstock.wire.support import check
from penstock.wire.unread import IgnoredField, check_strictly, header_value

CHAT = EndpointKind(
    "chatcmpl-",
    partial(decode_chat, is_counted=True),
    tokenize_chat,
    ChatFormat,
    has_offsets=False,
    new_events=EventStream,
)
COMPLETION = EndpointKind(
    "cmpl-",
    partial(decode_completion, is_counted=True),
    tokenize_completion,
    TextFormat,
    has_offsets=True,
    new_events=EventStream,
)
CHAT_PATH = "/v1/chat/completions"

SENT_BYTES = 256 * 2**10
"""Longest part of an answer that is sent at once."""
STRICT = b"x-penstock-strict"
"""Header by which a request has its unknown fields refused."""


class CompletionsEndpoint:
    """Handler of both paths, and of what other APIs make of their requests (`serve`)."""

    def __init__(self, deps: GatewayDependencies, metrics: RequestMetrics, receipts: Receipts) -> None:
        self._deps = deps
        self._metrics = metrics
        self._receipts = receipts
        self._goodput = Goodput(deps.metrics, deps.targets, deps.models, deps.clock)
        self._arrivals = Arrivals(deps.admission)
        self._decoder = BodyDecoder(deps.clock)

    async def chat(self, exchange: Exchange) -> None:
        await self.serve(exchange, CHAT)

    async def complete(self, exchange: Exchange) -> None:
        await self.serve(exchange, COMPLETION)

    async def serve_line(self, exchange: Exchange, tenant: Tenant, path: str) -> None:
        """Answer a line of a batch, whose tenant is known, by the endpoint at `path`; raises what makes it fail. The
        exchange takes the usage."""
        assert exchange.take_usage is not None
        background = dataclasses.replace(tenant, share=tenant.share.for_lines())
        if path == CHAT_PATH:
            await self._serve_tenant(exchange, background, CHAT)
        else:
            await self._serve_tenant(exchange, background, COMPLETION)

    async def serve(self, exchange: Exchange, kind: EndpointKind[Request, AnswerFormat]) -> None:
        """Answer a request of that kind. Raises what is wrong with it."""
        try:
            await self._serve_tenant(exchange, await authenticate(self._deps.keys, exchange), kind)
        except BaseException as error:
            self._measure(exchange, None, error)
            raise

    async def _serve_tenant(
        self, exchange: Exchange, tenant: Tenant, kind: EndpointKind[Request, AnswerFormat]
    ) -> None:
        exchange.traced = spans.begin(self._deps.tracing, exchange, tenant.id)
        self._arrivals.begin(tenant, exchange.request_id)
        try:
            await self._answer(exchange, tenant, kind)
        except RequestError:
            await self._arrivals.charge(tenant, exchange.request_id)
            raise
        except ClientGone:
            with contextlib.suppress(RateLimited):
                await self._arrivals.charge(tenant, exchange.request_id)
            raise
        finally:
            self._arrivals.end(tenant, exchange.request_id)

    async def _answer(self, exchange: Exchange, tenant: Tenant, kind: EndpointKind[Request, AnswerFormat]) -> None:
        deps = self._deps
        request = await self._decode(exchange, tenant, kind)
        model = await deps.find_model(tenant, request.model)
        exchange.model, exchange.adapter = model.label, model.adapter_name
        with exchange.client.watched(deps.config.request_timeout_s):
            planned = await plan(deps, exchange, tenant, model, kind, request)
            del request  # the answer takes minutes, and this may be megabytes
            if not planned.holds_request:
                exchange.client.drop_body()
            await self._admit(exchange, tenant, planned.prompts)
            if planned.is_stream:
                await self._run_stream(exchange, tenant, planned)
            else:
                await self._run_whole(exchange, tenant, planned)

    async def _decode(self, exchange: Exchange, tenant: Tenant, kind: EndpointKind[Request, AnswerFormat]) -> Request:
        """Raises InvalidRequest, RateLimited, and what reading the body raises."""
        config = self._deps.config
        body = await exchange.client.body(exchange.content_length, config.max_body_bytes, config.body_timeout_s)
        self._arrivals.check(tenant)  # others may have used the limit up meanwhile
        ignored: list[IgnoredField] = []
        request = await self._decoder.decode(tenant.id, body, lambda body: kind.decode(body, ignored))
        check(request)
        note_ignored(exchange, ignored, config, self._metrics)
        return request

    async def _admit(self, exchange: Exchange, tenant: Tenant, prompts: Sequence[Prompt]) -> None:
        """Reserve what the request may use, where its tenant has limits; `_settle` must follow."""
        if tenant.limits is not None:
            assert exchange.model is not None
            tariff = self._deps.admission.find_tariff(exchange.model, exchange.adapter)
            exchange.limit_headers = await self._deps.admission.admit(
                tenant.id, tenant.limits, exchange.request_id, prompts, tariff
            )
            self._arrivals.end(tenant, exchange.request_id)

    async def _run_stream(self, exchange: Exchange, tenant: Tenant, planned: RequestPlan) -> None:
        events = planned.new_events(exchange)
        heartbeats = Heartbeats(exchange, events.open, self._deps.first_heartbeat_s)
        completion = Completion(planned.prompts, self._deps.dispatcher, self._deps.clock, events, heartbeats)
        self._watch(exchange, tenant, completion)
        try:
            async with heartbeats:
                await completion.run()
            await events.end(completion.usage())
        finally:
            self._settle(exchange, tenant, completion)

    async def _run_whole(self, exchange: Exchange, tenant: Tenant, planned: RequestPlan) -> None:
        collector = Collector()
        completion = Completion(planned.prompts, self._deps.dispatcher, self._deps.clock, collector)
        self._watch(exchange, tenant, completion)
        try:
            await completion.run()
        finally:
            self._settle(exchange, tenant, completion)
        receipt = planned.prompts[0][0].receipt
        assert receipt is not None
        planned.answer_format.set_answering_model(receipt)
        choices = collector.choices()
        if planned.num_returned < planned.num_generated:
            choices = select_best(choices, planned.num_generated, planned.num_returned)
        parts = await in_turns(planned.answer_format.whole(choices, completion.usage()), self._deps.clock)
        await _send(exchange, parts, receipt_headers(receipt))

    def _watch(self, exchange: Exchange, tenant: Tenant, completion: Completion) -> None:
        """Have usage written while the answer runs; `_settle` must follow."""
        assert exchange.model is not None
        if exchange.take_usage is None:
            self._deps.admission.watch(tenant.id, exchange.request_id, exchange.model, completion, exchange.adapter)

    def _settle(self, exchange: Exchange, tenant: Tenant, completion: Completion) -> None:
        """Account for what the request has used, however it ended: limits and usage, metrics, trace, receipts."""
        assert exchange.model is not None
        error = sys.exception()
        if error is not None and not has_left(error):
            completion.drop_held()
        if exchange.take_usage is None:
            used = self._deps.admission.settle(
                tenant.id, tenant.limits, exchange.request_id, exchange.model, completion, exchange.adapter
            )
        else:
            used = self._deps.admission.count(exchange.model, exchange.adapter, completion)
            used = exchange.take_usage(exchange.model, exchange.adapter, used)
            self._deps.admission.settle_limits(tenant.id, tenant.limits, exchange.request_id, used)
            self._deps.admission.follow_cost(tenant.id, exchange.model, exchange.adapter, completion, used)
        target = self._measure(exchange, completion, error)
        began_s = exchange.began_s if exchange.take_usage is None else None
        self._metrics.for_model(exchange.model).record_completion(completion, began_s)
        spans.record_completion(exchange, completion)
        tariff = self._deps.admission.find_tariff(exchange.model, exchange.adapter)
        charge = None if tariff == FREE else Charge(used.charge_nano, tariff)
        self._receipts.keep(
            exchange.request_id, tenant.id, exchange.model, int(self._deps.now()), completion, target, charge
        )

    def _measure(
        self, exchange: Exchange, completion: Completion | None, error: BaseException | None
    ) -> TargetReceipt | None:
        """Count whether a request met its targets, at its first call for it. error: what ended it. Returns None for one
        that is not measured: a line of a batch, for which nobody waits, or one whose tenant is not known."""
        service_class, exchange.service_class = exchange.service_class, None
        if exchange.take_usage is not None or exchange.tenant is None or service_class is None:
            return None
        asked = MeasuredRequest(exchange.tenant, service_class, exchange.model, exchange.began_s)
        return self._goodput.record(asked, completion, error, is_admitted=completion is not None)


def note_ignored(
    exchange: Exchange, ignored: Sequence[IgnoredField], config: GatewayConfig, metrics: RequestMetrics
) -> None:
    """Count the fields of a request that change nothing, and name them in the response. Raises InvalidRequest for an
    unknown one where the gateway or the request wants that."""
    if not ignored:
        return
    if config.strict or exchange.header(STRICT) == b"1":
        check_strictly(ignored)
    metrics.record_ignored(ignored)
    named = header_value(ignored)
    if named:
        exchange.field_headers = ((b"x-penstock-ignored-fields", named),)


async def _send(exchange: Exchange, parts: Sequence[bytes], headers: Headers) -> None:
    """Answer with JSON in parts, a long one piece by piece as the client reads it."""
    num_bytes = sum(map(len, parts))
    if num_bytes <= SENT_BYTES:
        await exchange.answer(b"".join(parts), headers=headers)
        return
    await exchange.start(200, JSON, ((b"content-length", b"%d" % num_bytes), *headers))
    held = bytearray()
    for part in parts:
        held += part
        if len(held) >= SENT_BYTES:
            await exchange.write(bytes(held))
            held.clear()
    await exchange.write(bytes(held), is_last=True)
