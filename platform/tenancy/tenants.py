"""Tenants: their ids, settings and limits, and how Redis holds them.

Not their keys (`keys`), not the counting (`limits`, `usage`). Layout, all of a tenant under one hash tag:
    penstock:tenants                    ids of all tenants, deleted ones left out
    penstock:tenant_defaults            Limits of tenants made from now on, as JSON
    penstock:tenant:{id}:settings       a Record, as JSON
    penstock:tenant:{id}:keys           key digest -> when it was made
Invariant: an id is used once. What is left of a deleted tenant (usage, cached blocks under its salt) must not become
somebody else's, so its record stays as a tombstone and the id is refused.
"""

import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import redis.asyncio

from penstock.base.errors import ConfigError
from penstock.tenancy.share import DEFAULT_SHARE, MAX_WEIGHT, MIN_WEIGHT, SERVICE_CLASSES, Share
from penstock.wire.errors import InvalidRequest
from penstock.wire.money import MAX_BUDGET, to_nano

ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TIER_POLICIES = ("edge_first", "cloud_first", "edge_only", "never_leave", "cheapest_within_target")
"""Names of the policies by which the router orders tiers (`router.routing.tiers`). never_leave is another name of
edge_only."""
DEFAULT_TIER_POLICY = "edge_first"
MAX_CHANGE_ATTEMPTS = 16
SCAN_NAMES = 1000
"""Names that one step of a scan looks at."""
_TENANTS = "penstock:tenants"
_DEFAULTS = "penstock:tenant_defaults"


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a tenant. A field is None if there is no such limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers together."""
    max_parallel: int | None = None
    """Sequences at once: each choice of each prompt of a request is one."""
    budget: float | None = None
    """Sum of charges in a calendar month, UTC, in the currency of the tariffs."""

    @property
    def are_none(self) -> bool:
        return all(getattr(self, name) is None for name in self.__struct_fields__)

    @property
    def budget_nano(self) -> int | None:
        """The budget in 1e-9 of the currency's unit."""
        return None if self.budget is None else to_nano(self.budget)

    def check(self) -> None:
        """Raises InvalidRequest."""
        for name in ("requests_per_minute", "tokens_per_minute", "max_parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1, not {value}; leave it out for no limit")
        if self.budget is not None and not 0 < self.budget <= MAX_BUDGET:
            raise InvalidRequest(
                f"the budget must lie above 0 and up to {MAX_BUDGET:.0f}, not {self.budget:g}; leave it out for none"
            )


NO_LIMITS = Limits()


class Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an operator sets for a tenant. `check` it before it is written."""

    limits: Limits = NO_LIMITS
    models: tuple[str, ...] | None = None
    """Served names of the models that the tenant may use; None: all."""
    tier_policy: str = DEFAULT_TIER_POLICY
    weight: float = DEFAULT_SHARE.weight
    """Tokens that the tenant gets for one of a tenant with weight 1, while both wait."""
    service_class: str = DEFAULT_SHARE.service_class

    def check(self) -> None:
        """Raises InvalidRequest."""
        self.limits.check()
        if self.tier_policy not in TIER_POLICIES:
            raise InvalidRequest(f"the tier policy must be one of {', '.join(TIER_POLICIES)}, not {self.tier_policy!r}")
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise InvalidRequest(f"the weight must lie in {MIN_WEIGHT:g}..{MAX_WEIGHT:g}, not {self.weight:g}")
        if self.service_class not in SERVICE_CLASSES:
            raise InvalidRequest(f"the class must be one of {', '.join(SERVICE_CLASSES)}, not {self.service_class!r}")


NO_SETTINGS = Settings()


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What Redis holds of a tenant."""

    settings: Settings = NO_SETTINGS
    created: int
    """Unix time, seconds."""
    updated: int
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant as the gateway works with it."""

    id: str
    salt: bytes
    """Cache salt: what makes this tenant's KV blocks its own. Derived, never stored."""
    limits: Limits | None = None
    """Limits of the tenant; None: there are none, and a request needs no admission."""
    models: tuple[str, ...] | None = None
    tier_policy: str = DEFAULT_TIER_POLICY
    share: Share = DEFAULT_SHARE

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


def tenant_of(secret: bytes, tenant_id: str, settings: Settings | None = None) -> Tenant:
    """Derive a tenant's salt and take over its settings. The salt is the same on every gateway and replica that shares
    the cluster secret."""
    salt = hashlib.blake2b(tenant_id.encode(), key=secret, digest_size=32, person=b"penstock-tenant").digest()
    if settings is None:
        return Tenant(tenant_id, salt)
    return Tenant(
        tenant_id,
        salt,
        None if settings.limits.are_none else settings.limits,
        settings.models,
        settings.tier_policy,
        Share(settings.weight, settings.service_class),
    )


class CacheScope(NamedTuple):
    """The KV blocks that a request may find and leave: all of its tenant's, or a part of them."""

    salt: bytes
    label: str = ""
    """Name of the part of a tenant's blocks, for engines that mix salts in themselves; empty: all of them."""


def cache_scope(tenant: Tenant, salt: str | None) -> CacheScope:
    """The tenant's own blocks, or the part of them that requests with the same salt of their own have to themselves."""
    if salt is None:
        return CacheScope(tenant.salt)
    data = salt.encode()
    return CacheScope(
        hashlib.blake2b(data, key=tenant.salt, digest_size=32, person=b"penstock-salt").digest(),
        hashlib.blake2b(data, key=tenant.salt, digest_size=16, person=b"penstock-scope").hexdigest(),
    )


def tenant_key(tenant_id: str, part: str) -> str:
    """Name of a key in Redis; all parts of a tenant are in one slot of a cluster."""
    return f"penstock:tenant:{{{tenant_id}}}:{part}"


def settings_key(tenant_id: str) -> str:
    return tenant_key(tenant_id, "settings")


def keys_key(tenant_id: str) -> str:
    return tenant_key(tenant_id, "keys")


def decode_record(data: bytes | str) -> Record:
    """Raises msgspec.MsgspecError."""
    return msgspec.json.decode(data, type=Record)


def check_id(tenant_id: str) -> None:
    """Raises InvalidRequest for an id that is not a plain name."""
    if ID_PATTERN.fullmatch(tenant_id) is None:
        raise InvalidRequest(f"a tenant id is 1 to 64 letters, digits, dots, dashes or underscores, not {tenant_id!r}")


class Tenants:
    """The tenants in Redis, to create and change them. Methods raise RedisError, and ConfigError for a record that
    can't be read."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._replace = client.register_script(Path(__file__).with_name("replace.lua").read_text(encoding="utf-8"))

    async def defaults(self) -> Limits:
        """Limits that a new tenant gets where nothing else is said. Whoever makes a tenant takes them over."""
        data = await self._client.get(_DEFAULTS)
        try:
            return NO_LIMITS if data is None else msgspec.json.decode(data, type=Limits)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"the default limits in Redis can't be read: {error}") from error

    async def set_defaults(self, limits: Limits) -> None:
        """Set the limits of tenants that are made from now on; those that are there keep theirs. Raises
        InvalidRequest."""
        limits.check()
        await self._client.set(_DEFAULTS, msgspec.json.encode(limits))

    async def restore_defaults(self, limits: Limits) -> bool:
        """Write the default limits of an export where there are none; returns whether there were none."""
        return bool(await self._client.set(_DEFAULTS, msgspec.json.encode(limits), nx=True))

    async def create(self, tenant_id: str, settings: Settings, now: float) -> Record:
        """Create a tenant. now: Unix time. Raises InvalidRequest when the id is taken, was used before, or is not a
        plain name."""
        check_id(tenant_id)
        settings.check()
        record = Record(settings=settings, created=int(now), updated=int(now))
        if not await self._client.set(settings_key(tenant_id), msgspec.json.encode(record), nx=True):
            found = await self.find(tenant_id)
            if found is None:
                raise InvalidRequest(
                    f"a tenant {tenant_id!r} was deleted; its id is not used again, because its usage and cache stay"
                    " its own"
                )
            raise InvalidRequest(f"there is a tenant {tenant_id!r} already")
        await self._list(tenant_id)
        return record

    async def ensure(self, tenant_id: str, now: float, settings: Settings = NO_SETTINGS) -> None:
        """Create the tenant with these settings where it does not exist. Raises InvalidRequest for one that was
        deleted."""
        check_id(tenant_id)
        if await self.find(tenant_id) is None:
            await self.create(tenant_id, settings, now)
        else:
            await self._list(tenant_id)

    async def find(self, tenant_id: str) -> Record | None:
        """Find the record of a tenant. Returns None if there is none, or if the tenant was deleted."""
        data = await self._client.get(settings_key(tenant_id))
        record = None if data is None else _decode(tenant_id, data)
        return None if record is None or record.deleted else record

    async def get(self, tenant_id: str) -> Record:
        """Record of a tenant. Raises InvalidRequest where there is none."""
        check_id(tenant_id)
        record = await self.find(tenant_id)
        if record is None:
            raise InvalidRequest(f"there is no tenant {tenant_id!r}")
        return record

    async def all(self) -> dict[str, Record]:
        """Records of all tenants by id, in alphabetical order."""
        ids = sorted(_text(member) for member in await cast("Awaitable[set[bytes]]", self._client.smembers(_TENANTS)))
        found = [(tenant_id, await self.find(tenant_id)) for tenant_id in ids]
        return {tenant_id: record for tenant_id, record in found if record is not None}

    async def change(self, tenant_id: str, change: Callable[[Settings], Settings], now: float) -> Record:
        """Replace a tenant's settings by what `change` makes of them; it is called again if others change them at the
        same time. Raises InvalidRequest where there is no such tenant."""

        def edit(record: Record) -> Record:
            settings = change(record.settings)
            settings.check()
            return msgspec.structs.replace(record, settings=settings, updated=int(now))

        return await self._edit(tenant_id, edit)

    async def delete(self, tenant_id: str, now: float) -> None:
        """Delete a tenant: from the next look-up on its keys are refused. Raises InvalidRequest where there is no such
        tenant."""
        await self._edit(tenant_id, lambda record: msgspec.structs.replace(record, updated=int(now), deleted=True))
        await self._client.srem(_TENANTS, tenant_id)

    async def all_stored(self) -> dict[str, Record]:
        """Records of all tenants by id, deleted ones too, in alphabetical order. By a scan: the list has no deleted
        ones."""
        begin, end = settings_key("\0").split("\0")
        found: dict[str, Record] = {}
        async for name in self._client.scan_iter(match=f"{begin}*{end}", count=SCAN_NAMES):
            tenant_id = _text(name).removeprefix(begin).removesuffix(end)
            if (data := await self._client.get(name)) is not None:
                found[tenant_id] = _decode(tenant_id, data)
        return dict(sorted(found.items()))

    async def restore(self, tenant_id: str, record: Record) -> Record | None:
        """Write a record of an export, unless what is there is newer or deleted. Returns what was there before."""
        check_id(tenant_id)
        name = settings_key(tenant_id)
        for _ in range(MAX_CHANGE_ATTEMPTS):
            data = await self._client.get(name)
            before = None if data is None else _decode(tenant_id, data)
            is_wanted = before is None or _supersedes(record, before)
            if is_wanted and not await self._replace(keys=[name], args=[data or b"", msgspec.json.encode(record)]):
                continue
            is_deleted = record.deleted or (before is not None and before.deleted)
            await (self._client.srem(_TENANTS, tenant_id) if is_deleted else self._list(tenant_id))
            return before
        raise _too_busy(tenant_id)

    async def _edit(self, tenant_id: str, edit: Callable[[Record], Record]) -> Record:
        check_id(tenant_id)
        name = settings_key(tenant_id)
        for _ in range(MAX_CHANGE_ATTEMPTS):
            data = await self._client.get(name)
            old = None if data is None else _decode(tenant_id, data)
            if data is None or old is None or old.deleted:
                raise InvalidRequest(f"there is no tenant {tenant_id!r}")
            new = edit(old)
            if await self._replace(keys=[name], args=[data, msgspec.json.encode(new)]):
                return new
        raise _too_busy(tenant_id)

    async def _list(self, tenant_id: str) -> None:
        await self._client.sadd(_TENANTS, tenant_id)


def _decode(tenant_id: str, data: bytes | str) -> Record:
    try:
        return decode_record(data)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"what Redis holds of the tenant {tenant_id!r} can't be read: {error}") from error


def _supersedes(record: Record, before: Record) -> bool:
    """Whether a record of an export takes the place of one in Redis: a deletion is final, else the later one counts."""
    if record.deleted != before.deleted:
        return record.deleted
    return record.updated > before.updated


def _too_busy(tenant_id: str) -> ConfigError:
    return ConfigError(f"the tenant {tenant_id!r} is being changed by others all the time; try again")


def _text(member: bytes | str) -> str:
    return member.decode() if isinstance(member, bytes) else member
