"""Tenants and keys from a file, as a Secret of Kubernetes brings them: `penstock tenant apply FILE`.

What the file says of a tenant is how it begins. One that is there stays as it is, with what an operator has set since,
and so do tenants that the file doesn't name; keys are added. What an operator took away stays away: a deleted tenant is
not made again, nor a revoked key accepted. So it can run at every start. The file may also say which limits new tenants
get.

Decisions: docs/decisions/kubernetes.md
"""

import time

import msgspec
import redis.asyncio

from penstock.base.errors import ConfigError
from penstock.cli.tenant import Change
from penstock.tenancy.keys import KEY_PATTERN, put_key
from penstock.tenancy.tenants import Limits, Settings, Tenants
from penstock.wire.errors import InvalidRequest


class FirstTenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    keys: tuple[str, ...] = ()
    """API keys in the form that `penstock key create` prints."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel: int | None = None
    budget: float | None = None
    models: tuple[str, ...] | None = None
    """Models that the tenant may use; null: all."""
    tier_policy: str | None = None
    weight: float | None = None
    service_class: str | None = None

    def __post_init__(self) -> None:
        for number, key in enumerate(self.keys):
            if KEY_PATTERN.fullmatch(key) is None:
                raise ConfigError(
                    f"tenants[{self.name!r}].keys[{number}] is no key: sk-penstock- and 48 hex digits, as openssl "
                    "rand -hex 24 gives them"
                )

    def settings(self, defaults: Limits) -> Settings:
        """Settings that the tenant begins with. defaults: its limits where the file names none."""
        change = Change(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_parallel=self.max_parallel,
            budget=self.budget,
            models=self.models,
            tier_policy=self.tier_policy,
            weight=self.weight,
            service_class=self.service_class,
        )
        return change.applied(Settings(limits=defaults))


class DefaultLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of tenants that are made from now on; 0 or null: no such limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel: int | None = None
    budget: float | None = None

    @property
    def limits(self) -> Limits:
        return Limits(
            requests_per_minute=self.requests_per_minute or None,
            tokens_per_minute=self.tokens_per_minute or None,
            max_parallel=self.max_parallel or None,
            budget=self.budget or None,
        )


class FirstTenants(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tenants: tuple[FirstTenant, ...] = ()
    defaults: DefaultLimits | None = None
    """Default limits; null: they stay as they are."""


async def apply(client: redis.asyncio.Redis, secret: bytes, wanted: FirstTenants) -> list[str]:
    """Make tenants and keys that are not there yet; returns a line about each tenant. Raises RedisError, and
    InvalidRequest for settings that can't be."""
    if wanted.defaults is not None:
        await Tenants(client).set_defaults(wanted.defaults.limits)
    defaults = await Tenants(client).defaults()
    return [f"{tenant.name}: {await _apply(client, secret, tenant, defaults)}" for tenant in wanted.tenants]


async def _apply(client: redis.asyncio.Redis, secret: bytes, wanted: FirstTenant, defaults: Limits) -> str:
    settings = wanted.settings(defaults)
    settings.check()
    try:
        await Tenants(client).ensure(wanted.name, time.time(), settings)
    except InvalidRequest as error:
        return f"left out, {error.message}"
    accepted = [await put_key(client, secret, wanted.name, key) for key in wanted.keys]
    num_revoked = accepted.count(False)
    return f"{sum(accepted)} keys" + (f", {num_revoked} left out, they were revoked" if num_revoked else "")
