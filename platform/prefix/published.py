"""Prefixes that an operator has published: texts, by name, whose KV all tenants share.

The one text that Redis holds, and it is public: whoever sends it learns nothing but that it may be cached. Which blocks
it makes is `router.routing.chains`' matter. Layout, in one slot:
    penstock:published:{all}:prefixes    name -> a Prefix, as JSON
    penstock:published:{all}:version     counts changes, so that nobody reads texts that are known
"""

from collections.abc import Awaitable, Sequence
from typing import NamedTuple, cast

import msgspec
import redis.asyncio

from penstock.wire.errors import InvalidRequest

MAX_PREFIXES = 64
MAX_CHARS = 262_144
"""Longest text of a prefix, in characters."""
_PREFIXES = "penstock:published:{all}:prefixes"
_VERSION = "penstock:published:{all}:version"


class Prefix(msgspec.Struct, frozen=True):
    """A published prefix."""

    name: str
    text: str
    """Content of a system message, or the beginning of a plain prompt."""
    created: int
    """Unix time, seconds."""


class Snapshot(NamedTuple):
    """Everything that is published, and the number of the change that made it so."""

    version: int
    prefixes: list[Prefix]


async def publish(client: redis.asyncio.Redis, name: str, text: str, now: float) -> None:
    """Publish a text, or replace the one of that name. now: Unix time. Raises InvalidRequest for an empty or too long
    text, or one too many; RedisError."""
    if not name.strip() or len(name) > 64:
        raise InvalidRequest(f"a prefix's name has 1 to 64 characters, not {len(name)}")
    if not 0 < len(text) <= MAX_CHARS:
        raise InvalidRequest(f"a prefix has 1 to {MAX_CHARS} characters, not {len(text)}")
    names = await cast("Awaitable[list[bytes]]", client.hkeys(_PREFIXES))
    if name.encode() not in names and len(names) >= MAX_PREFIXES:
        raise InvalidRequest(f"{len(names)} prefixes are published, which is the most; withdraw one")
    await client.hset(_PREFIXES, name, msgspec.json.encode(Prefix(name, text, int(now))).decode())
    await client.incr(_VERSION)


async def withdraw(client: redis.asyncio.Redis, name: str) -> None:
    """Withdraw a prefix: requests that come later share nothing of it. Raises InvalidRequest where there is none, and
    RedisError."""
    if not await client.hdel(_PREFIXES, name):
        raise InvalidRequest(f"no prefix {name!r} is published")
    await client.incr(_VERSION)


async def restore_published(client: redis.asyncio.Redis, prefixes: Sequence[Prefix]) -> bool:
    """Write the prefixes of an export where nothing was ever published or withdrawn. Returns whether that is so; else
    one that was withdrawn since could come back. Raises RedisError."""
    if await client.get(_VERSION) is not None:
        return False
    for prefix in prefixes:
        await client.hset(_PREFIXES, prefix.name, msgspec.json.encode(prefix).decode())
    await client.incr(_VERSION)
    return True


async def read_published(client: redis.asyncio.Redis, known_version: int | None = None) -> Snapshot | None:
    """All prefixes by name, sorted. Returns None if nothing has changed since the version that is known. Raises
    RedisError."""
    version = int(await client.get(_VERSION) or 0)
    if version == known_version:
        return None
    found = await cast("Awaitable[dict[bytes, bytes]]", client.hgetall(_PREFIXES))
    prefixes = [msgspec.json.decode(data, type=Prefix) for data in found.values()]
    return Snapshot(version, sorted(prefixes, key=lambda prefix: prefix.name))
