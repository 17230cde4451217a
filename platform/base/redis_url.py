"""Addresses of Redis: what is wrong with one, and those of more than one server: `redis+sentinel://` and
`redis+cluster://`, with TLS `rediss+...`.

    redis+sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT/SERVICE[/DB][?sentinel_password=WORD]
    redis+cluster://[USER:PASSWORD@]HOST:PORT,HOST:PORT

With TLS an address may name certificates as one of a single server does: ssl_ca_certs, ssl_certfile, ssl_keyfile.

Behind Sentinel, every new connection asks the sentinels who the master is; a connection to one that was demoted ends.
Of a cluster, any node that answers tells the others. All keys that one command or script touches share a hash tag, so
that they lie in one slot (tests/unit/base/test_redis_url.py).
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import parse_qsl, unquote, urlencode

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, ClusterPipeline, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError

from penstock.base.errors import ConfigError
from penstock.base.redis_connections import SentinelConnection, TcpConnection, TlsConnection, TlsSentinelConnection

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
SENTINEL_PORT = 26379
REDIS_PORT = 6379
ESCAPES = "in a password the characters / ? # @ are written %2F %3F %23 %40"
CERTIFICATES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Parameters of an address, as redis-py calls them: paths of PEM files."""
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
    ca: str | None = None
    """Path of the CAs that the servers' certificates are checked by; None: the system's."""
    certificate: str | None = None
    """Path of our own certificate; None: none is shown."""
    key: str | None = None


def check_redis_url(url: str, name: str = "redis.url") -> None:
    """Raises ConfigError for an address that no client can be made of. The sentence does not have its password. name:
    of the setting."""
    scheme, separator, rest = url.partition("://")
    if scheme not in SCHEMES or not separator:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise ConfigError(f"{name} must begin with one of {known}" + (f", not {scheme[:20]!r}" if separator else ""))
    if scheme != "unix" and (
        "#" in rest or ("@" in rest.replace("?", "/").partition("/")[2] and "@" not in _login(rest))
    ):
        raise ConfigError(f"{name} can't be read: {ESCAPES}")
    if parse_many(url, name) is None:
        try:
            parse_url(url)
        except ValueError:
            form = f"{scheme}://[USER:PASSWORD@]HOST:PORT" if scheme != "unix" else "unix://PATH"
            raise ConfigError(f"{name} can't be read: it has the form {form}, and {ESCAPES}") from None


def _login(rest: str) -> str:
    """What stands before the hosts, with the @."""
    netloc = rest.replace("?", "/").partition("/")[0]
    return netloc[: netloc.rfind("@") + 1]


def without_credentials(url: str) -> str:
    """An address as it may be shown: without user, passwords and parameters."""
    scheme, separator, rest = url.partition("://")
    rest = rest.partition("?")[0]
    return f"{scheme}{separator}{rest.removeprefix(_login(rest))}"


def with_tls(url: str, ca: str | None, certificate: str | None, key: str | None) -> str:
    """An address by TLS that names the files of its certificates, as redis-py reads it. What is None stays as it
    was."""
    place, _, query = url.partition("?")
    named = {name: path for name, path in zip(CERTIFICATES, (ca, certificate, key), strict=True) if path is not None}
    found = urlencode(dict(parse_qsl(query)) | named, safe="/")
    return f"{place}?{found}" if found else place


def parse_many(url: str, name: str = "redis.url") -> ManyServers | None:
    """The parts of an address of several servers; None for one of a single server. Raises ConfigError. name: of the
    setting."""
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
    default_port = SENTINEL_PORT if kind == "sentinel" else REDIS_PORT
    hosts = tuple(_host(place, default_port, name) for place in places.split(","))
    service, _, db = path.strip("/").partition("/")
    if kind == "cluster" and service:
        raise ConfigError(f"{name}: a Redis Cluster has database 0 only; nothing follows the hosts, not {service!r}")
    if kind == "sentinel" and (not service or not (db or "0").isdigit()):
        raise ConfigError(
            f"{name}: behind Sentinel the address ends with the master's name (and perhaps a number, its database): "
            f"{scheme}://{places}/mymaster"
        )
    said = dict(parse_qsl(query))
    for parameter in said.keys() - {*CERTIFICATES, *(["sentinel_password"] if kind == "sentinel" else [])}:
        raise ConfigError(f"{name}: the parameter {parameter} is not known for {scheme}://")
    if flavour == "redis" and (certificates := said.keys() & set(CERTIFICATES)):
        raise ConfigError(f"{name}: {min(certificates)} is for TLS: rediss+{many}://")
    return ManyServers(
        kind,
        hosts,
        service,
        unquote(username) or None,
        unquote(password) or None,
        said.get("sentinel_password"),
        int(db or 0),
        flavour == "rediss",
        *(said.get(parameter) for parameter in CERTIFICATES),
    )


def _host(place: str, default_port: int, name: str) -> tuple[str, int]:
    host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    if not colon:
        host, port = place, str(default_port)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{name}: each host is HOST:PORT, and commas stand between them, not {place!r}")
    return host.strip("[]"), int(port)


class _Sentinels(Sentinel):
    """redis-py moves the sentinel that answered to the front of its list. Of several lookups at once, each of which has
    its place from before the others moved theirs, one wrote a sentinel twice and lost another for good, its connections
    open. Here each lookup moves places in a list of its own."""

    async def discover_master(self, service_name: str) -> Any:
        own = copy.copy(self)
        own.sentinels = list(self.sentinels)
        found = await super(_Sentinels, own).discover_master(service_name)
        self.sentinels = own.sentinels
        return found


class _SentinelPool(SentinelConnectionPool):
    """redis-py leaves the connections to the sentinels open when a client is closed."""

    async def aclose(self) -> None:
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()


class _Cluster(RedisCluster):
    """redis-py's client, whose errors are all redis-py's. When a node dies under several commands at once, one closes
    the connection that another one is just opening, or changes the table that it reads, which shows as an
    AttributeError, a KeyError and others; and RedisClusterException (no node answers) is no RedisError. All mean that
    Redis is away."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().execute_command(*args, **kwargs)
        except (RedisError, OSError):
            raise
        except Exception as error:
            raise _lost(error) from error

    def pipeline(self, transaction: Any | None = None, shard_hint: Any | None = None) -> ClusterPipeline:
        assert not transaction, "the transactions of redis-py's asynchronous cluster client use threads"
        assert shard_hint is None
        return _Pipeline(self)  # type: ignore[abstract]


class _Pipeline(ClusterPipeline):
    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        try:
            return await super().execute(raise_on_error, allow_redirections)
        except (RedisError, OSError):
            raise
        except Exception as error:
            raise _lost(error) from error


def _lost(error: Exception) -> ConnectionLost:
    return ConnectionLost(f"the cluster is away: {type(error).__name__}")


def open_many(servers: ManyServers, options: Mapping[str, float | str]) -> redis.asyncio.Redis:
    """A client of them; it connects on first use. options: timeouts in seconds and the client's name, as redis-py calls
    them. A cluster's client has the same commands, but none that names keys of several slots, and no transactions."""
    retry = Retry(NoBackoff(), 0)
    login = {"username": servers.username, "password": servers.password}
    files = dict(zip(CERTIFICATES, (servers.ca, servers.certificate, servers.key), strict=True))
    by_tls = {"ssl": True, **files} if servers.is_tls else {}
    connection_class = TlsConnection if servers.is_tls else TcpConnection
    if servers.kind == "cluster":
        cluster = _Cluster(
            startup_nodes=[ClusterNode(host, port) for host, port in servers.hosts],
            max_connections=MAX_CONNECTIONS,
            retry=retry,
            **by_tls,  # type: ignore[arg-type]
            **login,  # type: ignore[arg-type]
            **options,  # type: ignore[arg-type]
        )
        cluster.connection_kwargs["connection_class"] = connection_class  # so every node that it hears of is made
        for node in cluster.startup_nodes:
            node.connection_class = connection_class
        return cast(redis.asyncio.Redis, cluster)
    asking = {**options, **by_tls, "password": servers.sentinel_password, "retry": retry}
    sentinel = _Sentinels(  # type: ignore[no-untyped-call]
        servers.hosts, sentinel_kwargs=asking, retry=retry, db=servers.db, **login, **options
    )
    for each in sentinel.sentinels:
        each.connection_pool.connection_class = connection_class
    to_master: dict[str, Any] = {"connection_class": SentinelConnection}
    if servers.is_tls:
        to_master = {"connection_class": TlsSentinelConnection, **files}
    found = sentinel.master_for(
        servers.service, connection_pool_class=_SentinelPool, max_connections=MAX_CONNECTIONS, **to_master
    )
    return cast(redis.asyncio.Redis, found)
