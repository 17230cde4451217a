"""The durable, shared copy of the prefix index in Redis: one set of block keys per replica epoch, under a lease.

The replica writes (`IndexWriter`), a new router reads (`IndexStore`). Layout, in one Redis Cluster slot:
`penstock:prefix:{EPOCH}:blocks`, a set of 16-byte keys, and `penstock:prefix:{EPOCH}:meta`, a hash of seq (last events
applied), count (size of the set) and replica. Only hashes, never text. Invariant: where meta exists and its count is
the set's size, the set is what the replica held at event_seq; anything else (lease over, Redis restarted, flushed,
evicted, write half done) reads as "no copy", and the writer writes a whole snapshot again.

Decisions: docs/decisions/prefix.md
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio
from redis.exceptions import RedisError

from penstock.wire.frames import KEY_BYTES, BlockEvents, split_keys

log = logging.getLogger(__name__)

CHUNK = 4096
"""Keys to a command: Lua's stack holds 8,000, and a command should not hold Redis up for more than milliseconds."""
_UNAVAILABLE = (RedisError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTimes:
    """Periods and timeouts of the copies, in seconds."""

    lease_s: float = 15.0
    """A replica that stops writing vanishes after this long."""
    heartbeat_s: float = 4.0
    """Longest pause between two writes; also how soon a loss in Redis is noticed."""
    command_s: float = 1.0
    """Timeout of a command."""
    snapshot_s: float = 10.0
    """Timeout of the engine's answer to a request for a snapshot."""
    retry_s: float = 1.0
    """Pause while Redis is away."""


def _names(epoch: str) -> tuple[str, str]:
    return f"penstock:prefix:{{{epoch}}}:blocks", f"penstock:prefix:{{{epoch}}}:meta"


class IndexStore:
    """Reads the copies of replicas' indexes from Redis. client: made without `decode_responses`, because keys are
    bytes."""

    def __init__(self, client: redis.asyncio.Redis, times: StoreTimes | None = None) -> None:
        self._client = client
        self._times = times or StoreTimes()

    async def snapshot(self, epoch: str) -> BlockEvents | None:
        """Blocks that the replica of this epoch held, as a snapshot; None when there is no valid copy or Redis is away,
        and then the replica itself must be asked."""
        blocks, meta = _names(epoch)
        try:
            # no transaction, which a cluster's client has not: what changed meanwhile shows in the second reading
            async with asyncio.timeout(self._times.command_s), self._client.pipeline(transaction=False) as pipe:
                pipe.hmget(meta, ["seq", "count"])
                pipe.smembers(blocks)
                pipe.hmget(meta, ["seq", "count"])
                (event_seq, count), keys, again = await pipe.execute()
        except _UNAVAILABLE:
            return None
        if event_seq is None or count is None or int(count) != len(keys) or list(again) != [event_seq, count]:
            return None
        return BlockEvents(int(event_seq), b"".join(keys), is_snapshot=True)


class IndexWriter:
    """A replica's own copy: `push` its block events in order, and let `run` be a task of the replica for as long as it
    lives.

    snapshot: returns all that the replica holds, as events with `is_snapshot`. max_pending_bytes: events held while
    Redis is slow; more than that, and they are dropped in favour of a snapshot. Nothing here raises towards the engine.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        replica_id: str,
        epoch: str,
        snapshot: Callable[[], Awaitable[BlockEvents]],
        times: StoreTimes | None = None,
        max_pending_bytes: int = 4 * 2**20,
    ) -> None:
        self._client = client
        self._replica_id = replica_id
        self._blocks, self._meta = _names(epoch)
        self._snapshot = snapshot
        self._times = times or StoreTimes()
        self._max_pending_bytes = max_pending_bytes
        self._apply = client.register_script(Path(__file__).with_name("apply_events.lua").read_text(encoding="utf-8"))
        self._complete = client.register_script(
            Path(__file__).with_name("complete_copy.lua").read_text(encoding="utf-8")
        )
        self._pending: deque[BlockEvents] = deque()
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._event_seq: int | None = None
        """Number of the last events that Redis has; None: unknown, so only a snapshot can follow."""
        self._has_dropped = False
        """Whether events were dropped since the last snapshot was asked for."""
        self._is_unavailable = False
        self.num_announced = 0
        """Snapshots written, counted when Redis has answered: 1 is normal, more mean that Redis lost something."""

    def push(self, events: BlockEvents) -> None:
        """Queue events to be written soon. On the event loop; O(1)."""
        self._pending.append(events)
        self._pending_bytes += len(events.stored) + len(events.removed)
        if self._pending_bytes > self._max_pending_bytes:
            self._forget_pending()
            self._has_dropped = True
        self._wake.set()

    async def run(self) -> None:
        """Write events to Redis as they come, and renew the copy's lease, until cancelled; then delete the copy."""
        try:
            while True:
                if await self._write():
                    await self._pause()
                else:
                    await asyncio.sleep(self._times.retry_s)
        finally:
            with contextlib.suppress(*_UNAVAILABLE):
                async with asyncio.timeout(self._times.command_s):
                    await self._client.delete(self._blocks, self._meta)

    async def _pause(self) -> None:
        """Wait until there are events, or until the lease must be renewed."""
        if self._event_seq is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._times.heartbeat_s):
                await self._wake.wait()

    async def _write(self) -> bool:
        """One write: a snapshot where Redis's copy can't be continued, else the pending events; if there are none, only
        the lease is renewed. Returns False if Redis is away; the caller tries again later."""
        self._wake.clear()
        try:
            if self._event_seq is None:
                await self._announce()
            else:
                await self._continue(self._event_seq)
        except _UNAVAILABLE as error:
            self._lose_track()  # whether the last command arrived is unknown
            self._note(is_unavailable=True, cause=type(error).__name__)
            return False
        self._note(is_unavailable=False, cause="")
        return True

    async def _announce(self) -> None:
        self._forget_pending()
        self._has_dropped = False
        async with asyncio.timeout(self._times.snapshot_s):
            snapshot = await self._snapshot()
        keys = split_keys(snapshot.stored)
        await self._command(self._client.delete(self._meta, self._blocks))
        for start in range(0, len(keys), CHUNK):
            await self._command(self._client.sadd(self._blocks, *keys[start : start + CHUNK]))
            await self._command(self._client.pexpire(self._blocks, self._lease_ms))
        facts: list[str | int | bytes] = [snapshot.event_seq, len(set(keys)), self._replica_id, self._lease_ms]
        await self._command(self._complete(keys=[self._blocks, self._meta], args=facts))
        self._event_seq = snapshot.event_seq
        self.num_announced += 1

    async def _continue(self, known: int) -> None:
        batch = [events for events in self._pending if events.event_seq > known]
        self._forget_pending()
        is_consecutive = [events.event_seq for events in batch] == list(range(known + 1, known + 1 + len(batch)))
        if self._has_dropped or not is_consecutive or any(events.is_snapshot for events in batch):
            self._lose_track()
            return
        stored, removed = _merge_events(batch)
        event_seq = known + len(batch)
        arguments: list[str | int | bytes] = [known, event_seq, stored, removed, self._lease_ms, KEY_BYTES, CHUNK]
        is_applied = await self._command(self._apply(keys=[self._blocks, self._meta], args=arguments))
        if is_applied:
            self._event_seq = event_seq
        else:
            self._lose_track()

    async def _command(self, reply: Awaitable[object]) -> object:
        async with asyncio.timeout(self._times.command_s):
            return await reply

    @property
    def _lease_ms(self) -> int:
        return int(self._times.lease_s * 1000)

    def _lose_track(self) -> None:
        self._event_seq = None
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0

    def _note(self, *, is_unavailable: bool, cause: str) -> None:
        """Write a line to the log when Redis goes away and when it is back."""
        if is_unavailable != self._is_unavailable:
            self._is_unavailable = is_unavailable
            log.warning(
                "prefix_store_away" if is_unavailable else "prefix_store_back",
                extra={"replica": self._replica_id, "cause": cause},
            )


def _merge_events(batch: list[BlockEvents]) -> tuple[bytes, bytes]:
    """Keys that are stored after several events, and keys that are not."""
    is_stored: dict[bytes, bool] = {}
    for events in batch:
        is_stored.update(dict.fromkeys(split_keys(events.removed), False))
        is_stored.update(dict.fromkeys(split_keys(events.stored), True))
    return b"".join(key for key, there in is_stored.items() if there), b"".join(
        key for key, there in is_stored.items() if not there
    )
