"""One way to connect to Redis: short timeouts, no hidden retries, bytes in and out.

Retries are the caller's decision, which depends on whether the command may run twice and how long there is to wait.
"""

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock.base.redis_connections import TcpConnection, TlsConnection, UnixConnection
from penstock.base.redis_url import check_redis_url, open_many, parse_many

CONNECT_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S = 2.0
MAX_CONNECTIONS = 32
"""Connections of one client; a command that finds none free waits up to COMMAND_TIMEOUT_S."""

_CONNECTIONS = {"redis": TcpConnection, "rediss": TlsConnection, "unix": UnixConnection}


def connect(url: str) -> redis.asyncio.Redis:
    """A client of `redis://`, `rediss://` or `unix://`, or of several servers (`base.redis_url`); connects on first
    use. Errors are redis-py's, raised at once; ConfigError for an address that can't be read.

    An address by TLS may name certificates, as `redis_url.with_tls` writes them.
    """
    check_redis_url(url, "the address of Redis")
    servers = parse_many(url)
    if servers is not None:
        return open_many(
            servers,
            {
                "socket_connect_timeout": CONNECT_TIMEOUT_S,
                "socket_timeout": COMMAND_TIMEOUT_S,
                "client_name": "penstock",
            },
        )
    pool: redis.asyncio.BlockingConnectionPool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=COMMAND_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=COMMAND_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        client_name="penstock",
    )
    pool.connection_class = _CONNECTIONS[url.partition("://")[0]]
    return redis.asyncio.Redis.from_pool(pool)
