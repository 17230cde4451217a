"""Tenants and keys from a file, as a Secret of Kubernetes brings them: `penstock tenant apply FILE`.

What the file says of a tenant is how it begins. One that is there stays as it is, with what an operator has set since,
and so do tenants that the file doesn't name; keys are added. What an operator took away stays away: a deleted tenant is
not made again, nor a revoked key accepted. So it can run at every start.

Decisions: docs/decisions/kubernetes.md
"""

import time

import msgspec
import redis.asyncio

from penstock.base.errors import ConfigError
from penstock.cli.tenant import Change
from penstock.tenancy.keys import KEY_PATTERN, put_key
from penstock.tenancy.tenants import Settings, Tenants
from penstock.wire.errors import InvalidRequest


class FirstTenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    keys: tuple[str, ...] = ()
    """API keys in the form that `penstock key create` prints."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel: int | None = None
    models: tuple[str, ...] | None = None
    """Models that the tenant may use; null: all."""
    tier_policy: str | None = None

    def __post_init__(self) -> None:
        for number, key in enumerate(self.keys):
            if KEY_PATTERN.fullmatch(key) is None:
                raise ConfigError(
                    f"tenants[{self.name!r}].keys[{number}] is no key: sk-penstock- and 48 hex digits, as openssl "
                    "rand -hex 24 gives them"
                )

    @property
    def settings(self) -> Settings:
        change = Change(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_parallel=self.max_parallel,
            models=self.models,
            tier_policy=self.tier_policy,
        )
        return change.applied(Settings())


class FirstTenants(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tenants: tuple[FirstTenant, ...] = ()


async def apply(client: redis.asyncio.Redis, secret: bytes, wanted: FirstTenants) -> list[str]:
    """Make tenants and keys that are not there yet; returns a line about each tenant. Raises RedisError, and
    InvalidRequest for settings that can't be."""
    return [f"{tenant.name}: {await _apply(client, secret, tenant)}" for tenant in wanted.tenants]


async def _apply(client: redis.asyncio.Redis, secret: bytes, wanted: FirstTenant) -> str:
    settings = wanted.settings
    settings.check()
    try:
        await Tenants(client).ensure(wanted.name, time.time(), settings)
    except InvalidRequest as error:
        return f"left out, {error.message}"
    accepted = [await put_key(client, secret, wanted.name, key) for key in wanted.keys]
    num_revoked = accepted.count(False)
    return f"{sum(accepted)} keys" + (f", {num_revoked} left out, they were revoked" if num_revoked else "")
