"""The index's copy in a real Redis: written, read, fenced, leased, healed."""

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import redis.asyncio

from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.prefix.store import CHUNK, IndexStore, IndexWriter, StoreTimes
from penstock.wire.frames import BlockEvents, split_keys

EPOCH = "replica-1.e7"
TIMES = StoreTimes(lease_s=5.0, heartbeat_s=0.05, command_s=5.0, snapshot_s=5.0, retry_s=0.05)


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


class Replica:
    """An engine's truth, and the events it sends about it."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.event_seq = 0
        self.num_asked = 0

    def change(self, stored: set[bytes], removed: set[bytes]) -> BlockEvents:
        stored, removed = stored - self.held, (removed & self.held) - stored
        self.held = (self.held | stored) - removed
        self.event_seq += 1
        return BlockEvents(self.event_seq, b"".join(stored), b"".join(removed))

    async def snapshot(self) -> BlockEvents:
        self.num_asked += 1
        return BlockEvents(self.event_seq, b"".join(self.held), is_snapshot=True)


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    embedded.start()
    yield embedded
    embedded.stop()


class World:
    def __init__(self, client: redis.asyncio.Redis, times: StoreTimes, max_pending_bytes: int) -> None:
        self.client, self.replica = client, Replica()
        self.store = IndexStore(client, times)
        self.writer = IndexWriter(client, "replica-1", EPOCH, self.replica.snapshot, times, max_pending_bytes)

    async def copy(self) -> set[bytes] | None:
        found = await self.store.snapshot(EPOCH)
        return None if found is None else set(split_keys(found.stored))

    async def is_true(self) -> bool:
        found = await self.store.snapshot(EPOCH)
        return (
            found is not None
            and found.event_seq == self.replica.event_seq
            and set(split_keys(found.stored)) == self.replica.held
        )

    async def has_announced(self, times: int) -> bool:
        """Whether the copy is true and the writer has had the answer to so many announcements. Redis shows a copy to
        this connection as soon as it is written, which may be before the writer has read the answer on its own."""
        return await self.is_true() and self.writer.num_announced >= times


@contextlib.asynccontextmanager
async def world(
    server: EmbeddedRedis, times: StoreTimes = TIMES, max_pending_bytes: int = 2**20
) -> AsyncIterator[World]:
    """A writer at work."""
    async with connect(server.url) as client:
        made = World(client, times, max_pending_bytes)
        task = asyncio.create_task(made.writer.run())
        try:
            yield made
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10.0):
        while not await condition():  # noqa: ASYNC110  (what is waited for happens in another process)
            await asyncio.sleep(0.005)


async def test_a_new_writer_announces_and_then_follows_the_events(server: EmbeddedRedis) -> None:
    async with world(server) as w:
        w.replica.change({key(1), key(2)}, set())
        await eventually(w.is_true)
        random = Random(1)
        for _ in range(300):
            w.writer.push(
                w.replica.change({key(random.randrange(50))}, {key(random.randrange(50)), key(random.randrange(50))})
            )
            if random.random() < 0.1:
                await asyncio.sleep(0)
        await eventually(w.is_true)

        assert w.replica.held
        assert w.writer.num_announced == 1


async def test_a_copy_larger_than_one_command_is_written_and_changed(server: EmbeddedRedis) -> None:
    async with world(server) as w:
        w.replica.change({key(number) for number in range(3 * CHUNK + 5)}, set())
        await eventually(w.is_true)
        new, old = (
            {key(number) for number in range(10_000_000, 10_000_000 + 2 * CHUNK + 3)},
            set(list(w.replica.held)[: CHUNK + 9]),
        )
        w.writer.push(w.replica.change(new, old))
        await eventually(w.is_true)

        assert w.writer.num_announced == 1


async def test_an_empty_cache_is_a_copy_too(server: EmbeddedRedis) -> None:
    async with world(server) as w:
        await eventually(w.is_true)
        assert await w.copy() == set()
        assert await w.store.snapshot("another epoch") is None


@pytest.mark.parametrize("loss", ["flush", "blocks", "meta", "member"])
async def test_whatever_redis_loses_is_noticed_and_announced_again(server: EmbeddedRedis, loss: str) -> None:
    async with world(server) as w:
        w.replica.change({key(1), key(2)}, set())
        await eventually(w.is_true)
        match loss:
            case "flush":
                await w.client.flushall()
            case "member":
                await w.client.srem(f"penstock:prefix:{{{EPOCH}}}:blocks", key(1))
            case part:
                await w.client.delete(f"penstock:prefix:{{{EPOCH}}}:{part}")

        await eventually(lambda: w.has_announced(2))  # a half copy reads as none, never as truth
        assert w.writer.num_announced == 2


async def test_a_copy_with_something_missing_is_no_copy(server: EmbeddedRedis) -> None:
    still = StoreTimes(lease_s=60.0, heartbeat_s=60.0, command_s=5.0)
    async with world(server, still) as w:
        w.replica.change({key(1), key(2)}, set())
        await eventually(w.is_true)
        await w.client.srem(f"penstock:prefix:{{{EPOCH}}}:blocks", key(1))

        assert await w.store.snapshot(EPOCH) is None


async def test_missed_events_lead_to_a_new_announcement(server: EmbeddedRedis) -> None:
    async with world(server) as w:
        await eventually(w.is_true)
        w.replica.change({key(1)}, set())  # never pushed
        w.writer.push(w.replica.change({key(2)}, set()))

        await eventually(lambda: w.has_announced(2))
        assert w.writer.num_announced == 2


async def test_more_events_than_memory_allows_lead_to_a_new_announcement(server: EmbeddedRedis) -> None:
    async with world(server, max_pending_bytes=16 * 10) as w:
        await eventually(w.is_true)
        for number in range(25):
            w.writer.push(w.replica.change({key(number)}, set()))
        assert w.writer._pending_bytes <= 16 * 10

        await eventually(lambda: w.has_announced(2))
        assert w.writer.num_announced == 2


async def test_it_heals_when_redis_is_killed_and_comes_back(server: EmbeddedRedis) -> None:
    async with world(server) as w:
        w.replica.change({key(1)}, set())
        await eventually(w.is_true)
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for number in range(2, 40):
            w.writer.push(w.replica.change({key(number)}, set()))

        await eventually(w.is_true)
        assert len(await w.copy() or ()) == 39


async def test_the_lease_ends_what_nobody_renews(server: EmbeddedRedis) -> None:
    brief = StoreTimes(lease_s=1.5, heartbeat_s=60.0, command_s=5.0)
    async with world(server, brief) as w:
        w.replica.change({key(1)}, set())
        await eventually(w.is_true)

        async def is_gone() -> bool:
            return not await w.client.keys("penstock:*")

        await eventually(is_gone)
        assert await w.store.snapshot(EPOCH) is None


async def test_heartbeats_renew_the_lease(server: EmbeddedRedis) -> None:
    async with world(server) as w:
        await eventually(w.is_true)
        name = f"penstock:prefix:{{{EPOCH}}}:meta"
        await w.client.pexpire(name, 2000)

        async def is_renewed() -> bool:
            return int(await w.client.pttl(name)) > 3000

        await eventually(is_renewed)
        assert w.writer.num_announced == 1


async def test_a_writer_that_ends_takes_its_copy_along(server: EmbeddedRedis) -> None:
    async with world(server) as w:
        w.replica.change({key(1)}, set())
        await eventually(w.is_true)
    async with connect(server.url) as client:
        assert await client.keys("penstock:*") == []


async def test_without_redis_nothing_raises_and_there_is_no_copy(server: EmbeddedRedis) -> None:
    server.stop()
    async with world(server) as w:
        w.writer.push(w.replica.change({key(1)}, set()))

        assert await w.store.snapshot(EPOCH) is None
        assert w.writer.num_announced == 0


async def test_both_keys_of_an_epoch_lie_in_one_cluster_slot_and_hold_only_hashes(server: EmbeddedRedis) -> None:
    async with world(server) as w:
        w.replica.change({key(1)}, set())
        await eventually(w.is_true)

        names = sorted(await w.client.keys("*"))
        assert names == [f"penstock:prefix:{{{EPOCH}}}:{part}".encode() for part in ("blocks", "meta")]
        assert await w.client.smembers(names[0]) == {key(1)}
        assert set(await w.client.hgetall(names[1])) == {b"seq", b"count", b"replica"}
