"""A platform's Serve applications by name, for a RayService: what `import_path` in its serveConfigV2 names,
`penstock.cli.serve_apps:gateway` and so on. `args` is what penstock.yaml says; secrets and Redis come by environment.

Ray runs a builder in a process of the Ray cluster whenever an application's `args` have changed; what it raises stands
in the RayService's status. One replica to a pod: each takes a whole unit of the custom resource that the pods of its
worker group have one of.
"""

import asyncio
from typing import TypeVar, cast

import msgspec
from ray import serve
from redis.exceptions import RedisError

from penstock.adapters.config import AdaptersConfig
from penstock.autoscale.serve_agent import serve_agent_app
from penstock.base.config import convert
from penstock.base.environment import redis_url
from penstock.base.errors import ConfigError
from penstock.base.redis import connect
from penstock.cli.applications import Placement, gateway_application, pool_application
from penstock.cli.config import PlatformConfig, PoolConfig
from penstock.wire.discovery import GATEWAY_APP, pool_app_name
from penstock.wire.serve_agent import SERVE_AGENT_RESOURCE, WANTED_KEY, decode_wanted
from penstock.wire.stream_config import StreamConfig
from penstock.wire.targets import TargetsConfig

GATEWAY_RESOURCE = GATEWAY_APP

T = TypeVar("T")


class GatewayArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    config: PlatformConfig
    replicas: int = 1
    """Number of gateway processes: as many as there are gateway pods."""
    drain_s: int | None = None
    """Seconds that answers under way get when a gateway is to go; null: 10."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, not {self.replicas}")


class PoolArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pool: PoolConfig
    adapters: AdaptersConfig | None = None
    """null: no adapters are served."""
    stream: StreamConfig = msgspec.field(default_factory=StreamConfig)
    targets: TargetsConfig = msgspec.field(default_factory=TargetsConfig)
    """The platform's, which count where the pool names none."""
    drain_s: int | None = None
    """Seconds that running sequences get when a replica is to go; null: 30."""


class ServeAgentArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    config: PlatformConfig


def gateway(args: dict[str, object]) -> serve.Application:
    """The application of all gateways; `external_scaler_enabled` stays off. Raises ConfigError."""
    found = convert(args, GatewayArguments, name="args of the application gateway")
    if found.config.redis.url is not None:
        raise ConfigError(
            "redis.url in the args of the application gateway would stand in the open: PENSTOCK_REDIS_URL names the "
            "Redis here"
        )
    return gateway_application(found.config, Placement(found.replicas, GATEWAY_RESOURCE, drain_s=found.drain_s))


def pool(args: dict[str, object]) -> serve.Application:
    """The application of one pool, to be named `pool-NAME`, with `external_scaler_enabled`. Raises ConfigError."""
    found = convert(args, PoolArguments, name="args of a pool's application")
    replicas = first_replicas(found.pool, asyncio.run(_read_targets()))
    placement = Placement(replicas, pool_app_name(found.pool.name), host=None, drain_s=found.drain_s)
    return pool_application(
        found.pool, found.adapters or AdaptersConfig(), placement, found.stream, found.targets.classes
    )


def serve_agent(args: dict[str, object]) -> serve.Application:
    """The application of the autoscaler's agent, to be named `serve-agent`. Raises ConfigError."""
    found = convert(args, ServeAgentArguments, name="args of the application serve-agent")
    return serve_agent_app(
        [GATEWAY_APP, *(pool_app_name(pool.name) for pool in found.config.pools)], SERVE_AGENT_RESOURCE
    )


def first_replicas(pool: PoolConfig, targets: dict[str, int]) -> int:
    """Replicas with which a pool begins. Serve takes what a builder says for the new target whenever it has changed in
    anything, and a second Ray cluster begins at the beginning: a pool that is scaled goes on with what the autoscaler
    last had it at. Serve deploys none with no replica: a pool at zero begins with one, and goes to zero again."""
    if pool.autoscale is None:
        return pool.replicas
    return min(
        max(targets.get(pool_app_name(pool.name), pool.replicas), pool.autoscale.min_replicas, 1),
        pool.autoscale.max_replicas,
    )


async def _read_targets() -> dict[str, int]:
    """The autoscaler's last targets by application; empty where it has written none, or Redis does not answer."""
    url = redis_url("autoscaler")
    if url is None:
        return {}
    client = connect(url)
    try:
        data = cast(bytes | None, await client.get(WANTED_KEY))
        return {} if data is None else decode_wanted(data)
    except (RedisError, OSError, TimeoutError):
        return {}
    finally:
        await client.aclose()
