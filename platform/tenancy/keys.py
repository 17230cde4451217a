"""API keys and the tenants that they authenticate.

A key is `sk-penstock-` and 48 hex digits (192 bits). Redis holds only its blake2b digest, keyed with the cluster
secret, so a copy of Redis contains no usable key; the beginning of that digest is the key's id, which may be shown. A
revoked key leaves a tombstone, which distinguishes "revoked" from "Redis lost its data": a key that a gateway has
confirmed works for `stale_s` more while Redis is away or empty, a revoked one ends with the next look-up.
"""

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from penstock.base.answers import answer_within
from penstock.tenancy.tenants import SCAN_NAMES, Tenant, Tenants, decode_record, keys_key, settings_key, tenant_of
from penstock.wire.errors import InvalidRequest, Overloaded, Unauthenticated

KEY_PATTERN = re.compile(r"sk-penstock-[0-9a-f]{48}")
ID_DIGITS = 12
"""Length of a key's id: the first digits of its digest."""
LOOKUP_TIMEOUT_S = 0.5
UNAVAILABLE_S = 0.5
"""How long Redis is left alone when it did not answer."""
STALE_S = 12 * 3600.0
"""How long a known key goes on without Redis confirming it, where no other time is set."""
TOMBSTONE_S = 400 * 86400
"""Must exceed STALE_S, and the time for which somebody may still put a revoked key back (`penstock up` does, from its
state folder)."""
UNKNOWN_S = 2.0
"""How long an unknown key is refused without another look-up: also the longest a new key may take to work."""
MAX_KNOWN = 65536
MAX_UNKNOWN = 16384
MAX_LOOKUPS = 256
"""Look-ups at once in one gateway; guessed keys beyond that are turned away, known ones go on."""

log = logging.getLogger(__name__)


class _Record(msgspec.Struct, frozen=True):
    """What Redis holds of a key."""

    tenant: str
    revoked: bool = False


class KeyInfo(NamedTuple):
    """What an operator may see of an API key: its id and owner, never the key itself."""

    id: str
    tenant: str
    created: int
    """Unix time, seconds."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A key that Redis has confirmed. Times are those of the store's clock."""

    tenant: Tenant
    fresh_until: float
    """Time from which on the key is looked up again."""
    stale_until: float
    """Time from which on the key is refused if Redis has not confirmed it again."""


class _Outcome(NamedTuple):
    """The outcome of a look-up; with defaults only: Redis has no such key, or not its tenant."""

    began_at: float
    """Beginning of the look-up, by the store's clock."""
    tenant: Tenant | None = None
    is_revoked: bool = False
    """Whether the key was revoked, or its tenant deleted."""
    has_failed: bool = False
    """Whether Redis did not answer, or with what can't be read."""


class StoredKey(NamedTuple):
    """A key, or the tombstone of a revoked one, as an export has it."""

    digest: str
    tenant: str
    """Id of the owner; empty if the key was revoked."""
    created: int
    """Unix time, seconds; 0 for a tombstone."""
    ttl_s: int
    """Seconds that a tombstone has left; 0 for a key."""


class KeyReader(Protocol):
    """The part of redis.asyncio.Redis that a look-up needs."""

    async def get(self, name: str) -> bytes | str | None: ...


async def create_key(client: redis.asyncio.Redis, secret: bytes, tenant_id: str) -> str:
    """Create a key of a tenant, and the tenant where it does not exist; the key can't be read again later.

    Raises RedisError, or InvalidRequest for an id that is not a plain name, or of a tenant that was deleted.
    """
    key = f"sk-penstock-{secrets.token_hex(24)}"
    await put_key(client, secret, tenant_id, key)
    return key


async def put_key(client: redis.asyncio.Redis, secret: bytes, tenant_id: str, key: str) -> bool:
    """Store a key that was created before, and its tenant, for instance after Redis lost its data. Returns False if the
    key was revoked; it stays so."""
    if KEY_PATTERN.fullmatch(key) is None:
        raise InvalidRequest("that is not a key that create_key made")
    now = time.time()
    await Tenants(client).ensure(tenant_id, now)
    name, value = record_of(secret, tenant_id, key)
    if not await client.set(name, value, nx=True):
        data = await client.get(name)
        if data is not None and msgspec.json.decode(data, type=_Record).revoked:
            return False
    await client.hsetnx(keys_key(tenant_id), _digest(secret, key), str(int(now)))
    return True


def record_of(secret: bytes, tenant_id: str, key: str) -> tuple[str, bytes]:
    """Name and value by which Redis holds a key."""
    return _redis_key(_digest(secret, key)), msgspec.json.encode(_Record(tenant_id))


async def list_keys(client: redis.asyncio.Redis, tenant_id: str) -> list[KeyInfo]:
    """Keys of a tenant that are not revoked, oldest first. Raises RedisError."""
    found = await cast("Awaitable[dict[bytes, bytes]]", client.hgetall(keys_key(tenant_id)))
    return sorted(
        (KeyInfo(_text(digest)[:ID_DIGITS], tenant_id, int(created)) for digest, created in found.items()),
        key=lambda info: (info.created, info.id),
    )


async def revoke_key(client: redis.asyncio.Redis, secret: bytes, key: str) -> None:
    """Revoke a key: no gateway accepts it after its `cache_s`. Unknown keys are ignored. Raises RedisError."""
    await _revoke(client, _digest(secret, key))


async def revoke_id(client: redis.asyncio.Redis, key_id: str) -> KeyInfo:
    """Revoke the one key whose id begins so. Raises RedisError, and InvalidRequest where there is none, or more than
    one."""
    found = []
    for tenant_id in await Tenants(client).all() if key_id else ():
        digests = await cast("Awaitable[dict[bytes, bytes]]", client.hgetall(keys_key(tenant_id)))
        found += [
            (_text(digest), tenant_id, int(created))
            for digest, created in digests.items()
            if _text(digest).startswith(key_id)
        ]
    if len(found) != 1:
        raise InvalidRequest(
            f"{len(found) or 'no'} keys have an id that begins with {key_id!r}; `penstock key list` shows the ids"
        )
    digest, tenant_id, created = found[0]
    await _revoke(client, digest)
    return KeyInfo(digest[:ID_DIGITS], tenant_id, created)


async def revoke_all(client: redis.asyncio.Redis, tenant_id: str) -> int:
    """Revoke all keys of a tenant; returns how many there were. Raises RedisError."""
    digests = await cast("Awaitable[list[bytes]]", client.hkeys(keys_key(tenant_id)))
    for digest in digests:
        await _revoke(client, _text(digest))
    return len(digests)


async def _revoke(client: redis.asyncio.Redis, digest: str, ttl_s: int = TOMBSTONE_S) -> None:
    tombstone = msgspec.json.encode(_Record("", revoked=True))
    data = cast("bytes | None", await client.set(_redis_key(digest), tombstone, ex=ttl_s, get=True))
    tenant_id = "" if data is None else msgspec.json.decode(data, type=_Record).tenant
    if tenant_id:
        await client.hdel(keys_key(tenant_id), digest)


async def read_stored(client: redis.asyncio.Redis) -> list[StoredKey]:
    """All keys and tombstones that Redis holds, by a scan, sorted by digest. Raises RedisError."""
    found: dict[str, StoredKey] = {}
    async for name in client.scan_iter(match="penstock:key:*", count=SCAN_NAMES):
        digest = _text(name).removeprefix("penstock:key:{").removesuffix("}")
        data = await client.get(name)
        if data is None:  # a tombstone that has just expired
            continue
        record = msgspec.json.decode(data, type=_Record)
        if record.revoked:
            found[digest] = StoredKey(digest, "", 0, max(1, await client.ttl(name)))
        else:
            created = await cast("Awaitable[bytes | None]", client.hget(keys_key(record.tenant), digest))
            found[digest] = StoredKey(digest, record.tenant, int(created or 0), 0)
    return [found[digest] for digest in sorted(found)]


async def put_stored(client: redis.asyncio.Redis, key: StoredKey) -> bool | None:
    """Write a key or tombstone of an export. Returns True if that changed Redis, False if Redis held it already, None
    for a key that was revoked since: a tombstone is never taken away. Raises RedisError."""
    name = _redis_key(key.digest)
    data = await client.get(name)
    there = None if data is None else msgspec.json.decode(data, type=_Record)
    if not key.tenant:
        if there is not None and there.revoked:
            return False
        await _revoke(client, key.digest, key.ttl_s)
        return True
    if there is None and not await client.set(name, msgspec.json.encode(_Record(key.tenant)), nx=True):
        return await put_stored(client, key)  # somebody else was faster
    if there is not None and there.revoked:
        return None
    await client.hsetnx(keys_key(key.tenant), key.digest, str(key.created))
    return there is None


def _redis_key(digest: str) -> str:
    return f"penstock:key:{{{digest}}}"


def _digest(secret: bytes, key: str) -> str:
    return hashlib.blake2b(
        key.encode("utf-8", "surrogatepass"), key=secret, digest_size=20, person=b"penstock-apikey"
    ).hexdigest()


def _text(field: bytes | str) -> str:
    return field.decode() if isinstance(field, bytes) else field


class KeyStore:
    """A gateway's view of the keys. Every method runs on one event loop.

    secret: the cluster's, 16 to 64 bytes. cache_s: age at which a key and its tenant's settings are looked up again,
    counted from the beginning of the last look-up; so a change, or a revocation, is effective that long after it at the
    latest, while Redis answers. now: a monotonic clock, seconds. stale_s: time for which a known key goes on without
    being confirmed, while Redis is away or has lost its data; at most TOMBSTONE_S.
    """

    def __init__(
        self,
        client: KeyReader,
        secret: bytes,
        cache_s: float,
        now: Callable[[], float] = time.monotonic,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
        stale_s: float = STALE_S,
    ) -> None:
        self._client = client
        self._secret = secret
        self._cache_s = cache_s
        self._now = now
        self._lookup_timeout_s = lookup_timeout_s
        self._stale_s = stale_s
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[_Outcome]] = {}
        self._unavailable_until = float("-inf")

    def cached(self, key: str) -> Tenant | None:
        """The key's tenant where no look-up is needed, else None. Never waits."""
        known = self._known.get(_digest(self._secret, key))
        if known is None:
            return None
        now = self._now()
        if now < known.fresh_until or (now < self._unavailable_until and now < known.stale_until):
            return known.tenant
        return None

    async def tenant(self, key: str) -> Tenant:
        """The key's tenant. Raises Unauthenticated for a key that is malformed, unknown or revoked, Overloaded when
        Redis can't be asked now or holds what can't be read."""
        if (tenant := self.cached(key)) is not None:
            return tenant
        if KEY_PATTERN.fullmatch(key) is None:
            raise Unauthenticated("the API key is malformed; keys begin with sk-penstock-")
        digest = _digest(self._secret, key)
        if self._unknown.get(digest, float("-inf")) > self._now():
            raise Unauthenticated("Incorrect API key provided: it is unknown or revoked")
        outcome = await self._look_up(digest) if self._may_look_up(digest) else _Outcome(self._now(), has_failed=True)
        return self._conclude(digest, outcome)

    async def tenant_by_id(self, tenant_id: str) -> Tenant | None:
        """A tenant as Redis has it now, whichever keys it has. Returns None if there is none, or it was deleted. Raises
        Overloaded when Redis does not answer or holds what can't be read."""
        try:
            async with answer_within(self._lookup_timeout_s):
                data = await self._client.get(settings_key(tenant_id))
            record = None if data is None else decode_record(data)
        except (RedisError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            raise Overloaded("tenants can't be looked up at the moment", retry_after_s=1.0) from error
        if record is None or record.deleted:
            return None
        return tenant_of(self._secret, tenant_id, record.settings)

    def _may_look_up(self, digest: str) -> bool:
        return self._now() >= self._unavailable_until and (digest in self._lookups or len(self._lookups) < MAX_LOOKUPS)

    async def _look_up(self, digest: str) -> _Outcome:
        """Start a look-up or join the one under way. Shielded: one caller that hangs up must not fail the others."""
        task = self._lookups.get(digest)
        if task is None:
            task = self._lookups[digest] = asyncio.create_task(self._try_to_read(digest))
            task.add_done_callback(lambda _: self._lookups.pop(digest, None))
        return await asyncio.shield(task)

    async def _try_to_read(self, digest: str) -> _Outcome:
        """Read the key and its tenant from Redis. Ends within the timeout, or a little later where
        this process stood still, and never raises."""
        began_at = self._now()
        try:
            async with answer_within(self._lookup_timeout_s):
                return await self._read(digest, began_at)
        except (RedisError, OSError, TimeoutError):
            self._unavailable_until = self._now() + UNAVAILABLE_S
        except msgspec.MsgspecError as error:  # of a later version, perhaps; other keys go on
            log.error("key_unreadable", extra={"key": digest[:ID_DIGITS], "error": type(error).__name__})
        return _Outcome(began_at, has_failed=True)

    async def _read(self, digest: str, began_at: float) -> _Outcome:
        data = await self._client.get(_redis_key(digest))
        if data is None:
            return _Outcome(began_at)
        record = msgspec.json.decode(data, type=_Record)
        if record.revoked:
            return _Outcome(began_at, is_revoked=True)
        data = await self._client.get(settings_key(record.tenant))
        if data is None:
            return _Outcome(began_at)
        tenant = decode_record(data)
        if tenant.deleted:
            return _Outcome(began_at, is_revoked=True)
        return _Outcome(began_at, tenant_of(self._secret, record.tenant, tenant.settings))

    def _conclude(self, digest: str, outcome: _Outcome) -> Tenant:
        now = self._now()
        known = self._known.get(digest)
        if outcome.tenant is not None:
            return self._remember(digest, outcome.tenant, outcome.began_at)
        if not outcome.is_revoked and known is not None and now < known.stale_until:
            if not outcome.has_failed:  # Redis is there but empty; look up again at the usual pace
                self._known[digest] = _Known(known.tenant, now + self._cache_s, known.stale_until)
            return known.tenant
        if outcome.has_failed:
            raise Overloaded("API keys can't be checked at the moment", retry_after_s=1.0)
        self._known.pop(digest, None)
        self._unknown[digest] = now + UNKNOWN_S
        _trim(self._unknown, MAX_UNKNOWN)
        raise Unauthenticated("Incorrect API key provided: it is unknown or revoked")

    def _remember(self, digest: str, tenant: Tenant, began_at: float) -> Tenant:
        self._known[digest] = _Known(tenant, began_at + self._cache_s, began_at + self._stale_s)
        self._known.move_to_end(digest)
        _trim(self._known, MAX_KNOWN)
        return tenant


def _trim(entries: OrderedDict[str, _Known] | OrderedDict[str, float], limit: int) -> None:
    """Drop the oldest entries beyond the limit."""
    while len(entries) > limit:
        entries.popitem(last=False)
