"""`penstock tenant`, `penstock key` and `penstock usage`: what an operator does to tenants, in the Redis of a platform.

That Redis is the running platform's, found by its state folder; where none runs, the one that the configuration names.
A gateway asks Redis again after gateway.key_cache_s, so nothing has to be sent to it.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec
import redis.asyncio
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from penstock.adapters.registry import forget_tenant
from penstock.base.environment import CLUSTER_SECRET, cluster_secret, redis_url
from penstock.base.errors import ConfigError
from penstock.base.redis import connect
from penstock.base.redis_roles import make_password, url_of
from penstock.cli.config import load_platform
from penstock.cli.state import RunState, StateDir
from penstock.tenancy.charges import month_name
from penstock.tenancy.keys import KEY_PATTERN, KeyInfo, list_keys, revoke_all, revoke_id, revoke_key
from penstock.tenancy.limit_script import read_spent
from penstock.tenancy.share import DEFAULT_SHARE, Share
from penstock.tenancy.tenants import Limits, Record, Settings, Tenants
from penstock.tenancy.usage import UsageRow, last_days, read_usage
from penstock.wire.money import shown

T = TypeVar("T")

EMBEDDED = "embedded"
NO_LIMIT = 0
"""Number by which an operator asks for no limit."""


def redis_of(state: StateDir, config: Path | None) -> str:
    """URL of the platform's Redis. config: where given, it decides; else what runs here, else PENSTOCK_REDIS_URL.
    Raises ConfigError with what to do."""
    run = state.read() if config is None else None
    if run is not None and run.is_alive:
        return _redis_of_run(state, run)
    named = redis_url("operator")
    if config is None and named is not None:
        return named
    if config is None:
        raise ConfigError(
            f"nothing runs with the state folder {state.path}; start it with `penstock up`, or name a configuration "
            "with a redis.url by --config"
        )
    url = load_platform(config).redis.url_for("operator")
    if url is None:
        raise ConfigError(f"{config} has no redis.url, and the embedded Redis is there only while `penstock up` runs")
    return url


def _redis_of_run(state: StateDir, run: RunState) -> str:
    if run.redis == EMBEDDED:
        socket = f"unix://{Path(run.temp_dir) / 'redis' / 'redis.sock'}"
        return url_of(socket, "operator", make_password(state.secret(), "operator"))
    url = load_platform(Path(run.config)).redis.url_for("operator")  # the state folder has it without its password
    if url is None:
        raise ConfigError(
            f"{run.config} has no redis.url any more; name the configuration that was started by --config"
        )
    return url


def secret_of(state: StateDir) -> bytes:
    """The cluster's: of the environment, else of the state folder. Raises ConfigError; one made up now would belong to
    nobody."""
    if CLUSTER_SECRET in os.environ:
        return cluster_secret()
    if not (state.path / "secret").exists():
        raise ConfigError(
            f"the state folder {state.path} holds no cluster secret, from which keys derive; name the platform's by "
            f"--state, or set {CLUSTER_SECRET}"
        )
    return state.secret()


def with_redis(url: str, work: Callable[[redis.asyncio.Redis], Awaitable[T]]) -> T:
    """Raises ConfigError when Redis does not answer."""

    async def main() -> T:
        client = connect(url)
        try:
            return await work(client)
        except (RedisError, OSError, TimeoutError) as error:
            raise ConfigError(f"Redis does not answer: {error}") from error
        finally:
            with suppress(RedisError, OSError):
                await client.aclose()

    return asyncio.run(main())


class TenantInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant as it is shown."""

    id: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_parallel: int | None
    budget: float | None
    """Sum of charges in a calendar month."""
    spent: float | None
    """Sum charged or reserved this month; None if there is no budget."""
    models: tuple[str, ...] | None
    """Names of the models that the tenant may use; None if it may use all."""
    tier_policy: str
    weight: float
    service_class: str
    created: str
    updated: str
    keys: tuple[str, ...]
    """Ids of the tenant's keys."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a tenant's settings. A field that is None stays as it was; a limit of 0 removes the limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel: int | None = None
    budget: float | None = None
    models: tuple[str, ...] | None = None
    """`*`: all."""
    tier_policy: str | None = None
    weight: float | None = None
    service_class: str | None = None

    def applied(self, settings: Settings) -> Settings:
        limits = msgspec.structs.replace(
            settings.limits,
            **{
                name: None if value == NO_LIMIT else value
                for name in ("requests_per_minute", "tokens_per_minute", "max_parallel", "budget")
                if (value := getattr(self, name)) is not None
            },
        )
        models = (
            settings.models
            if self.models is None
            else None
            if "*" in self.models
            else tuple(dict.fromkeys(self.models))
        )
        return Settings(
            limits=limits,
            models=models,
            tier_policy=self.tier_policy or settings.tier_policy,
            weight=settings.weight if self.weight is None else self.weight,
            service_class=self.service_class or settings.service_class,
        )


async def describe(client: redis.asyncio.Redis, tenant_id: str, record: Record) -> TenantInfo:
    limits = record.settings.limits
    spent = None if limits.budget is None else shown(await read_spent(client, tenant_id, month_name(time.time())))
    return TenantInfo(
        id=tenant_id,
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
        max_parallel=limits.max_parallel,
        budget=limits.budget,
        spent=spent,
        models=record.settings.models,
        tier_policy=record.settings.tier_policy,
        weight=record.settings.weight,
        service_class=record.settings.service_class,
        created=_moment(record.created),
        updated=_moment(record.updated),
        keys=tuple(key.id for key in await list_keys(client, tenant_id)),
    )


async def create(client: redis.asyncio.Redis, tenant_id: str, change: Change) -> TenantInfo:
    """Make a tenant, with the default limits where `change` names none."""
    settings = change.applied(Settings(limits=await Tenants(client).defaults()))
    return await describe(client, tenant_id, await Tenants(client).create(tenant_id, settings, time.time()))


async def change_defaults(client: redis.asyncio.Redis, change: Change) -> Limits:
    """Change the limits of tenants that are made from now on; returns what they are."""
    before = await Tenants(client).defaults()
    limits = change.applied(Settings(limits=before)).limits
    if limits != before:
        await Tenants(client).set_defaults(limits)
    return limits


async def change_settings(client: redis.asyncio.Redis, tenant_id: str, change: Change) -> TenantInfo:
    return await describe(client, tenant_id, await Tenants(client).change(tenant_id, change.applied, time.time()))


async def find(client: redis.asyncio.Redis, tenant_id: str) -> TenantInfo:
    return await describe(client, tenant_id, await Tenants(client).get(tenant_id))


async def find_all(client: redis.asyncio.Redis) -> list[TenantInfo]:
    return [await describe(client, tenant_id, record) for tenant_id, record in (await Tenants(client).all()).items()]


async def delete(client: redis.asyncio.Redis, tenant_id: str) -> int:
    """Delete a tenant; returns how many keys it had. Once the tombstone is written none of them is accepted, even if
    the rest of the deletion fails."""
    await Tenants(client).delete(tenant_id, time.time())
    await forget_tenant(client, tenant_id)
    return await revoke_all(client, tenant_id)


async def revoke(client: redis.asyncio.Redis, secret: bytes, key_or_id: str) -> str:
    """Revoke a key; returns the line to print. A key that nobody knows is refused already."""
    if KEY_PATTERN.fullmatch(key_or_id):
        await revoke_key(client, secret, key_or_id)
        return "revoked"
    info = await revoke_id(client, key_or_id)
    return f"revoked {info.id} of {info.tenant}"


async def keys_of(client: redis.asyncio.Redis, tenant_id: str | None) -> list[KeyInfo]:
    ids = [tenant_id] if tenant_id is not None else list(await Tenants(client).all())
    return [key for each in ids for key in await list_keys(client, each)]


async def usage_of(client: redis.asyncio.Redis, tenant_id: str | None, num_days: int) -> dict[str, list[UsageRow]]:
    days = last_days(num_days, time.time())
    ids = [tenant_id] if tenant_id is not None else list(await Tenants(client).all())
    return {each: await read_usage(client, each, days) for each in ids}


def show_tenants(tenants: list[TenantInfo], console: Console) -> None:
    """Print a table of tenants; columns of budgets and shares where one of them has any."""
    has_budgets = any(tenant.budget is not None for tenant in tenants)
    has_shares = any(Share(tenant.weight, tenant.service_class) != DEFAULT_SHARE for tenant in tenants)
    columns = ["tenant", "requests/min", "tokens/min", "at once", "models", "tier policy", "keys", "created"]
    table = Table(*columns, *(["budget", "spent"] if has_budgets else []), *(["share"] if has_shares else []))
    for tenant in tenants:
        limits = [
            _limit(value) for value in (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_parallel)
        ]
        models = "all" if tenant.models is None else ", ".join(tenant.models)
        keys = ", ".join(tenant.keys) or "none"
        budget = [_amount(tenant.budget), _amount(tenant.spent)] if has_budgets else []
        share = [f"{tenant.weight:g}, {tenant.service_class}"] if has_shares else []
        table.add_row(tenant.id, *limits, models, tenant.tier_policy, keys, tenant.created, *budget, *share)
    console.print(table)


def show_defaults(limits: Limits, console: Console) -> None:
    table = Table("requests/min", "tokens/min", "at once", "budget", title="limits of new tenants")
    counts = [_limit(value) for value in (limits.requests_per_minute, limits.tokens_per_minute, limits.max_parallel)]
    table.add_row(*counts, _amount(limits.budget))
    console.print(table)


def show_keys(keys: list[KeyInfo], console: Console) -> None:
    table = Table("key", "tenant", "created")
    for key in keys:
        table.add_row(key.id, key.tenant, _moment(key.created))
    console.print(table)


def show_usage(usage: dict[str, list[UsageRow]], console: Console) -> None:
    """Print a table of usage; columns of money where there is any."""
    has_money = any(row.used.cost_nano or row.used.charge_nano for rows in usage.values() for row in rows)
    columns = ["tenant", "day", "model", "adapter", "requests", "prompt", "cached", "completion"]
    table = Table(*columns, *(["cost", "charge"] if has_money else []))
    for tenant_id, rows in usage.items():
        for row in rows:
            *counts, cost_nano, charge_nano = row.used
            money = [f"{shown(nano):,.6f}" for nano in (cost_nano, charge_nano)] if has_money else []
            table.add_row(tenant_id, row.day, row.model, row.adapter, *(f"{count:,}" for count in counts), *money)
    console.print(table)


def usage_tree(usage: dict[str, list[UsageRow]]) -> list[dict[str, object]]:
    """The usage of all tenants as it is printed with --json."""
    return [_usage_entry(tenant_id, row) for tenant_id, rows in usage.items() for row in rows]


def _usage_entry(tenant_id: str, row: UsageRow) -> dict[str, object]:
    counts = row.used._asdict()
    money = {"cost": shown(counts.pop("cost_nano")), "charge": shown(counts.pop("charge_nano"))}
    return {"tenant": tenant_id, "day": row.day, "model": row.model, "adapter": row.adapter or None, **counts, **money}


def _limit(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _amount(value: float | None) -> str:
    return "none" if value is None else f"{value:,.10g}"


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
