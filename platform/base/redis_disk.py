"""Whether what was written to Redis has reached its disk, for writes that must not be undone by a power failure.

Where the server knows WAITAOF (Redis 7.2, Valkey) it is waited for; else its settings are read, or what INFO shows to
a user that may not read them, and what these do not promise is said. A write made here is waited for in place of the
caller's: the append-only file keeps the order of writes, so whatever went to the same server before is on the disk too.

Source: https://redis.io/docs/latest/commands/waitaof/
"""

from typing import Any

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.exceptions import ResponseError

WAIT_MS = 1000
"""Longest time that the server is asked to wait in one command; below the client's own timeout."""
ATTEMPTS = 5
BARRIER_KEPT_S = 60
NO_FILE = "Redis keeps no append-only file (appendonly no): a restart may undo this"
NAMES_TRIED = 1024
"""Names among which there is one for every primary of a cluster."""


async def find_disk_doubt(client: redis.asyncio.Redis) -> str | None:
    """Wait until all that was written so far is on the server's disk; of a cluster, on each primary's. Returns None if
    it is, else the sentence that says why that is not certain. Raises RedisError, OSError or TimeoutError when Redis
    does not answer."""
    for name, node in await _barriers(client):
        if (doubt := await _doubt_of(client, node, name)) is not None:
            return doubt
    return None


async def _barriers(client: redis.asyncio.Redis) -> list[tuple[str, ClusterNode | None]]:
    """A key to write on each server; None: the only one."""
    if not isinstance(client, RedisCluster):
        return [("penstock:barrier", None)]
    await client.initialize()
    found: dict[ClusterNode, str] = {}
    for number in range(NAMES_TRIED):
        name = f"penstock:barrier:{{{number}}}"
        node = client.get_node_from_key(name)
        if node is not None:
            found.setdefault(node, name)
    return [(name, node) for node, name in found.items()]


async def _doubt_of(client: redis.asyncio.Redis, node: ClusterNode | None, name: str) -> str | None:
    try:
        for _ in range(ATTEMPTS):
            if await _wait(client, node, name):
                return None
    except ResponseError as error:
        if "unknown command" not in str(error).lower():
            return f"Redis can't say what is on its disk: {error}"
        return await _doubt_of_settings(client, node)
    return f"Redis has not written to its disk for {ATTEMPTS * WAIT_MS // 1000} s: see its log"


async def _wait(client: redis.asyncio.Redis, node: ClusterNode | None, name: str) -> bool:
    """One barrier and its WAITAOF, on one connection: that command knows the writes of its own connection only."""
    if node is not None:  # commands one after another have the node's one connection
        await client.set(name, 1, ex=BARRIER_KEPT_S)
        num_local, _ = await _on(client, node, "WAITAOF", 1, 0, WAIT_MS)
        return int(num_local) > 0
    async with client.pipeline(transaction=False) as pipe:
        pipe.set(name, 1, ex=BARRIER_KEPT_S)
        pipe.execute_command("WAITAOF", 1, 0, WAIT_MS)
        _, (num_local, _) = await pipe.execute()
    return int(num_local) > 0


async def _doubt_of_settings(client: redis.asyncio.Redis, node: ClusterNode | None) -> str | None:
    try:
        found = {name: await _setting(client, node, name) for name in ("appendonly", "appendfsync")}
    except ResponseError:
        return await _doubt_of_info(client, node)
    if found["appendonly"] != "yes":
        return NO_FILE
    if found["appendfsync"] != "always":
        return (
            f"Redis has no WAITAOF (7.2) and writes to its disk with appendfsync {found['appendfsync']}: if its machine"
            " fails within the next two seconds, this may be undone"
        )
    return None


async def _doubt_of_info(client: redis.asyncio.Redis, node: ClusterNode | None) -> str:
    """What is said to a user that may not read settings, such as the role operator's: passwords stand there too."""
    try:
        found = await _on(client, node, "INFO", "persistence")
    except ResponseError:
        return "Redis neither knows WAITAOF (7.2) nor shows its settings: whether this is on its disk is unknown"
    if not found.get("aof_enabled"):
        return NO_FILE
    return (
        "Redis has no WAITAOF (7.2) and does not show how often it writes to its disk: unless with each write"
        " (appendfsync always), a failure of its machine within the next two seconds may undo this"
    )


async def _setting(client: redis.asyncio.Redis, node: ClusterNode | None, name: str) -> str:
    reply = await _on(client, node, "CONFIG GET", name)
    flat = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    return next((_text(value) for key, value in flat.items() if _text(key) == name), "")


async def _on(client: redis.asyncio.Redis, node: ClusterNode | None, *command: str | int) -> Any:
    """The reply of that server."""
    if node is None:
        return await client.execute_command(*command)  # type: ignore[no-untyped-call]
    return await client.execute_command(*command, target_nodes=node)  # type: ignore[no-untyped-call]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
