"""One way to connect to Redis: short timeouts, no hidden retries, bytes in and out.

Retries are the caller's decision, which depends on whether the command may run twice and how long there is to wait.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis.asyncio
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock.base.redis_url import open_many, parse_many

CONNECT_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S = 2.0
MAX_CONNECTIONS = 32
"""Connections of one client; a command that finds none free waits up to COMMAND_TIMEOUT_S."""


class ReadingConnection(SSLConnection):
    """A connection by TLS that reads its certificates again each time it connects: they are rotated while it lives."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        arguments: Mapping[str, Any] = super()._connection_arguments()
        return arguments


def with_tls(url: str, ca: str | None, certificate: str | None, key: str | None) -> str:
    """A rediss:// URL that names the files of its certificates, as redis-py reads it. What is None stays as it was."""
    parts = urlsplit(url)
    named = {"ssl_ca_certs": ca, "ssl_certfile": certificate, "ssl_keyfile": key}
    query = dict(parse_qsl(parts.query)) | {name: path for name, path in named.items() if path is not None}
    return urlunsplit(parts._replace(query=urlencode(query, safe="/")))


def connect(url: str) -> redis.asyncio.Redis:
    """A client of `redis://`, `rediss://` or `unix://`, or of several servers (`base.redis_url`); connects on first
    use. Errors are redis-py's, raised at once; ConfigError for an address that can't be read.

    A `rediss://` may name certificates, as `with_tls` writes them: in ssl_ca_certs, ssl_certfile and ssl_keyfile.
    """
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
    if url.startswith("rediss://"):
        pool.connection_class = ReadingConnection
    return redis.asyncio.Redis.from_pool(pool)
