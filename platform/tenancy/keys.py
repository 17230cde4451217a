"""API keys and the tenants they belong to.

A key is `sk-penstock-` and 48 hex digits (192 bits). Redis knows it only by its blake2b keyed with the cluster secret, so a copy of Redis
opens nothing. Revoking leaves a tombstone, for that is what tells "revoked" from "Redis lost its data": a key a gateway knew goes on for
`STALE_S` when Redis is away or empty, a tombstoned one ends with the next look-up.
"""

import asyncio
import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from penstock.wire.errors import InvalidRequest, Overloaded, Unauthenticated

KEY_PATTERN = re.compile(r"sk-penstock-[0-9a-f]{48}")
TENANT_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LOOKUP_TIMEOUT_S = 0.5
AWAY_S = 0.5
"""After a failed look-up Redis is left alone for that long."""
STALE_S = 12 * 3600.0
"""How long a known key goes on without Redis confirming it."""
TOMBSTONE_S = 7 * 86400
"""Must exceed STALE_S."""
UNKNOWN_S = 2.0
"""How long an unknown key is refused without asking again: also the longest a new key may take to work."""
MAX_KNOWN = 65536
MAX_UNKNOWN = 16384
MAX_LOOKUPS = 256
"""Look-ups at once in one gateway; guessed keys beyond that are turned away, known ones go on."""


@dataclass(frozen=True, slots=True)
class Tenant:
    id: str
    salt: bytes
    """Cache salt: what makes this tenant's KV blocks its own. Derived, never stored."""


class _Record(msgspec.Struct, frozen=True):
    """What Redis holds of a key."""

    tenant: str
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    tenant: Tenant
    fresh_until: float
    stale_until: float


class _Outcome(msgspec.Struct, frozen=True):
    """Of a look-up. Neither record nor failure: Redis has no such key."""

    record: _Record | None = None
    has_failed: bool = False


class KeyReader(Protocol):
    """The part of redis.asyncio.Redis that a look-up needs."""

    async def get(self, name: str) -> bytes | str | None: ...


def tenant_of(secret: bytes, tenant_id: str) -> Tenant:
    """The same on every gateway and replica that shares the cluster secret."""
    return Tenant(tenant_id, hashlib.blake2b(tenant_id.encode(), key=secret, digest_size=32, person=b"penstock-tenant").digest())


async def create_key(client: redis.asyncio.Redis, secret: bytes, tenant_id: str) -> str:
    """A new key of that tenant; shown now and never again. Raises RedisError, or InvalidRequest for an id that is not a plain name."""
    if TENANT_PATTERN.fullmatch(tenant_id) is None:
        raise InvalidRequest(f"a tenant id is 1 to 64 letters, digits, dots, dashes or underscores, not {tenant_id!r}")
    key = f"sk-penstock-{secrets.token_hex(24)}"
    await put_key(client, secret, tenant_id, key)
    return key


async def put_key(client: redis.asyncio.Redis, secret: bytes, tenant_id: str, key: str) -> None:
    """Make a key that was created before known again, for instance after Redis lost its data."""
    if KEY_PATTERN.fullmatch(key) is None:
        raise InvalidRequest("that is not a key that create_key made")
    await client.set(_redis_key(_digest(secret, key)), msgspec.json.encode(_Record(tenant_id)))


async def revoke_key(client: redis.asyncio.Redis, secret: bytes, key: str) -> None:
    """No gateway accepts it after its `cache_s`. Unknown keys are fine. Raises RedisError."""
    await client.set(_redis_key(_digest(secret, key)), msgspec.json.encode(_Record("", revoked=True)), ex=TOMBSTONE_S)


def _redis_key(digest: str) -> str:
    return f"penstock:key:{{{digest}}}"


def _digest(secret: bytes, key: str) -> str:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), key=secret, digest_size=20, person=b"penstock-apikey").hexdigest()


class KeyStore:
    """A gateway's view of the keys. Every method runs on one event loop.

    secret: the cluster's, 16 to 64 bytes. cache_s: age at which a key is looked up again. now: a monotonic clock, seconds.
    """

    def __init__(
        self, client: KeyReader, secret: bytes, cache_s: float, now: Callable[[], float] = time.monotonic, lookup_timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> None:
        self._client = client
        self._secret = secret
        self._cache_s = cache_s
        self._now = now
        self._lookup_timeout_s = lookup_timeout_s
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[_Outcome]] = {}
        self._away_until = float("-inf")

    def cached(self, key: str) -> Tenant | None:
        """Without waiting: the key's tenant where nothing has to be asked, else None."""
        known = self._known.get(_digest(self._secret, key))
        if known is None:
            return None
        now = self._now()
        if now < known.fresh_until or (now < self._away_until and now < known.stale_until):
            return known.tenant
        return None

    async def tenant(self, key: str) -> Tenant:
        """Raises Unauthenticated for a key that is malformed, unknown or revoked, Overloaded when that can't be found out now."""
        if (tenant := self.cached(key)) is not None:
            return tenant
        if KEY_PATTERN.fullmatch(key) is None:
            raise Unauthenticated("the API key is malformed; keys begin with sk-penstock-")
        digest = _digest(self._secret, key)
        if self._unknown.get(digest, float("-inf")) > self._now():
            raise Unauthenticated("the API key is unknown or revoked")
        outcome = await self._ask(digest) if self._may_ask(digest) else _Outcome(has_failed=True)
        return self._conclude(digest, outcome)

    def _may_ask(self, digest: str) -> bool:
        return self._now() >= self._away_until and (digest in self._lookups or len(self._lookups) < MAX_LOOKUPS)

    async def _ask(self, digest: str) -> _Outcome:
        """Joins the look-up under way. Shielded: one caller that hangs up must not fail the others."""
        task = self._lookups.get(digest)
        if task is None:
            task = self._lookups[digest] = asyncio.create_task(self._look_up(digest))
            task.add_done_callback(lambda _: self._lookups.pop(digest, None))
        return await asyncio.shield(task)

    async def _look_up(self, digest: str) -> _Outcome:
        """Ends within the timeout and never raises."""
        try:
            async with asyncio.timeout(self._lookup_timeout_s):
                data = await self._client.get(_redis_key(digest))
            return _Outcome(msgspec.json.decode(data, type=_Record) if data is not None else None)
        except (RedisError, OSError, TimeoutError, msgspec.MsgspecError):
            self._away_until = self._now() + AWAY_S
            return _Outcome(has_failed=True)

    def _conclude(self, digest: str, outcome: _Outcome) -> Tenant:
        now = self._now()
        known = self._known.get(digest)
        if outcome.record is not None and not outcome.record.revoked:
            return self._learn(digest, outcome.record, now)
        if outcome.record is None and known is not None and now < known.stale_until:
            if not outcome.has_failed:  # Redis is there but empty; ask again at the usual pace
                self._known[digest] = _Known(known.tenant, now + self._cache_s, known.stale_until)
            return known.tenant
        if outcome.has_failed:
            raise Overloaded("API keys can't be checked at the moment", retry_after_s=1.0)
        self._known.pop(digest, None)
        self._unknown[digest] = now + UNKNOWN_S
        _trim(self._unknown, MAX_UNKNOWN)
        raise Unauthenticated("the API key is unknown or revoked")

    def _learn(self, digest: str, record: _Record, now: float) -> Tenant:
        known = self._known.get(digest)
        tenant = known.tenant if known is not None and known.tenant.id == record.tenant else tenant_of(self._secret, record.tenant)
        self._known[digest] = _Known(tenant, now + self._cache_s, now + STALE_S)
        self._known.move_to_end(digest)
        _trim(self._known, MAX_KNOWN)
        return tenant


def _trim(entries: OrderedDict[str, _Known] | OrderedDict[str, float], limit: int) -> None:
    """Oldest first."""
    while len(entries) > limit:
        entries.popitem(last=False)
