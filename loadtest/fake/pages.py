"""What the fake server answers besides completions: models, replicas over time, errors. Pure."""

from typing import NamedTuple

import msgspec

from penstock_loadtest.fake.answer import format_head
from penstock_loadtest.fake.behaviour import Behaviour
from penstock_loadtest.fake.truth import count_replicas

STATUS_LINES = {
    200: "200 OK",
    400: "400 Bad Request",
    401: "401 Unauthorized",
    404: "404 Not Found",
    429: "429 Too Many Requests",
    503: "503 Service Unavailable",
}
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "server_error"}


class Page(NamedTuple):
    """A whole response."""

    status: int
    body: bytes
    headers: str = ""
    content_type: str = "application/json"

    def encode(self) -> bytes:
        return format_head(STATUS_LINES[self.status], self.headers, len(self.body), self.content_type) + self.body


def error_page(status: int, message: str, code: str | None = None, headers: str = "") -> Page:
    error = {"message": message, "type": ERROR_TYPES.get(status, "invalid_request_error"), "param": None, "code": code}
    return Page(status, msgspec.json.encode({"error": error}), headers)


def missing_model_page(name: str) -> Page:
    return error_page(404, f"The model {name!r} does not exist.", "model_not_found")


def get_page(behaviour: Behaviour, path: str, since_s: float) -> Page | None:
    """The page of a path, `since_s` after the first request. Returns None if there is no such page."""
    if path in ("/healthz", "/readyz"):
        return Page(200, b'{"status":"ok"}')
    if path == "/metrics":
        return Page(200, _metrics(behaviour, since_s), content_type="text/plain; version=0.0.4; charset=utf-8")
    if path == "/v1/models" or path.startswith("/v1/models/"):
        return _models(behaviour, path.removeprefix("/v1/models").removeprefix("/"))
    return None


def _models(behaviour: Behaviour, name: str) -> Page:
    exact = {} if behaviour.exact is None else {"exact": behaviour.exact}
    models = {
        each: {"id": each, "object": "model", "created": 0, "owned_by": "fake", **exact} for each in behaviour.models
    }
    if not name:
        return Page(200, msgspec.json.encode({"object": "list", "data": list(models.values())}))
    return Page(200, msgspec.json.encode(models[name])) if name in models else missing_model_page(name)


def _metrics(behaviour: Behaviour, since_s: float) -> bytes:
    lines = ["# HELP penstock_replicas Replicas that serve.", "# TYPE penstock_replicas gauge"]
    for (pool, tier), count in count_replicas(behaviour.replicas, since_s).items():
        lines.append(f'penstock_replicas{{pool="{pool}",tier="{tier}"}} {count}')
    return ("\n".join(lines) + "\n").encode()
