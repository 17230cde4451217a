"""What requests that only read have in common: whose they are, that they count, and answers kept for a moment.

Not the pages themselves (`pages`, `adapters`).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from penstock.router.completions.admission import authenticate
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.transport.exchange import Exchange
from penstock.router.transport.stay import read_stay
from penstock.tenancy.tenants import Tenant

KEEP_S = 1.0
"""Age up to which a page is sent again, seconds."""
MAX_KEPT = 4096
"""Most pages that are kept at once."""


async def admit_read(deps: GatewayDependencies, exchange: Exchange) -> Tenant:
    """The tenant whose key the request carries; the request counts among the tenant's requests per minute, where those
    are limited. Raises Unauthenticated, RateLimited, InvalidRequest for a header that is wrong on any path, or
    Overloaded when keys or limits can't be checked."""
    tenant = await authenticate(deps.keys, exchange)
    if tenant.limits is not None:
        exchange.limit_headers = await deps.admission.charge(tenant.id, tenant.limits, exchange.request_id)
    read_stay(exchange)  # nothing leaves by these paths, but a wrong header is not ignored
    return tenant


class KeptPages:
    """Pages by tenant, each kept for KEEP_S; requests that come while one is read wait for the same reading. clock:
    monotonic, seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pages: OrderedDict[str, tuple[float, asyncio.Task[bytes]]] = OrderedDict()
        """Pages and when their reading began, oldest first."""

    def __len__(self) -> int:
        return len(self._pages)

    async def get(self, tenant: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """The tenant's page, read if it is not kept; a failed reading is not. Raises what `read` raises."""
        now_s = self._clock()
        self._forget(now_s)
        _, task = self._pages.get(tenant, (0.0, None))
        if task is None or (task.done() and _has_failed(task)):
            task = asyncio.ensure_future(_run(read))
            self._pages[tenant] = now_s, task
            self._pages.move_to_end(tenant)
        return await asyncio.shield(task)  # one client that hangs up must not fail the others

    def _forget(self, now_s: float) -> None:
        """Drop the pages that are too old, and of too many the oldest."""
        while self._pages:
            began_s, _ = next(iter(self._pages.values()))
            if now_s - began_s < KEEP_S and len(self._pages) < MAX_KEPT:
                return
            self._pages.popitem(last=False)


async def _run(read: Callable[[], Awaitable[bytes]]) -> bytes:
    return await read()


def _has_failed(task: "asyncio.Task[bytes]") -> bool:
    return task.cancelled() or task.exception() is not None
