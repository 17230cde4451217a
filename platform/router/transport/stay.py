"""The header by which one request stays on the edge, whatever its tenant's policy allows.

Not the policy (`routing.tiers`). Invariants: the header narrows the policy and never widens it; a value that is not
known is refused, never ignored.
"""

from penstock.router.routing.tiers import STAY, TierRule, parse_policy
from penstock.router.transport.exchange import Exchange
from penstock.tenancy.tenants import Tenant
from penstock.wire.errors import InvalidRequest

STAY_HEADER = b"x-penstock-stay"
STAY_PAIR = (STAY_HEADER, STAY.encode())
"""The header of a request that stays."""


def read_stay(exchange: Exchange) -> bool:
    """Whether the request asks to stay on the edge. Raises InvalidRequest for any value but the one that there is."""
    values = exchange.all_headers(STAY_HEADER)
    for value in values:
        if value != STAY_PAIR[1]:
            shown = value[:100].decode("latin-1")
            raise InvalidRequest(
                f"The header '{STAY_HEADER.decode()}' can only be '{STAY}', not '{shown}'.", param=STAY_HEADER.decode()
            )
    return bool(values)


def read_rule(exchange: Exchange, tenant: Tenant) -> TierRule:
    """Where the request may be answered. Raises as `read_stay`."""
    return TierRule(parse_policy(tenant.tier_policy), read_stay(exchange))
