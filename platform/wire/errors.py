"""The exceptions of a request, and the one table that maps them to HTTP status and OpenAI error JSON.

`penstock.base.errors` defines the root of the tree and the error of a configuration; this module defines the rest:

PenstockError              the root (base.errors)
 |- ConfigError            a configuration that can't work; fails at start (base.errors)
 |- RequestError           the caller's mistake
 |   |- InvalidRequest     malformed JSON, badly typed or impossible parameter
 |   |- ContextTooLong     prompt + max_tokens exceed the model's context
 |   |- BodyTooLarge       request body above the configured bound
 |   |- BodyTooSlow        request body not there in time
 |   |- HeadTooLarge       request line and headers beyond the bound
 |   |- Unauthenticated    missing, malformed or unknown API key
 |   |- Forbidden          a key without the right to what it asks for
 |   |- ModelNotFound      no pool serves that model to this tenant
 |   |- NotFound           no such path or object
 |   `- MethodNotAllowed   the path exists, the method does not
 |- RateLimited            a tenant's limit; carries Retry-After
 |   |- BudgetSpent        the tenant's budget of the month
 |   `- CapReached         what providers may cost in the month, all tenants together
 |- Overloaded             the queue is full or no replica is left in time; carries Retry-After
 |   `- NoPlace            no place that a request may go to can take it now
 |- DeadlineExceeded       the request's own deadline passed
 |- ReplicaLost            the replica died and no other could go on
 |- SourceFailed           a server that the request names did not deliver
 `- EngineFault            the engine failed on this request

Any other exception is a 500 without detail: its text is for the log, not for the caller.
"""

from typing import Any, NamedTuple

import msgspec

from penstock.base.errors import PenstockError


class RequestError(PenstockError):
    """The caller's mistake: repeating the same request can't succeed."""


class InvalidRequest(RequestError):
    """Malformed JSON, a badly typed parameter, or values that exclude each other."""


class ContextTooLong(RequestError):
    """Prompt and requested output together exceed the model's context."""


class BodyTooLarge(RequestError):
    """The body exceeds the gateway's bound."""


class BodyTooSlow(RequestError):
    """The body did not arrive within the gateway's bound."""


class HeadTooLarge(RequestError):
    """The request line and the headers exceed the gateway's bounds."""


class Unauthenticated(RequestError):
    """No key, or one that is not known."""


class Forbidden(RequestError):
    """The key is known but may not do this."""


class ModelNotFound(RequestError):
    """No pool serves that model to this tenant."""


class NotFound(RequestError):
    """No such path or object."""


class MethodNotAllowed(RequestError):
    """The path exists, not with this method."""


class RateLimited(PenstockError):
    """A tenant's limit is reached. `headers`: headers of the response that describe the limits."""

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = headers


class BudgetSpent(RateLimited):
    """A tenant's budget is spent, or what is left of it is reserved by requests that run."""


class CapReached(RateLimited):
    """What providers may cost in a month is spent or reserved, and nobody else may answer."""


class Overloaded(PenstockError):
    """The queue is full, or no replica took the request in time."""


class NoPlace(Overloaded):
    """No place that a request may go to takes anything now, and it is not to wait. `reason`: the first one's obstacle,
    a word such as breaker_open."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, retry_after_s=1.0)
        self.reason = reason


class DeadlineExceeded(PenstockError):
    """The request's own deadline passed before it was finished."""


class ReplicaLost(PenstockError):
    """The serving replica died and no other could continue."""


class SourceFailed(PenstockError):
    """A server outside that the request names was not reached, or did not deliver what it has."""


class EngineFault(PenstockError):
    """The engine failed on this request."""


class HttpError(NamedTuple):
    """A row of the table."""

    status: int
    type: str
    code: str | None


HTTP_ERRORS: dict[type[PenstockError], HttpError] = {
    InvalidRequest: HttpError(400, "invalid_request_error", None),
    ContextTooLong: HttpError(400, "invalid_request_error", "context_length_exceeded"),
    BodyTooLarge: HttpError(413, "invalid_request_error", "body_too_large"),
    BodyTooSlow: HttpError(408, "invalid_request_error", "request_timeout"),
    HeadTooLarge: HttpError(431, "invalid_request_error", "head_too_large"),
    Unauthenticated: HttpError(401, "invalid_request_error", "invalid_api_key"),
    Forbidden: HttpError(403, "invalid_request_error", "permission_denied"),
    ModelNotFound: HttpError(404, "invalid_request_error", "model_not_found"),
    NotFound: HttpError(404, "invalid_request_error", "not_found"),
    MethodNotAllowed: HttpError(405, "invalid_request_error", "method_not_allowed"),
    RateLimited: HttpError(429, "rate_limit_error", "rate_limit_exceeded"),
    BudgetSpent: HttpError(429, "insufficient_quota", "insufficient_quota"),
    CapReached: HttpError(429, "insufficient_quota", "provider_cap_reached"),
    Overloaded: HttpError(503, "server_error", "overloaded"),
    NoPlace: HttpError(503, "server_error", "overloaded"),
    DeadlineExceeded: HttpError(504, "server_error", "deadline_exceeded"),
    ReplicaLost: HttpError(502, "server_error", "replica_lost"),
    SourceFailed: HttpError(502, "server_error", "source_failed"),
    EngineFault: HttpError(500, "server_error", "engine_fault"),
}
INTERNAL = HttpError(500, "server_error", "internal_error")


def http_error(error: BaseException) -> HttpError:
    """The table's row for an exception; anything outside the tree is INTERNAL."""
    return HTTP_ERRORS.get(type(error), INTERNAL) if isinstance(error, PenstockError) else INTERNAL


def error_body(error: BaseException) -> dict[str, Any]:
    """OpenAI's error JSON. Text of unexpected exceptions is withheld: it may hold what must not leave."""
    row = http_error(error)
    known = isinstance(error, PenstockError) and row is not INTERNAL
    message = error.message if known and isinstance(error, PenstockError) else "The server failed on this request."
    param = error.param if known and isinstance(error, PenstockError) else None
    return {"error": {"message": message, "type": row.type, "param": param, "code": row.code}}


def error_json(error: BaseException) -> bytes:
    return msgspec.json.encode(error_body(error))
