"""The tenants' files as Redis holds them: names and sizes, never a text. Layout, under the tenant's hash tag:

    penstock:file-tenants                 tenants that have had files or batches
    penstock:tenant:{id}:files            file id -> FileRecord, as JSON
    penstock:tenant:{id}:file_bytes       file id, or id of a batch that runs -> bytes on the disk

Not the texts (`folder`). No tenant can ask for another's: the tenant is part of every key.
"""

import re
from collections.abc import Awaitable
from pathlib import Path
from typing import cast

import msgspec
import redis.asyncio

from penstock.router.batches.unavailable import raising_overloaded
from penstock.tenancy.tenants import tenant_key
from penstock.wire.batches import FileOut, FilePurpose

ID_PATTERN = re.compile(r"file-[0-9a-z]{24,32}")
MAX_FILES = 10_000
"""Files of one tenant, but for results of batches that were created before it had so many."""
TENANTS_KEY = "penstock:file-tenants"


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis holds of a file. Times are Unix time in seconds."""

    id: str
    size_bytes: int
    created: int
    expires: int
    name: str
    purpose: FilePurpose
    num_lines: int

    def describe(self) -> FileOut:
        return FileOut(
            id=self.id,
            bytes=self.size_bytes,
            created_at=self.created,
            expires_at=self.expires,
            filename=self.name,
            purpose=self.purpose,
        )


class FileRegistry:
    """The files of all tenants. Every method raises Overloaded when Redis does not answer."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._put = client.register_script(Path(__file__).with_name("put_file.lua").read_text(encoding="utf-8"))

    async def put(self, tenant: str, record: FileRecord, max_bytes: int | None = None) -> bool:
        """Write a record. Returns False if the tenant would have more than `max_bytes` on the disk, or too many files;
        None: whatever it has."""
        keys = [files_key(tenant), bytes_key(tenant)]
        quota = -1 if max_bytes is None else max_bytes
        with raising_overloaded():
            await self._client.sadd(TENANTS_KEY, tenant)
            args: list[str | bytes | int] = [
                record.id,
                msgspec.json.encode(record),
                record.size_bytes,
                quota,
                MAX_FILES,
            ]
            return bool(await cast("Awaitable[int]", self._put(keys=keys, args=args)))

    async def get(self, tenant: str, file_id: str) -> FileRecord | None:
        """Look up a file of a tenant. Returns None if there is none."""
        if ID_PATTERN.fullmatch(file_id) is None:
            return None
        with raising_overloaded():
            data = await cast("Awaitable[bytes | None]", self._client.hget(files_key(tenant), file_id))
        return None if data is None else msgspec.json.decode(data, type=FileRecord)

    async def all(self, tenant: str) -> list[FileRecord]:
        """Files of a tenant, oldest first."""
        with raising_overloaded():
            values = await cast("Awaitable[list[bytes]]", self._client.hvals(files_key(tenant)))
        records = [msgspec.json.decode(value, type=FileRecord) for value in values]
        return sorted(records, key=lambda record: (record.created, record.id))

    async def remove(self, tenant: str, file_id: str) -> bool:
        """Remove a record; returns whether there was one."""
        with raising_overloaded():
            await self._client.hdel(bytes_key(tenant), file_id)
            return bool(await self._client.hdel(files_key(tenant), file_id))

    async def held_bytes(self, tenant: str) -> int:
        """Bytes on the disk that count as the tenant's, results of batches that run included."""
        with raising_overloaded():
            sizes = await cast("Awaitable[list[bytes]]", self._client.hvals(bytes_key(tenant)))
        return sum(map(int, sizes))

    async def tenants(self) -> list[str]:
        """Tenants that have had files, sorted."""
        with raising_overloaded():
            members = await cast("Awaitable[set[bytes]]", self._client.smembers(TENANTS_KEY))
        return sorted(member.decode() for member in members)


def bytes_key(tenant: str) -> str:
    """Name of the hash of sizes."""
    return tenant_key(tenant, "file_bytes")


def files_key(tenant: str) -> str:
    """Name of the hash of records."""
    return tenant_key(tenant, "files")
