"""The small pages beside the two hot routes: models, health, readiness, metrics, the API's description."""

import math
from functools import cached_property

import msgspec
from msgspec import UNSET

from penstock.base.metrics import CONTENT_TYPE
from penstock.router.api.openapi import document
from penstock.router.completions.admission import check_model
from penstock.router.completions.dependencies import GatewayDeps
from penstock.router.completions.endpoint import authenticate, find_model
from penstock.router.completions.receipts import Receipts
from penstock.router.models.served_model import ServedModel
from penstock.router.transport.exchange import Exchange
from penstock.tenancy.usage import last_days
from penstock.wire.openai import DayUsage, Health, Model, ModelList, TenantUsage

MODELS_PATH = "/v1/models"
RECEIPTS_PATH = "/v1/receipts/"
USAGE_DAYS = 31


class Pages:
    def __init__(self, deps: GatewayDeps, receipts: Receipts) -> None:
        self._deps = deps
        self._receipts = receipts
        self._served_at = -math.inf
        """When the gateway was last asked whether it is ready and had somebody to serve requests; by the monotonic
        clock."""

    async def models(self, exchange: Exchange) -> None:
        tenant = await authenticate(self._deps, exchange)
        models = list(self._deps.models.values())
        if self._deps.adapters is not None:
            models += await self._deps.adapters.models.all(tenant.id)
        await _send(exchange, ModelList(data=[_model(model) for model in models if tenant.may_use(model.label)]))

    async def model(self, exchange: Exchange) -> None:
        """The rest of the path is the name: one from the hub has a slash in it."""
        tenant = await authenticate(self._deps, exchange)
        model = await find_model(self._deps, tenant, exchange.path.removeprefix(f"{MODELS_PATH}/"))
        check_model(tenant, model.label)
        await _send(exchange, _model(model))

    async def usage(self, exchange: Exchange) -> None:
        """The tenant's own, of the last days."""
        tenant = await authenticate(self._deps, exchange)
        rows = await self._deps.admission.usage(tenant.id, last_days(USAGE_DAYS, self._deps.now()))
        data = [
            DayUsage(day=row.day, model=row.model, adapter=row.adapter or None, **row.used._asdict()) for row in rows
        ]
        await _send(exchange, TenantUsage(tenant=tenant.id, data=data))

    async def receipt(self, exchange: Exchange) -> None:
        tenant = await authenticate(self._deps, exchange)
        await _send(exchange, self._receipts.find(exchange.path.removeprefix(RECEIPTS_PATH), tenant.id))

    async def health(self, exchange: Exchange) -> None:
        """The process answers; nothing is said of replicas."""
        await _send(exchange, Health(status="ok"))

    async def readiness(self, exchange: Exchange) -> None:
        """Also for as long as a request may wait in the queue since there was somebody to serve it: while replicas are
        replaced, or one that was alone is, a load balancer that sends requests nowhere would lose those that only have
        to wait."""
        now = self._deps.clock()
        if self._deps.can_serve():
            self._served_at = now
        if now - self._served_at <= self._deps.config.queue_timeout_s:
            await _send(exchange, Health(status="ready"))
        else:
            await _send(exchange, Health(status="no replica is connected"), status=503)

    async def metrics(self, exchange: Exchange) -> None:
        self._deps.refresh()
        for row in self._deps.replicas():
            self._deps.metrics.replicas.labels(row.pool, row.tier).set(row.num_connected)
        await exchange.answer(self._deps.metrics.render(), content_type=CONTENT_TYPE.encode())

    async def openapi(self, exchange: Exchange) -> None:
        await exchange.answer(self._document)

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(document())


def _model(model: ServedModel) -> Model:
    base = UNSET if model.base is None else model.base
    return Model(
        id=model.name,
        created=model.created,
        owned_by=model.owned_by,
        max_model_len=model.max_model_len(),
        exact=model.exact,
        root=base,
        parent=base,
    )


async def _send(exchange: Exchange, page: msgspec.Struct, status: int = 200) -> None:
    await exchange.answer(msgspec.json.encode(page), status)
