"""The small pages beside the two hot routes: models, health, readiness, metrics, the API's description."""

from functools import cached_property

import msgspec

from penstock.base.metrics import CONTENT_TYPE
from penstock.router.exchange import Exchange
from penstock.router.gateway import GatewayDeps, ServedModel
from penstock.router.generate import authenticate, find_model
from penstock.router.openapi import document
from penstock.wire.openai import Health, Model, ModelList

MODELS_PATH = "/v1/models"


class Pages:
    def __init__(self, deps: GatewayDeps) -> None:
        self._deps = deps

    async def models(self, exchange: Exchange) -> None:
        await authenticate(self._deps, exchange)
        await _send(exchange, ModelList(data=[_model(model) for model in self._deps.models.values()]))

    async def model(self, exchange: Exchange) -> None:
        """The rest of the path is the name: one from the hub has a slash in it."""
        await authenticate(self._deps, exchange)
        await _send(exchange, _model(find_model(self._deps, exchange.path.removeprefix(f"{MODELS_PATH}/"))))

    async def health(self, exchange: Exchange) -> None:
        """The process answers; nothing is said of replicas."""
        await _send(exchange, Health(status="ok"))

    async def readiness(self, exchange: Exchange) -> None:
        if any(row.num_connected for row in self._deps.replicas()):
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
    return Model(id=model.name, created=model.created, owned_by=model.owned_by, max_model_len=model.max_model_len(), exact=model.exact)


async def _send(exchange: Exchange, page: msgspec.Struct, status: int = 200) -> None:
    await exchange.answer(msgspec.json.encode(page), status)
