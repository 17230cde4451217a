"""The tenants' batches as Redis holds them: records, who runs each, and which of its lines are done. Layout, all but
the first under the tenant's hash tag:

    penstock:open-batches                      tenant/batch of those that have not ended, by the time of their creation
    penstock:tenant:{id}:batches               batch id -> BatchRecord, as JSON
    penstock:tenant:{id}:batch_lines           batch id -> lines, of those that have not ended
    penstock:tenant:{id}:batch:{batch}:lease   gateway and number of the taking; ends by itself
    penstock:tenant:{id}:batch:{batch}:marks   4 bytes a line: the number of the taking under which it was done, or 0
    penstock:tenant:{id}:batch:{batch}:counts  lines, tokens, and the number of takings

No text of a line. Invariants: at most one gateway holds a batch; a line is marked once, in the same step in which its
usage is counted, and only by the holder.
"""

import re
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec
import redis.asyncio

from penstock.router.batches.batch_record import BatchCounts, BatchRecord
from penstock.router.batches.file_registry import MAX_FILES, TENANTS_KEY, bytes_key, files_key
from penstock.router.batches.unavailable import raising_overloaded
from penstock.tenancy.tenants import tenant_key
from penstock.tenancy.usage import KEPT_S, Used, count_fields, usage_key
from penstock.wire.errors import InvalidRequest

ID_PATTERN = re.compile(r"batch_[0-9a-f]{24}")
MAX_BATCHES = 1000
"""Batches of one tenant that are remembered. Lists and sweeps read them all: at most 64 KiB each, metadata included."""
FORGOTTEN_AT_ONCE = 10
"""Ended batches that are forgotten where a tenant has no room for a new one."""
MARK_BYTES = 4
ENDED_KEPT_S = 3600
"""How long marks and lease of an ended batch stay, for whoever still looks at them."""
_OPEN = "penstock:open-batches"


class OpenBatch(NamedTuple):
    """A batch that has not ended, as far as is known."""

    tenant: str
    batch_id: str
    created: float
    """Unix time, seconds."""


class Lease(NamedTuple):
    """The right to run a batch."""

    tenant: str
    batch_id: str
    owner: str
    epoch: int
    """Number of the taking: 1 for the first gateway that ran the batch, and rising."""

    @property
    def value(self) -> str:
        return f"{self.owner}:{self.epoch}"


class LineUsage(NamedTuple):
    """What a line has used."""

    model: str
    adapter: str
    used: Used


class CommittedLine(NamedTuple):
    """A line that is done."""

    number: int
    """Number of the line among the batch's, from 0."""
    outcome: Literal["completed", "failed"]
    size_bytes: int
    """Bytes of the result on the disk."""
    usage: LineUsage | None


class BatchRegistry:
    """The batches of all tenants. Every method raises Overloaded when Redis does not answer."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._create = client.register_script(Path(__file__).with_name("create_batch.lua").read_text(encoding="utf-8"))
        self._replace = client.register_script(
            Path(__file__).with_name("replace_record.lua").read_text(encoding="utf-8")
        )
        self._take = client.register_script(Path(__file__).with_name("take_lease.lua").read_text(encoding="utf-8"))
        self._renew = client.register_script(Path(__file__).with_name("renew_lease.lua").read_text(encoding="utf-8"))
        self._commit = client.register_script(Path(__file__).with_name("commit_line.lua").read_text(encoding="utf-8"))

    async def create(self, tenant: str, record: BatchRecord, max_lines: int) -> None:
        """Write a new batch, to be run; where the tenant has as many as it may, the oldest that have ended are
        forgotten. max_lines: of the tenant's batches that have not ended. Raises InvalidRequest."""
        keys = [_records(tenant), _lines(tenant), files_key(tenant)]
        args: list[str | bytes | int] = [
            record.id,
            msgspec.json.encode(record),
            record.num_lines,
            max_lines,
            MAX_BATCHES,
            MAX_FILES,
        ]
        with raising_overloaded():
            await self._client.sadd(TENANTS_KEY, tenant)
            await self._client.zadd(_OPEN, {f"{tenant}/{record.id}": record.created_at})
            result = await cast("Awaitable[int]", self._create(keys=keys, args=args))
        if result == -1:
            await self._forget_oldest(tenant)
            with raising_overloaded():
                result = await cast("Awaitable[int]", self._create(keys=keys, args=args))
        if result == 0:
            raise InvalidRequest(
                f"Your batches may have {max_lines} lines that wait at once, and this one has {record.num_lines};"
                " send it when others have ended.",
                param="input_file_id",
            )
        if result == -1:
            raise InvalidRequest(f"You have {MAX_BATCHES} batches that have not ended; try later.")
        if result == -2:
            raise InvalidRequest(f"You have {MAX_FILES} files, results included; delete some.")

    async def _forget_oldest(self, tenant: str) -> None:
        ended = [record for record in reversed(await self.all(tenant)) if record.has_ended]
        for record in ended[:FORGOTTEN_AT_ONCE]:
            await self.forget(tenant, record.id)

    async def get(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Look up a batch of a tenant. Returns None if there is none."""
        if ID_PATTERN.fullmatch(batch_id) is None:
            return None
        with raising_overloaded():
            data = await cast("Awaitable[bytes | None]", self._client.hget(_records(tenant), batch_id))
        return None if data is None else msgspec.json.decode(data, type=BatchRecord)

    async def all(self, tenant: str) -> list[BatchRecord]:
        """Batches of a tenant, newest first."""
        with raising_overloaded():
            values = await cast("Awaitable[list[bytes]]", self._client.hvals(_records(tenant)))
        records = [msgspec.json.decode(value, type=BatchRecord) for value in values]
        return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)

    async def not_ended(self, tenant: str) -> list[BatchRecord]:
        """Batches of a tenant that have not ended, in no order."""
        with raising_overloaded():
            found = await cast("Awaitable[dict[bytes, bytes]]", self._client.hgetall(_lines(tenant)))
            if not found:
                return []
            ids = [batch_id.decode() for batch_id in found]
            values = await cast("Awaitable[list[bytes | None]]", self._client.hmget(_records(tenant), ids))
        records = [msgspec.json.decode(value, type=BatchRecord) for value in values if value is not None]
        return [record for record in records if not record.has_ended]

    async def counts(self, tenant: str, batch_ids: Sequence[str]) -> list[BatchCounts]:
        """Lines and tokens of batches, in their order."""
        with raising_overloaded():
            async with self._client.pipeline(transaction=False) as pipe:
                for batch_id in batch_ids:
                    pipe.hgetall(_part(tenant, batch_id, "counts"))
                replies = await pipe.execute()
        return [_decode_counts(reply) for reply in replies]

    async def replace(self, tenant: str, before: BatchRecord, after: BatchRecord) -> bool:
        """Write a batch's next record. Returns False if somebody else has changed it since it was `before`."""
        args: list[str | bytes] = [before.id, msgspec.json.encode(before), msgspec.json.encode(after)]
        with raising_overloaded():
            return bool(await cast("Awaitable[int]", self._replace(keys=[_records(tenant)], args=args)))

    async def retire(self, tenant: str, batch_id: str) -> None:
        """Take an ended batch, or one that does not exist, from what is to be run. May be repeated."""
        with raising_overloaded():
            await self._client.hdel(_lines(tenant), batch_id)
            await self._client.hdel(bytes_key(tenant), batch_id)
            for part in ("marks", "lease"):
                await self._client.expire(_part(tenant, batch_id, part), ENDED_KEPT_S)
            await self._client.zrem(_OPEN, f"{tenant}/{batch_id}")

    async def forget(self, tenant: str, batch_id: str) -> None:
        """Remove a batch's record: it does not exist any more. May be repeated."""
        await self.retire(tenant, batch_id)
        with raising_overloaded():
            await self._client.expire(_part(tenant, batch_id, "counts"), 1)
            await self._client.hdel(_records(tenant), batch_id)

    async def open_batches(self) -> list[OpenBatch]:
        """Batches of all tenants that may have to be run, oldest first."""
        with raising_overloaded():
            reply = await self._client.zrangebyscore(_OPEN, "-inf", "+inf", withscores=True)
        rows = cast("list[tuple[bytes, float]]", reply)
        found = ((member.decode().rpartition("/"), created) for member, created in rows)
        return [OpenBatch(tenant, batch_id, created) for (tenant, _, batch_id), created in found]

    async def take(self, tenant: str, batch_id: str, owner: str, ttl_s: float) -> Lease | None:
        """Take a batch. Returns None if somebody holds it. ttl_s: the lease ends by itself if it is not renewed."""
        keys = [_part(tenant, batch_id, part) for part in ("lease", "counts")]
        with raising_overloaded():
            epoch = await cast("Awaitable[int]", self._take(keys=keys, args=[owner, int(1000 * ttl_s)]))
        return Lease(tenant, batch_id, owner, epoch) if epoch else None

    async def renew(self, lease: Lease, ttl_s: float) -> bool:
        """Hold a batch for longer. Returns False if it is not held any more."""
        return await self._extend(lease, int(1000 * ttl_s))

    async def release(self, lease: Lease) -> None:
        """Give a batch up, for the next gateway; one that is not held any more is left alone."""
        await self._extend(lease, 0)

    async def _extend(self, lease: Lease, ms: int) -> bool:
        keys = [_part(lease.tenant, lease.batch_id, "lease")]
        with raising_overloaded():
            return bool(await cast("Awaitable[int]", self._renew(keys=keys, args=[lease.value, ms])))

    async def commit(self, lease: Lease, line: CommittedLine, now: float) -> bool:
        """Note that a line is done, and count what it has used. May be repeated, also where the first call's answer was
        lost, and then the lease. Returns False if the batch is not held any more: then nothing is noted.
        now: Unix time."""
        keys = [_part(lease.tenant, lease.batch_id, part) for part in ("lease", "marks", "counts")]
        keys += [bytes_key(lease.tenant), usage_key(lease.tenant, now)]
        args: list[str | bytes | int] = [lease.value, lease.epoch, line.number, line.outcome]
        args += [lease.batch_id, line.size_bytes, KEPT_S]
        if line.usage is not None:
            args += [part for row in count_fields(*line.usage) for part in row]
        with raising_overloaded():
            return await cast("Awaitable[int]", self._commit(keys=keys, args=args)) >= 0

    async def marks(self, tenant: str, batch_id: str, num_lines: int) -> list[int]:
        """Numbers of the takings under which the lines were done, line by line; 0: it is not done."""
        with raising_overloaded():
            data = await cast("Awaitable[bytes]", self._client.getrange(_part(tenant, batch_id, "marks"), 0, -1))
        found = [int.from_bytes(data[at : at + MARK_BYTES], "big") for at in range(0, len(data), MARK_BYTES)]
        return (found + [0] * num_lines)[:num_lines]


def _decode_counts(reply: dict[bytes, bytes]) -> BatchCounts:
    known = {name: int(reply.get(name.encode(), 0)) for name in BatchCounts.__struct_fields__}
    return BatchCounts(**known)


def _records(tenant: str) -> str:
    return tenant_key(tenant, "batches")


def _lines(tenant: str) -> str:
    return tenant_key(tenant, "batch_lines")


def _part(tenant: str, batch_id: str, part: str) -> str:
    return tenant_key(tenant, f"batch:{batch_id}:{part}")
