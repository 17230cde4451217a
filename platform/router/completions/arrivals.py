"""Requests between their key and their admission: each counts against its tenant's requests per minute, whatever
becomes of it.

One that is admitted counts there, in the one round trip that reserves its tokens as well; one that fails before that,
because something is wrong with it or its client hangs up, is charged when it does. So a request counts once, and a good
one costs no further round trip. Until their verdict at most as many are read as the limit lets through in a minute, and
none while the limit is known to be reached. What the limits themselves refuse does not count. Tenants without a limit
of requests are not looked at.
"""

import contextlib

from penstock.router.completions.admission import Admission
from penstock.tenancy.tenants import Tenant
from penstock.wire.errors import Overloaded, RateLimited

RETRY_AFTER_S = 1.0
"""Wait to suggest where too many requests are undecided: most get their verdict within milliseconds."""


class Arrivals:
    """The undecided requests of all tenants at one gateway."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._undecided: dict[str, set[str]] = {}
        """Requests without a verdict yet, by tenant."""

    def begin(self, tenant: Tenant, request_id: str) -> None:
        """A request came with a known key; `end` must follow. Raises RateLimited; then the request does not count."""
        limit = _limit(tenant)
        if limit is None:
            return
        self.check(tenant)
        undecided = self._undecided.setdefault(tenant.id, set())
        if len(undecided) >= limit:
            raise RateLimited(
                f"The limit of {limit} requests per minute may be reached: so many have just come and are being read.",
                retry_after_s=RETRY_AFTER_S,
            )
        undecided.add(request_id)

    def check(self, tenant: Tenant) -> None:
        """Raises RateLimited if the tenant's limit of requests is known to be reached."""
        if tenant.limits is not None:
            self._admission.check(tenant.id, tenant.limits)

    async def charge(self, tenant: Tenant, request_id: str) -> None:
        """The request failed: unless it was admitted before, it counts now. Raises RateLimited where the limit is
        reached: then that is the answer, whatever else is wrong with the request."""
        if tenant.limits is None or not self.end(tenant, request_id):
            return
        with contextlib.suppress(Overloaded):  # nobody can count it: Redis is away
            await self._admission.charge(tenant.id, tenant.limits, request_id)

    def end(self, tenant: Tenant, request_id: str) -> bool:
        """The request has its verdict, or is over. Returns whether it was undecided until now."""
        undecided = self._undecided.get(tenant.id)
        if undecided is None or request_id not in undecided:
            return False
        undecided.remove(request_id)
        if not undecided:
            del self._undecided[tenant.id]
        return True


def _limit(tenant: Tenant) -> int | None:
    """Requests per minute; None if the tenant has no such limit."""
    return None if tenant.limits is None else tenant.limits.requests_per_minute
