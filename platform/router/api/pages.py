"""The small pages beside the two completion endpoints: models, usage, receipts, status, health, readiness, version,
metrics, the API's description."""

import math
from collections.abc import Mapping
from functools import cached_property, partial
from importlib.metadata import version

import msgspec
from msgspec import UNSET

from penstock.base.metrics import CONTENT_TYPE
from penstock.base.pace import Pace
from penstock.router.api.listing import read_parameters
from penstock.router.api.openapi import document
from penstock.router.api.reads import KeptPages, admit_read
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.completions.receipts import Receipts
from penstock.router.models.served_model import ServedModel
from penstock.router.transport.exchange import Exchange
from penstock.tenancy.charges import month_end, month_name
from penstock.tenancy.tenants import Tenant
from penstock.tenancy.usage import UsageRow, last_days
from penstock.tenancy.usage_csv import CONTENT_TYPE as CSV
from penstock.tenancy.usage_csv import usage_csv
from penstock.wire.accounts import DayUsage, TenantBudget, TenantUsage
from penstock.wire.errors import InvalidRequest, NotFound
from penstock.wire.money import shown, to_nano
from penstock.wire.openai import Health, Model, ModelList, Version
from penstock.wire.status import ModelStatus, Status

MODELS_PATH = "/v1/models"
RECEIPTS_PATH = "/v1/receipts/"
STATUS_PATH = "/v1/status"
USAGE_DAYS = 31
METRICS_RATE, METRICS_BURST = 10.0, 20.0
"""Renderings of /metrics a second, and at once, for all who ask: each holds up the event loop for milliseconds, and
nobody needs a key for it. Beyond them the latest one is sent again."""


class Pages:
    """Handlers of the pages that only read."""

    def __init__(self, deps: GatewayDependencies, receipts: Receipts) -> None:
        self._deps = deps
        self._receipts = receipts
        self._usages = KeptPages(deps.clock)
        self._usage_tables = KeptPages(deps.clock)
        self._metrics_pace = Pace(METRICS_RATE, METRICS_BURST)
        self._metrics_page = b""
        self._could_serve_s = -math.inf
        """Time of the last readiness check that found a replica or a provider; monotonic, seconds."""

    async def models(self, exchange: Exchange) -> None:
        models = await self._find_models(await admit_read(self._deps, exchange))
        await _send(exchange, ModelList(data=[_model(model) for model in models]))

    async def status(self, exchange: Exchange) -> None:
        """What runs, of what the tenant may use."""
        models = await self._find_models(await admit_read(self._deps, exchange))
        connected = {row.pool: row.num_connected for row in self._deps.replicas()}
        await _send(
            exchange,
            Status(
                version=version("penstock"),
                is_ready=self._deps.can_serve(),
                models=[_model_status(model, connected) for model in models],
            ),
        )

    async def _find_models(self, tenant: Tenant) -> list[ServedModel]:
        """All models that the tenant may use, its adapters included."""
        models = list(self._deps.models.values())
        if self._deps.adapters is not None:
            models += await self._deps.adapters.models.all(tenant.id)
        return [model for model in models if tenant.may_use(model.label)]

    async def model(self, exchange: Exchange) -> None:
        """One model; the rest of the path is its name, which may have a slash in it."""
        tenant = await admit_read(self._deps, exchange)
        model = await self._deps.find_model(tenant, exchange.path.removeprefix(f"{MODELS_PATH}/"))
        await _send(exchange, _model(model))

    async def usage(self, exchange: Exchange) -> None:
        """The tenant's own usage in the last USAGE_DAYS days, today included, as it was up to a second ago."""
        tenant = await admit_read(self._deps, exchange)
        wanted = read_parameters(exchange.query).get("format", "json")
        if wanted not in ("json", "csv"):
            raise InvalidRequest("'format' must be 'json' or 'csv'.", param="format")
        if wanted == "csv":
            page = await self._usage_tables.get(tenant.id, partial(self._read_usage_csv, tenant.id))
            await exchange.answer(page, content_type=CSV)
        else:
            await exchange.answer(await self._usages.get(tenant.id, partial(self._read_usage, tenant)))

    async def _read_usage(self, tenant: Tenant) -> bytes:
        now = self._deps.now()
        rows = await self._usage_rows(tenant.id)
        budget = None if tenant.limits is None else tenant.limits.budget
        found = None if budget is None else await self._read_budget(tenant.id, budget, now)
        return msgspec.json.encode(TenantUsage(tenant=tenant.id, data=[_day_usage(row) for row in rows], budget=found))

    async def _read_budget(self, tenant: str, budget: float, now: float) -> TenantBudget:
        month = month_name(now)
        spent_nano = await self._deps.admission.read_spent(tenant, month)
        left_nano = max(0, to_nano(budget) - spent_nano)
        return TenantBudget(
            month=month,
            amount=budget,
            spent=shown(spent_nano),
            left=shown(left_nano),
            resets_at=int(month_end(now)),
        )

    async def _read_usage_csv(self, tenant: str) -> bytes:
        return usage_csv({tenant: await self._usage_rows(tenant)}).encode()

    async def _usage_rows(self, tenant: str) -> list[UsageRow]:
        return await self._deps.admission.read_usage(tenant, last_days(USAGE_DAYS, self._deps.now()))

    async def receipt(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        await _send(exchange, self._receipts.find(exchange.path.removeprefix(RECEIPTS_PATH), tenant.id))

    async def embeddings(self, exchange: Exchange) -> None:
        """A sentence for those whose client asks for embeddings: the engines here make texts."""
        await admit_read(self._deps, exchange)
        raise NotFound("No pool serves an embedding model; /v1/models lists what is served.")

    async def health(self, exchange: Exchange) -> None:
        """Whether the process answers, whatever its replicas do."""
        await _send(exchange, Health(status="ok"))

    async def readiness(self, exchange: Exchange) -> None:
        """Whether requests can be served, or could be so lately that one that comes now may wait in the queue: while
        the only replica is replaced, a load balancer that sends requests nowhere would lose those that only have to
        wait."""
        now = self._deps.clock()
        if self._deps.can_serve():
            self._could_serve_s = now
        if now - self._could_serve_s <= self._deps.config.queue_timeout_s:
            await _send(exchange, Health(status="ready"))
        else:
            await _send(exchange, Health(status="no replica is connected"), status=503)

    async def version(self, exchange: Exchange) -> None:
        await _send(exchange, Version(version=version("penstock")))

    async def metrics(self, exchange: Exchange) -> None:
        if self._metrics_pace.take("", self._deps.clock()):
            self._metrics_page = self._render_metrics()
        await exchange.answer(self._metrics_page, content_type=CONTENT_TYPE.encode())

    def _render_metrics(self) -> bytes:
        self._deps.refresh()
        for row in self._deps.replicas():
            self._deps.metrics.replicas.labels(row.pool, row.tier).set(row.num_connected)
        return self._deps.metrics.render()

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


def _day_usage(row: UsageRow) -> DayUsage:
    used = row.used
    return DayUsage(
        day=row.day,
        model=row.model,
        adapter=row.adapter or None,
        requests=used.requests,
        prompt_tokens=used.prompt_tokens,
        cached_tokens=used.cached_tokens,
        completion_tokens=used.completion_tokens,
        cost=shown(used.cost_nano),
        charge=shown(used.charge_nano),
    )


def _model_status(model: ServedModel, connected: Mapping[str, int]) -> ModelStatus:
    """connected: replicas by pool."""
    pools = {*model.pools, *(pool for other in model.others for pool in other.pools)}
    num_replicas = sum(connected.get(pool, 0) for pool in pools)
    return ModelStatus(id=model.name, max_model_len=model.max_model_len(), replicas=num_replicas)


async def _send(exchange: Exchange, page: msgspec.Struct, status: int = 200) -> None:
    await exchange.answer(msgspec.json.encode(page), status)
