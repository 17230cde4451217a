"""Tenants of a running platform, made straight in its Redis."""

import time
from collections.abc import Mapping

from bench.support.platform_process import PlatformProcess
from penstock.base.redis import connect
from penstock.cli.state import StateDir
from penstock.tenancy.keys import create_key
from penstock.tenancy.tenants import Settings, Tenants


async def make_keys(platform: PlatformProcess, tenants: Mapping[str, Settings]) -> dict[str, str]:
    """A key for each of these tenants, which are made."""
    secret, keys = StateDir(platform.state).secret(), {}
    async with connect(platform.redis_url) as client:
        for name, settings in tenants.items():
            await Tenants(client).create(name, settings, time.time())
            keys[name] = await create_key(client, secret, name)
    return keys
