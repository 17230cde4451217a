"""The registry of adapters in Redis: for each tenant, names with the digest and version that they stand for.

Not the files (`store`). Names belong to a tenant: no tenant can ask for another's, because the tenant is part of every
key. A look-up goes to Redis each time, so that what was put or removed through any gateway counts from the next request
on; while Redis is away, what was known goes on. All keys of a tenant share one hash tag.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from penstock.base.answers import answer_within
from penstock.wire.errors import InvalidRequest, Overloaded

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LOOKUP_TIMEOUT_S = 0.5
UNAVAILABLE_S = 0.5
"""How long Redis is left alone after a failed look-up."""
MAX_KNOWN = 4096
"""Records remembered for when Redis is away."""
TENANTS_AT_ONCE = 256
"""Tenants whose adapters are read in one round trip."""
_TENANTS = "penstock:adapter-tenants"


class Adapter(msgspec.Struct, frozen=True):
    """What is registered under a name."""

    digest: str
    base_model: str
    """Name of the model that it adapts, as the API serves it."""
    model_digest: str
    rank: int
    targets: tuple[str, ...]
    size_bytes: int
    created: int
    """Unix time, seconds."""


class Registered(msgspec.Struct, frozen=True):
    """An adapter and the version of its name."""

    adapter: Adapter
    version: int
    """Number of the adapter under its name: 1, and one more with every change of what the name stands for; a removal
    does not set it back."""


class StoredAdapter(NamedTuple):
    """A name of a tenant for an adapter, as an export has it."""

    tenant: str
    name: str
    version: int
    record: str | None
    """Record of `register.lua`. None: the name was removed, and only its version counts on."""


class Registry:
    """The adapters of all tenants. max_per_tenant: adapters that one tenant may have. clock: monotonic, seconds."""

    def __init__(
        self, client: redis.asyncio.Redis, max_per_tenant: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._max_per_tenant = max_per_tenant
        self._clock = clock
        self._put = client.register_script(Path(__file__).with_name("register.lua").read_text(encoding="utf-8"))
        self._known: OrderedDict[tuple[str, str], Registered] = OrderedDict()
        self._unavailable_until = float("-inf")

    async def put(self, tenant: str, name: str, adapter: Adapter) -> Registered:
        """Register or replace. Raises InvalidRequest for a name that is none or one adapter too many, Overloaded when
        Redis does not answer."""
        if NAME_PATTERN.fullmatch(name) is None:
            raise InvalidRequest(
                f"An adapter's name is 1 to 64 letters, digits, dots, dashes or underscores, not {name[:100]!r}.",
                param="name",
            )
        identity = f"{adapter.digest}/{adapter.model_digest}"
        keys = [_records(tenant), _versions(tenant)]
        try:
            await self._client.sadd(_TENANTS, tenant)
            value = await self._put(
                keys=keys, args=[name, msgspec.json.encode(adapter), identity, self._max_per_tenant]
            )
        except (RedisError, OSError) as error:
            raise _unavailable() from error
        if value is None:
            raise InvalidRequest(f"You have {self._max_per_tenant} adapters already, which is the most; delete one.")
        return self._remember(tenant, name, _decode_record(value))

    async def get(self, tenant: str, name: str) -> Registered | None:
        """Look up the adapter that a tenant's name stands for. Returns None if there is none. One round trip, made for
        every request that names an adapter. Raises Overloaded when that is not possible and nothing is known."""
        if NAME_PATTERN.fullmatch(name) is None:
            return None
        if self._clock() >= self._unavailable_until:
            try:
                async with answer_within(LOOKUP_TIMEOUT_S):
                    value = await self._client.hget(_records(tenant), name)
            except (RedisError, OSError, TimeoutError):
                self._unavailable_until = self._clock() + UNAVAILABLE_S
            else:
                if value is None:
                    self._known.pop((tenant, name), None)
                    return None
                return self._remember(tenant, name, _decode_record(value))
        known = self._known.get((tenant, name))
        if known is None:
            raise _unavailable()
        return known

    async def all(self, tenant: str) -> dict[str, Registered]:
        """Adapters of a tenant by name, sorted. Raises Overloaded."""
        try:
            values = await self._client.hgetall(_records(tenant))
        except (RedisError, OSError) as error:
            raise _unavailable() from error
        return {_text(name): _decode_record(value) for name, value in sorted(values.items())}

    async def remove(self, tenant: str, name: str) -> Registered | None:
        """Remove a name; returns what was registered under it. No request finds it any more. Raises Overloaded."""
        registered = await self.get(tenant, name)
        if registered is None:
            return None
        try:
            await self._client.hdel(_records(tenant), name)
        except (RedisError, OSError) as error:
            raise _unavailable() from error
        self._known.pop((tenant, name), None)
        return registered

    async def owned_digests(self) -> set[str]:
        """Digests of the adapters of all tenants. Raises Overloaded."""
        try:
            tenants = sorted(_text(tenant) for tenant in await self._client.smembers(_TENANTS))
            found: set[str] = set()
            for start in range(0, len(tenants), TENANTS_AT_ONCE):
                async with self._client.pipeline(transaction=False) as pipeline:
                    for tenant in tenants[start : start + TENANTS_AT_ONCE]:
                        pipeline.hvals(_records(tenant))
                    found |= {
                        _decode_record(value).adapter.digest for values in await pipeline.execute() for value in values
                    }
        except (RedisError, OSError) as error:
            raise _unavailable() from error
        return found

    def _remember(self, tenant: str, name: str, registered: Registered) -> Registered:
        self._known[tenant, name] = registered
        self._known.move_to_end((tenant, name))
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return registered


async def forget_tenant(client: redis.asyncio.Redis, tenant: str) -> None:
    """Remove all adapters of a tenant that was deleted. Its files go with a later sweep. Raises RedisError."""
    await client.delete(_records(tenant), _versions(tenant))
    await client.srem(_TENANTS, tenant)


async def read_stored_adapters(client: redis.asyncio.Redis) -> list[StoredAdapter]:
    """Names of all tenants, removed ones too, sorted. Raises RedisError."""
    found: list[StoredAdapter] = []
    for tenant in sorted(_text(member) for member in await cast("Awaitable[set[bytes]]", client.smembers(_TENANTS))):
        records = await cast("Awaitable[dict[bytes, bytes]]", client.hgetall(_records(tenant)))
        versions = await cast("Awaitable[dict[bytes, bytes]]", client.hgetall(_versions(tenant)))
        for name, version in sorted(versions.items()):
            record = records.get(name)
            found.append(StoredAdapter(tenant, _text(name), int(version), None if record is None else _text(record)))
    return found


async def put_stored_adapter(client: redis.asyncio.Redis, adapter: StoredAdapter) -> bool:
    """Write a name of an export. Returns False where Redis knows the name, also as one that was removed: then nothing
    is changed. Raises RedisError, and InvalidRequest for a record that is none."""
    if adapter.record is not None:
        try:
            _decode_record(adapter.record)
        except (ValueError, msgspec.MsgspecError) as error:
            raise InvalidRequest(f"{adapter.name!r} of {adapter.tenant!r} is not registered in a known form") from error
    await client.sadd(_TENANTS, adapter.tenant)
    if not await client.hsetnx(_versions(adapter.tenant), adapter.name, str(adapter.version)):
        return False
    if adapter.record is not None:
        await client.hset(_records(adapter.tenant), adapter.name, adapter.record)
    return True


def _records(tenant: str) -> str:
    return f"penstock:adapters:{{{tenant}}}"


def _versions(tenant: str) -> str:
    return f"penstock:adapter-versions:{{{tenant}}}"


def _decode_record(value: bytes | str) -> Registered:
    version, _, data = _text(value).split(" ", 2)
    return Registered(msgspec.json.decode(data, type=Adapter), int(version))


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()


def _unavailable() -> Overloaded:
    return Overloaded("Adapters can't be looked up at the moment.", retry_after_s=1.0)
