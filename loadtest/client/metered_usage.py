"""The server's own account of what its tenants used: completion tokens by tenant, from `GET /usage` under the API's
URL, with the tenant's key.

Not part of OpenAI's API; Penstock has it. The answer is `{"data": [{"completion_tokens": N, ...}, ...]}`, all rows
together the account so far.
"""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from penstock_loadtest.client.connection import Connections, parse_origin
from penstock_loadtest.client.target import Target, get_page, path_with_query
from penstock_loadtest.errors import TargetUnreachable

TIMEOUT_S = 5.0
SETTLE_S = 1.5
"""Seconds between two readings; a server may be a little behind, or tell for a second what it told before, and so may
requests that were hung up on."""
MAX_READINGS = 20


class _Row(msgspec.Struct):
    completion_tokens: int


class _Usage(msgspec.Struct):
    data: list[_Row]


async def read_metered_usage(target: Target) -> dict[str, int]:
    """Completion tokens by tenant. Raises TargetUnreachable: no such page, or tenants that share a key, whose sum
    nobody can divide."""
    if not target.keys or len(set(target.keys.values())) < len(target.keys):
        raise TargetUnreachable("meter is set, which takes a key of its own for every tenant.")
    connections = Connections(parse_origin(target.url))
    try:
        return {tenant: await _read(connections, target, key) for tenant, key in target.keys.items()}
    finally:
        connections.close()
        await connections.wait_closed()


async def wait_for_settled_usage(
    target: Target, before: Mapping[str, int], least: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """Completion tokens by tenant since `before`, once two readings are the same and not below `least`, or after
    MAX_READINGS. Raises TargetUnreachable."""
    last = await read_metered_usage(target)
    for _ in range(MAX_READINGS):
        await asyncio.sleep(SETTLE_S)
        found = await read_metered_usage(target)
        is_behind = any(
            found[tenant] - before.get(tenant, 0) < tokens for tenant, tokens in least.items() if tenant in found
        )
        if found == last and not is_behind:
            break
        last = found
    return {tenant: tokens - before.get(tenant, 0) for tenant, tokens in last.items()}


async def _read(connections: Connections, target: Target, key: str) -> int:
    status, body = await get_page(connections, f"{path_with_query(target.url)}/usage", TIMEOUT_S, key)
    try:
        if status == 200:
            return sum(row.completion_tokens for row in msgspec.json.decode(body, type=_Usage).data)
    except msgspec.DecodeError:
        status = 0
    raise TargetUnreachable(
        f"meter is set, but {target.url}/usage does not show what a tenant used "
        f"({f'HTTP {status}' if status else 'another format'})."
    )
