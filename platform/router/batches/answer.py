"""One line of a batch, answered by the endpoint that answers requests, as if it had come over HTTP.

Not whether a line is run again (`run`). The exchange has no socket: its body is the line's, and what would be sent is
collected. Invariants: whatever the endpoint raises, but for a cancellation, there is an answer; what has been used is
noted however it ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from starlette.types import Message, Scope

from penstock.base.errors import PenstockError
from penstock.router.batches.batch_registry import LineUsage
from penstock.router.batches.lines import check_not_streamed
from penstock.router.transport.client import ClientGone
from penstock.router.transport.exchange import Exchange
from penstock.tenancy.tenants import Tenant
from penstock.tenancy.usage import Used
from penstock.wire.errors import DeadlineExceeded

Serve = Callable[[Exchange, Tenant, str], Awaitable[None]]
"""A function that answers an exchange for a tenant, by the endpoint of a path; it raises what requests fail with."""

log = logging.getLogger("penstock.batches")


class Answer(NamedTuple):
    """What an endpoint answered."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None
    """Time after which another try makes sense, where the error says so."""


class TriedUsage:
    """What the tries of one line have used together: one request, and the tokens of all. is_given_up: whether the line
    was left to another gateway, which runs it again: what this one has computed of it is not charged."""

    def __init__(self, is_given_up: Callable[[], bool] = lambda: False) -> None:
        self._is_given_up = is_given_up
        self._usage: LineUsage | None = None

    def add(self, model: str, adapter: str, used: Used) -> Used:
        """Add what one try has used; returns it with what it is charged, which is what its tenant's budget is settled
        with."""
        if self._is_given_up():
            used = used._replace(charge_nano=0)
        if any(used):
            before = Used() if self._usage is None else self._usage.used
            self._usage = LineUsage(model, adapter, used.plus(before)._replace(requests=1))
        return used

    def take(self) -> LineUsage | None:
        """All that was used, which is from now on the caller's to charge. None: nothing, or it was taken before."""
        usage, self._usage = self._usage, None
        return usage


class _Collector:
    """An exchange's two ends, without a socket."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.sent = bytearray()

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # nobody hangs up
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        self.sent += message.get("body", b"")


async def answer(
    serve: Serve,
    tenant: Tenant,
    path: str,
    body: bytes,
    request_id: str,
    clock: Callable[[], float],
    usage: TriedUsage,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> Answer:
    """Have a request answered. path: of the endpoint. clock: monotonic, seconds. usage: gets what it uses. headers:
    those that it has from its batch."""
    ends = _Collector(body)
    scope: Scope = {"method": "POST", "path": path, "headers": [(b"content-type", b"application/json"), *headers]}
    exchange = Exchange(scope, ends.receive, ends.send, request_id, clock())
    exchange.take_usage = usage.add
    retry_after_s = None
    try:
        check_not_streamed(body)
        del body  # whoever reads it from the exchange holds it as long as it is needed
        await serve(exchange, tenant, path)
    except ClientGone:  # the time of the request, and a grace, are over
        await exchange.fail(DeadlineExceeded("the request's deadline passed"))
    except PenstockError as error:
        retry_after_s = error.retry_after_s
        await exchange.fail(error)
    except Exception as error:  # one line's failure must not become the batch's
        log.error("line failed", extra={"request_id": request_id}, exc_info=error)
        await exchange.fail(error)
    finally:
        exchange.release()
    assert exchange.status is not None
    return Answer(exchange.status, request_id, bytes(ends.sent), retry_after_s)
