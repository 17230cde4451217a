"""redis-py's connections as we use them: a cancellation ends their writes, and those by TLS read certificates anew."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.sentinel import SentinelManagedConnection


class CancellableConnection(AbstractConnection):
    """A connection whose writes lose no cancellation.

    redis-py writes within `asyncio.wait_for`, and that of Python 3.11 returns as if nothing were when its task is
    cancelled in the very turn of the loop in which the write ends (python/cpython#86296). A task that is cancelled
    once, as a loop that runs until its gateway stops, then goes on for good.
    """

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        await super().send_packed_command(command, check_health)
        if task.cancelling() > before:
            await self.disconnect(nowait=True)  # nobody will read the answer
            raise asyncio.CancelledError


class TcpConnection(CancellableConnection, Connection):
    """A connection without TLS."""


class UnixConnection(CancellableConnection, UnixDomainSocketConnection):
    """A connection by a socket of this machine."""


class TlsConnection(CancellableConnection, SSLConnection):
    """A connection by TLS that reads its certificates again each time it connects: they are rotated while it lives."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        arguments: Mapping[str, Any] = super()._connection_arguments()
        return arguments


class SentinelConnection(CancellableConnection, SentinelManagedConnection):
    """A connection to a master that sentinels name."""


class TlsSentinelConnection(SentinelConnection, TlsConnection):
    """The same by TLS."""
