"""Addresses of more than one Redis server: `redis+sentinel://` and `redis+cluster://`, with TLS `rediss+...`.

    redis+sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT/SERVICE[/DB][?sentinel_password=WORD]
    redis+cluster://[USER:PASSWORD@]HOST:PORT,HOST:PORT

Behind Sentinel, every new connection asks the sentinels who the master is; a connection to one that was demoted ends.
Of a cluster, any node that answers tells the others. All keys that one command or script touches share a hash tag, so
that they lie in one slot (tests/unit/base/test_redis_url.py).
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import parse_qs, unquote

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, ClusterPipeline, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisClusterException

from penstock.base.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
SENTINEL_PORT = 26379
REDIS_PORT = 6379
MAX_CONNECTIONS = 512
"""Connections to a master behind Sentinel, or to one node of a cluster; one more is an error at once."""


class ManyServers(NamedTuple):
    """A parsed address of several servers."""

    kind: Literal["sentinel", "cluster"]
    hosts: tuple[tuple[str, int], ...]
    """Sentinels, or nodes of the cluster to begin with."""
    service: str
    """Name of the master that the sentinels watch; empty for a cluster."""
    username: str | None
    password: str | None
    """Password of the servers with the data."""
    sentinel_password: str | None
    db: int
    is_tls: bool


def check_redis_url(url: str, name: str = "redis.url") -> None:
    """Raises ConfigError for an address that no client can be made of. The sentence does not have its password. name:
    of the setting."""
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES or "://" not in url:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise ConfigError(f"{name} must begin with one of {known}, not {scheme[:20]!r}")
    parse_many(url)


def parse_many(url: str) -> ManyServers | None:
    """The parts of an address of several servers; None for one of a single server. Raises ConfigError."""
    scheme, _, rest = url.partition("://")
    flavour, _, many = scheme.partition("+")
    if flavour not in ("redis", "rediss") or many not in ("sentinel", "cluster"):
        return None
    kind: Literal["sentinel", "cluster"] = "sentinel" if many == "sentinel" else "cluster"
    # by hand: urllib.parse takes several hosts, one of them in brackets, in some versions of Python only
    rest, _, query = rest.partition("?")
    netloc, _, path = rest.partition("/")
    login, _, places = netloc.rpartition("@")
    username, _, password = login.partition(":")
    hosts = tuple(_host(place, SENTINEL_PORT if kind == "sentinel" else REDIS_PORT) for place in places.split(","))
    service, _, db = path.strip("/").partition("/")
    if kind == "cluster" and service:
        raise ConfigError(f"redis.url: a Redis Cluster has database 0 only; nothing follows the hosts, not {service!r}")
    if kind == "sentinel" and (not service or not (db or "0").isdigit()):
        raise ConfigError(
            f"redis.url: behind Sentinel the address ends with the master's name (and perhaps a number, its database): "
            f"{scheme}://{places}/mymaster"
        )
    return ManyServers(
        kind,
        hosts,
        service,
        unquote(username) or None,
        unquote(password) or None,
        next(iter(parse_qs(query).get("sentinel_password", [])), None),
        int(db or 0),
        flavour == "rediss",
    )


def _host(place: str, default_port: int) -> tuple[str, int]:
    host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    if not colon:
        host, port = place, str(default_port)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"redis.url: each host is HOST:PORT, and commas stand between them, not {place!r}")
    return host.strip("[]"), int(port)


class _SentinelPool(SentinelConnectionPool):
    """redis-py leaves the connections to the sentinels open when a client is closed."""

    async def aclose(self) -> None:
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()


class _Cluster(RedisCluster):
    """redis-py's client, whose errors are all redis-py's. When a node dies under several commands at once, one closes
    the connection that another one is just opening, which shows as an AttributeError; and RedisClusterException (no
    node answers) is no RedisError. Both mean that Redis is away."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().execute_command(*args, **kwargs)
        except (AttributeError, RedisClusterException) as error:
            raise _lost(error) from error

    def pipeline(self, transaction: Any | None = None, shard_hint: Any | None = None) -> ClusterPipeline:
        assert not transaction, "the transactions of redis-py's asynchronous cluster client use threads"
        assert shard_hint is None
        return _Pipeline(self)  # type: ignore[abstract]


class _Pipeline(ClusterPipeline):
    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        try:
            return await super().execute(raise_on_error, allow_redirections)
        except (AttributeError, RedisClusterException) as error:
            raise _lost(error) from error


def _lost(error: Exception) -> ConnectionLost:
    return ConnectionLost(f"the cluster is away: {type(error).__name__}")


def open_many(servers: ManyServers, options: Mapping[str, float | str]) -> redis.asyncio.Redis:
    """A client of them; it connects on first use. options: timeouts in seconds and the client's name, as redis-py calls
    them. A cluster's client has the same commands, but none that names keys of several slots, and no transactions."""
    retry = Retry(NoBackoff(), 0)
    login = {"username": servers.username, "password": servers.password}
    if servers.kind == "cluster":
        return cast(
            redis.asyncio.Redis,
            _Cluster(
                startup_nodes=[ClusterNode(host, port) for host, port in servers.hosts],
                max_connections=MAX_CONNECTIONS,
                retry=retry,
                ssl=servers.is_tls,
                **login,  # type: ignore[arg-type]
                **options,  # type: ignore[arg-type]
            ),
        )
    asking = {**options, "password": servers.sentinel_password, "ssl": servers.is_tls, "retry": retry}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        servers.hosts, sentinel_kwargs=asking, retry=retry, ssl=servers.is_tls, db=servers.db, **login, **options
    )
    return cast(
        redis.asyncio.Redis,
        sentinel.master_for(servers.service, connection_pool_class=_SentinelPool, max_connections=MAX_CONNECTIONS),
    )
