"""One HTTP request and the answer to it, over ASGI.

Not what is answered. Invariants: a response starts once; after it has started as a stream, an error is an event of the
stream, and the stream ends with it.
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from penstock.base.tracing import NOT_TRACED
from penstock.router.transport.budgets import Budgets
from penstock.router.transport.client import Client, ClientGone
from penstock.router.transport.connection import EXTENSION, Connection
from penstock.router.transport.headers import Headers, error_headers
from penstock.tenancy.usage import Used
from penstock.wire.errors import error_json, http_error

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
EVENT, EVENT_END = b"data: ", b"\n\n"
PART = b"%x\r\n%b%b%b\r\n"
"""A part of a streamed answer as it is on the wire, of three pieces: their length and each of them."""


class ErrorForm(NamedTuple):
    """How errors are written: functions of the error and the request's id."""

    body: Callable[[BaseException, str], bytes]
    event: Callable[[BaseException, str], bytes]
    """The last event of a stream, as it is sent."""


OPENAI_ERRORS = ErrorForm(lambda error, _: error_json(error), lambda error, _: EVENT + error_json(error) + EVENT_END)


class Exchange:
    """One request, what is known of it, and the response. began_s: on the caller's monotonic clock, seconds."""

    __slots__ = (
        "_budgets",
        "_has_slot",
        "_num_writing",
        "_scope",
        "_send",
        "_suspended",
        "adapter",
        "began_s",
        "client",
        "connection",
        "cors_headers",
        "error_form",
        "failure",
        "field_headers",
        "headers",
        "is_stream",
        "is_writable",
        "key_header",
        "limit_headers",
        "method",
        "model",
        "path",
        "port",
        "query",
        "request_id",
        "request_id_header",
        "service_class",
        "status",
        "take_usage",
        "tenant",
        "traced",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        request_id: str,
        began_s: float,
        budgets: Budgets | None = None,
    ) -> None:
        """budgets: what the request's tenant may hold; None: whatever it wants."""
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        server = scope.get("server")
        self.port: int | None = None if server is None else server[1]
        """Port that the request came to; None: it is not known."""
        self.headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        extensions = scope.get("extensions")
        self.connection: Connection | None = None if extensions is None else extensions.get(EXTENSION)
        """Where the request came on; None behind another server than ours."""
        self.client = Client(receive)
        self.request_id = request_id
        self.began_s = began_s
        self.status: int | None = None
        """HTTP status of the response; None: nothing has been sent yet."""
        self.is_stream = False
        self.model: str | None = None
        """Label of the served model; None: it is not known yet."""
        self.adapter = ""
        """The tenant's own name of the adapter that the request names; empty: it names none."""
        self.failure: str | None = None
        """Class name of the error that ended the request; None: it has not failed."""
        self.limit_headers: Headers = ()
        """Headers about the tenant's limits; empty: it has none."""
        self.cors_headers: Headers = ()
        """Headers for the browser of a page of another origin; empty: there is none that may read the response."""
        self.field_headers: Headers = ()
        """Header about fields that were ignored; empty: none was."""
        self.error_form = OPENAI_ERRORS
        self.key_header: bytes | None = None
        """Another header than Authorization that may carry the key; None: there is none."""
        self.request_id_header = b"x-request-id"
        """Header in which the API's clients look for the id, beside x-penstock-request-id."""
        self.traced = NOT_TRACED
        self.tenant: str | None = None
        """Id of the tenant whose valid key the request has shown; None: it has not."""
        self.service_class: str | None = None
        """Class of that tenant; None: no key of it was found."""
        self.take_usage: Callable[[str, str, Used], Used] | None = None
        """A function that takes what the request has used, of a model and an adapter, once it is over, for somebody who
        counts it with the answer, and returns it with the charge that holds; None: it counts at once."""
        self._budgets = budgets
        self._has_slot = False
        self._scope = scope
        self._send = send
        self._num_writing = 0
        self._suspended: _Suspended | None = None
        self.is_writable = True
        """Whether `write_now` may be called: no write is under way, and the client reads."""

    def header(self, name: bytes) -> bytes | None:
        """name: in lower case."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def content_length(self) -> int | None:
        """Declared size of the body in bytes. None if it is not declared."""
        value = self.header(b"content-length")
        return int(value[:20]) if value is not None and value.isdigit() else None

    def all_headers(self, name: bytes) -> list[bytes]:
        """Values of every header of that name. name: in lower case."""
        return [value for key, value in self.headers if key == name]

    def identify(self, tenant: str) -> None:
        """Note whose valid key the request has shown. What it holds from now on, a post's place among the requests
        under way and its body, is of that tenant's share, until `release`. Raises RateLimited or Overloaded where there
        is no such place."""
        self.tenant = tenant
        if self.connection is not None:
            self.connection.prove(tenant)
        if self._budgets is not None and self.method == "POST":
            self._budgets.requests.take(tenant, 1)
            self._has_slot = True
            self.client.charge_to(self._budgets.body_bytes, tenant)

    def release(self) -> None:
        """Give back what the request holds: it is over."""
        self.client.drop_body()
        if self._has_slot:
            assert self._budgets is not None
            assert self.tenant is not None
            self._has_slot = False
            self._budgets.requests.give_back(self.tenant, 1)

    async def start(self, status: int, content_type: bytes, headers: Headers) -> None:
        self.status = status
        self.is_stream = content_type is EVENTS
        request_id = self.request_id.encode()
        common = [
            (b"content-type", content_type),
            (b"x-penstock-request-id", request_id),
            (self.request_id_header, request_id),
        ]
        if self.traced.traceparent is not None:
            common.append((b"traceparent", self.traced.traceparent.encode()))
        await self._send_message(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*common, *headers, *self.limit_headers, *self.field_headers, *self.cors_headers],
            }
        )

    async def write(self, data: bytes, is_last: bool = False) -> None:
        await self._send_message({"type": "http.response.body", "body": data, "more_body": not is_last})

    def write_now(self, data: bytes) -> None:
        """`write` without waiting. When the server makes it wait, because the client does not read, the next `write`
        waits for it first."""
        if self.connection is not None and self.connection.write_part(self._scope, data):
            return
        sending = self._send({"type": "http.response.body", "body": data, "more_body": True})
        steps = sending.__await__()
        try:
            waited = next(steps)
        except StopIteration:
            return
        except OSError:
            return  # the client is gone: the next `write` raises, or the watch of the connection ends the request
        self._suspended = _Suspended(steps, waited)
        self.is_writable = False

    def open_parts(self, on_close: Callable[[], None]) -> Callable[[bytes], None] | None:
        """A function that writes parts of a stream as `write_now` does, but framed already, as PART says, until
        `on_close` is called. Returns None where there is none now: `write_now` writes."""
        if self.connection is None or not self.is_writable:
            return None
        return self.connection.open_parts(self._scope, on_close)

    async def answer(self, body: bytes, status: int = 200, content_type: bytes = JSON, headers: Headers = ()) -> None:
        """A whole response."""
        await self.start(status, content_type, ((b"content-length", b"%d" % len(body)), *headers))
        await self.write(body, is_last=True)

    async def fail(self, error: BaseException, headers: Headers = ()) -> None:
        """The error in the API's form: the response, or the last event of the stream that is under way."""
        if self.status is None:
            body = self.error_form.body(error, self.request_id)
            await self.answer(body, http_error(error).status, headers=(*error_headers(error), *headers))
        elif self.is_stream:
            await self.write(self.error_form.event(error, self.request_id), is_last=True)

    async def _send_message(self, message: dict[str, object]) -> None:
        self._num_writing += 1
        self.is_writable = False
        try:
            if self._suspended is not None:
                suspended, self._suspended = self._suspended, None
                await suspended
            await self._send(message)
        except OSError:
            raise ClientGone from None
        finally:
            self._num_writing -= 1
            self.is_writable = not self._num_writing and self._suspended is None


class _Suspended:
    """The rest of an awaitable that was begun outside of a task, and what it waits for. Must be awaited in a task."""

    def __init__(self, steps: Generator[Any, Any, Any], waited: Any) -> None:
        self._steps = steps
        self._waited = waited

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._waited
        yield from self._steps
