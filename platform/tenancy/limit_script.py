"""The ledgers of all tenants in one Redis: the script that applies a request to one, and the one that counts gateways.

Not the decision when to call them (`limits`). The arithmetic of limits is that of `window`, here in Lua and on Redis's
clock, so that all gateways count in one ledger; `tests/integration/test_limits` holds the two against each other. That
of budgets is in Lua alone, one call with the limits', and `tests/integration/test_budgets` has a model of it. All keys
of a tenant have one hash tag.
"""

from collections.abc import Awaitable
from pathlib import Path
from typing import cast

import msgspec
import redis.asyncio

from penstock.tenancy.tenants import tenant_key
from penstock.tenancy.window import LIMIT_NAMES, MINUTE, PARALLEL_WAIT_MS, LimitRequest, Verdict, Window

PARTS = ("requests", "tokens", "held", "leases", "spent", "owed", "owed_leases")
"""What the keys of a ledger are called, in the scripts' order."""
PRESENCE_LEASE_MS = 10_000
"""A gateway that has not registered for so long is not counted."""
_GATEWAYS = "penstock:gateways"


class LimitScript:
    """The call of `limits.lua` behind `budgets.lua`, which keep the ledgers of each tenant."""

    def __init__(self, client: redis.asyncio.Redis, window: Window = MINUTE) -> None:
        here = Path(__file__)
        budgets = here.with_name("budgets.lua").read_text(encoding="utf-8")
        self._client = client
        self._script = client.register_script(budgets + here.with_name("limits.lua").read_text(encoding="utf-8"))
        self._window = window

    async def apply(self, tenant_id: str, request: LimitRequest) -> Verdict:
        """Apply a request in one round trip. Raises RedisError or OSError."""
        keys = [tenant_key(tenant_id, f"limits:{part}") for part in PARTS]
        arguments: list[bytes | int] = [msgspec.json.encode(request), *self._window, PARALLEL_WAIT_MS]
        reply = await cast("Awaitable[list[int]]", self._script(keys=keys, args=arguments))
        is_admitted, limit, wait_ms, *rest = map(int, reply)
        return Verdict(
            bool(is_admitted), LIMIT_NAMES[limit - 1] if limit else None, None if wait_ms < 0 else wait_ms, *rest
        )

    async def read_spent(self, tenant_id: str, month: str) -> int:
        """Sum that is charged or reserved in a month such as 2026-11. Raises RedisError or OSError."""
        return await read_spent(self._client, tenant_id, month)


async def read_spent(client: redis.asyncio.Redis, tenant_id: str, month: str) -> int:
    """Sum of what a tenant with a budget is charged in a month such as 2026-11, what is reserved included, in 1e-9 of
    the currency's unit. Raises RedisError or OSError."""
    found = await cast("Awaitable[bytes | None]", client.hget(tenant_key(tenant_id, "limits:spent"), month))
    return int(found or 0)


class GatewayScript:
    """The call of `gateways.lua`, which registers one gateway and counts all."""

    def __init__(self, client: redis.asyncio.Redis, gateway_id: str) -> None:
        self._script = client.register_script(Path(__file__).with_name("gateways.lua").read_text(encoding="utf-8"))
        self._gateway_id = gateway_id

    async def register(self) -> int:
        """Renew this gateway's lease; returns how many gateways there are, at least 1. Raises RedisError or OSError."""
        arguments: list[str | int] = [self._gateway_id, PRESENCE_LEASE_MS]
        return max(1, await cast("Awaitable[int]", self._script(keys=[_GATEWAYS], args=arguments)))
