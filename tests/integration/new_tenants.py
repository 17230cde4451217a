"""Tenants of a running platform, made without its command: straight into its Redis."""

import asyncio
import time

from bench.support.platform_process import PlatformProcess
from penstock.base.redis import connect
from penstock.cli.state import StateDir
from penstock.tenancy.keys import create_key
from penstock.tenancy.tenants import Settings, Tenants


def new_key(platform: PlatformProcess, tenant: str, settings: Settings) -> str:
    """Create a tenant with these settings; returns a key of it."""

    async def create() -> str:
        async with connect(platform.redis_url) as client:
            await Tenants(client).create(tenant, settings, time.time())
            return await create_key(client, StateDir(platform.state).secret(), tenant)

    return asyncio.run(create())
