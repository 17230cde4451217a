"""The gateway's HTTP surface as a plain ASGI app: paths to handlers, errors to responses, and the count of both.

Not the composition of the gateway, and no framework: two routes take all the traffic, and what a framework does per
request would cost more than they do. Invariant: every request gets exactly one response (or a closed stream), whatever
a handler raises.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.base.errors import PenstockError
from penstock.router.api.adapters import ADAPTERS_PATH, AdapterPages
from penstock.router.api.batches import BATCHES_PATH, CANCEL, BatchPages
from penstock.router.api.files import CONTENT, FILES_PATH, FilePages
from penstock.router.api.pages import MODELS_PATH, RECEIPTS_PATH, STATUS_PATH, Pages
from penstock.router.api.tokenization import DETOKENIZE_PATH, TOKENIZE_PATH, TokenizationPages
from penstock.router.api.web_pages import web_pages
from penstock.router.completions import spans
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.completions.endpoint import CHAT_PATH, CompletionsEndpoint
from penstock.router.completions.receipts import Receipts
from penstock.router.completions.request_metrics import CLIENT_GONE, RequestMetrics
from penstock.router.dialects.endpoints import (
    COUNT_TOKENS_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    DialectEndpoints,
    adopt_anthropic,
)
from penstock.router.transport.budgets import make_budgets
from penstock.router.transport.client import ClientGone
from penstock.router.transport.cors import Cors, preflight_headers
from penstock.router.transport.drain import READINESS_PATHS
from penstock.router.transport.exchange import Exchange
from penstock.router.transport.failures import Failures
from penstock.wire.errors import INTERNAL, MethodNotAllowed, NotFound, Overloaded, http_error

METRICS_PATH = "/metrics"
ADMIN_PATHS = frozenset({METRICS_PATH, "/healthz", "/readyz"})
"""All paths that `gateway.admin_port` answers."""

COUNTED_PATHS = ("/v1/", TOKENIZE_PATH, DETOKENIZE_PATH)
"""Beginnings of the paths whose requests are counted."""

Handler = Callable[[Exchange], Awaitable[None]]

log = logging.getLogger(__name__)


def make_app(deps: GatewayDependencies) -> ASGIApp:
    """An app that serves /v1/chat/completions, /v1/completions, /v1/messages, /v1/messages/count_tokens,
    /v1/responses, /v1/embeddings (404), /tokenize, /detokenize, /v1/models, /v1/adapters, /v1/files, /v1/batches,
    /v1/receipts, /v1/usage, /v1/status, /version, /healthz, /readyz, /health, /ping, /metrics, /openapi.json, and to
    readers / and /docs; with `gateway.admin_port` what ADMIN_PATHS names there, and /metrics nowhere else. Raises
    OSError if a page's file is not there."""
    return _App(deps)


class _App:
    def __init__(self, deps: GatewayDependencies) -> None:
        self._clock = deps.clock
        self._random = deps.random
        config = deps.config
        self._admin_port = config.admin_port
        self._cors = Cors(config.cors_origins) if config.cors_origins else None
        self._budgets = make_budgets(config.max_ongoing_requests, config.max_body_bytes, config.max_held_body_bytes)
        self._failures = Failures(deps.clock)
        self._request_metrics = RequestMetrics(deps.metrics, deps.models)
        receipts = Receipts(deps.config.max_receipts)
        completions = CompletionsEndpoint(deps, self._request_metrics, receipts)
        dialects = DialectEndpoints(completions)
        pages, adapters = Pages(deps, receipts), AdapterPages(deps)
        tokenization = TokenizationPages(deps, self._request_metrics)
        files, batches = FilePages(deps), BatchPages(deps)
        self._routes: Mapping[str, Mapping[str, Handler]] = {
            CHAT_PATH: {"POST": completions.chat},
            "/v1/completions": {"POST": completions.complete},
            MESSAGES_PATH: {"POST": dialects.messages},
            COUNT_TOKENS_PATH: {"POST": tokenization.count_tokens},
            RESPONSES_PATH: {"POST": dialects.responses},
            "/v1/embeddings": {"POST": pages.embeddings},
            TOKENIZE_PATH: {"POST": tokenization.tokenize},
            DETOKENIZE_PATH: {"POST": tokenization.detokenize},
            MODELS_PATH: _page(pages.models),
            ADAPTERS_PATH: {**_page(adapters.list), "POST": adapters.create},
            FILES_PATH: {**_page(files.list), "POST": files.create},
            BATCHES_PATH: {**_page(batches.list), "POST": batches.create},
            "/v1/usage": _page(pages.usage),
            STATUS_PATH: _page(pages.status),
            "/healthz": _page(pages.health),
            **dict.fromkeys(READINESS_PATHS, _page(pages.readiness)),
            "/version": _page(pages.version),
            METRICS_PATH: _page(pages.metrics),
            "/openapi.json": _page(pages.openapi),
            **{path: _page(handler) for path, handler in web_pages().items()},
        }
        self._adapter_page: Mapping[str, Handler] = {**_page(adapters.retrieve), "DELETE": adapters.delete}
        self._file_page: Mapping[str, Handler] = {**_page(files.retrieve), "DELETE": files.delete}
        self._batch_page = _page(batches.retrieve)
        # an id may be anything, also such as ends like that: then there is no such file or batch
        self._content_page: Mapping[str, Handler] = {**_page(files.content), "DELETE": files.delete}
        self._cancel_page: Mapping[str, Handler] = {**_page(batches.retrieve), "POST": batches.cancel}
        self._model_page, self._receipt_page = _page(pages.model), _page(pages.receipt)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request_id = f"{self._random.getrandbits(96):024x}"
            exchange = Exchange(scope, receive, send, request_id, self._clock(), self._budgets)
            await self._http(exchange)
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        else:
            await send({"type": "websocket.close"})

    async def _http(self, exchange: Exchange) -> None:
        if exchange.path in (MESSAGES_PATH, COUNT_TOKENS_PATH):
            adopt_anthropic(exchange)
        if self._cors is not None and exchange.path not in ADMIN_PATHS:
            exchange.cors_headers = self._cors.headers(exchange.header(b"origin"))
        try:
            await self._respond(exchange)
        finally:
            exchange.release()
            if exchange.path.startswith(COUNTED_PATHS):
                self._count(exchange)
            if exchange.traced.trace is not None:
                spans.end(exchange, exchange.traced.trace)

    async def _respond(self, exchange: Exchange) -> None:
        try:
            await self._dispatch(exchange)
        except ClientGone:
            self._request_metrics.for_model(exchange.model).record_disconnect()
            if exchange.connection is not None:
                exchange.connection.abort()  # closing would wait for a peer that may never read
        except PenstockError as error:
            status = http_error(error).status
            if status >= INTERNAL.status and not isinstance(error, Overloaded):
                log.warning("request failed", extra={"request_id": exchange.request_id, "error": type(error).__name__})
            if exchange.tenant is None and status < INTERNAL.status:
                await self._slow_down(exchange)
            await _fail(exchange, error)
        except Exception as error:  # the top: one request's failure must not become the server's
            log.error("request failed", extra={"request_id": exchange.request_id}, exc_info=error)
            await _fail(exchange, error)

    async def _dispatch(self, exchange: Exchange) -> None:
        handlers = self._find(exchange.path) if self._is_offered(exchange) else None
        if handlers is None:
            raise NotFound(f"There is nothing at {exchange.path[:200]}.")
        handler = handlers.get(exchange.method)
        if handler is None and _is_preflight(exchange):
            asked = exchange.header(b"access-control-request-headers")
            await exchange.answer(b"", content_type=b"text/plain", headers=preflight_headers(list(handlers), asked))
            return
        if handler is None:
            error = MethodNotAllowed(f"{exchange.path} takes {' or '.join(handlers)}, not {exchange.method[:20]}.")
            await self._slow_down(exchange)
            await exchange.fail(error, [(b"allow", ", ".join(handlers).encode())])
            return
        try:
            await handler(exchange)
        except BaseException as error:
            exchange.failure = type(error).__name__
            raise

    def _is_offered(self, exchange: Exchange) -> bool:
        """Whether the port that the request came to has its path at all."""
        if self._admin_port is None:
            return True
        return exchange.path in ADMIN_PATHS if exchange.port == self._admin_port else exchange.path != METRICS_PATH

    def _find(self, path: str) -> Mapping[str, Handler] | None:
        """Handlers of a path, by method. Returns None if there is nothing."""
        handlers = self._routes.get(path)
        if handlers is None and path.startswith(f"{MODELS_PATH}/"):
            return self._model_page
        if handlers is None and path.startswith(f"{ADAPTERS_PATH}/"):
            return self._adapter_page
        if handlers is None and path.startswith(f"{FILES_PATH}/"):
            return self._content_page if path.endswith(CONTENT) else self._file_page
        if handlers is None and path.startswith(f"{BATCHES_PATH}/"):
            return self._cancel_page if path.endswith(CANCEL) else self._batch_page
        if handlers is None and path.startswith(RECEIPTS_PATH):
            return self._receipt_page
        return handlers

    async def _slow_down(self, exchange: Exchange) -> None:
        """Wait before a request that has shown no valid key is refused, if there were many such lately."""
        connection = exchange.connection
        if connection is not None:
            delay_s = self._failures.count(connection.address(exchange.all_headers(b"x-forwarded-for")))
            if delay_s > 0:
                await connection.hold(delay_s)

    def _count(self, exchange: Exchange) -> None:
        code = CLIENT_GONE if exchange.status is None else str(exchange.status)
        self._request_metrics.for_model(exchange.model).record_response(code, self._clock() - exchange.began_s)


def _page(handler: Handler) -> Mapping[str, Handler]:
    return {"GET": handler, "HEAD": handler}


def _is_preflight(exchange: Exchange) -> bool:
    """Whether a browser asks on behalf of a page whether it may call; only of origins that are allowed."""
    if exchange.method != "OPTIONS" or not exchange.cors_headers:
        return False
    return exchange.header(b"access-control-request-method") is not None


async def _fail(exchange: Exchange, error: BaseException) -> None:
    try:
        await exchange.fail(error)
    except ClientGone:
        return  # no client is left to read it


async def _lifespan(receive: Receive, send: Send) -> None:
    """ASGI's lifespan protocol. Nothing is opened or closed here: what the app uses belongs to whoever made it."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
