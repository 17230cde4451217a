"""/v1/files: a tenant brings texts for its batches, lists, reads and deletes them, and the results.

Every request counts among its tenant's requests per minute. Files are a tenant's: for any other one they do not exist.
Invariant: whatever fails, no text stays without its record for longer than a day, and no record without its text.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.router.api.listing import page, read_query
from penstock.router.api.reads import admit_read
from penstock.router.batches.dependencies import BatchDependencies
from penstock.router.batches.file_registry import FileRecord
from penstock.router.batches.folder import count_lines
from penstock.router.completions.admission import authenticate
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.transport.exchange import Exchange
from penstock.router.transport.upload import TEXT, TEXT_FORM, boundary_of, receive
from penstock.tenancy.tenants import Tenant
from penstock.wire.batches import MAX_EXPIRY_S, MIN_EXPIRY_S, FileDeleted, FileList
from penstock.wire.errors import InvalidRequest, NotFound, Overloaded

FILES_PATH = "/v1/files"
CONTENT = "/content"
UPLOAD_TIMEOUT_S = 600.0
MAX_UPLOADS = 4
"""Uploads of all tenants at once in one gateway; one more is refused with Retry-After."""
MAX_TENANT_UPLOADS = 2
"""Uploads of one tenant at once in one gateway; one more is refused with Retry-After."""
FORM_BYTES = 2**16
"""Most bytes that a form may hold beside the file."""
MIN_FREE_BYTES = 2**30
"""Bytes of the disk that stay free whatever size all uploads under way grow to."""
FULL_RETRY_S = 60.0
SENT_BYTES = 256 * 2**10
"""Longest part of a file that is sent at once."""
MAX_NAME_CHARS = 255
MAX_PAGE = 10_000

log = logging.getLogger("penstock.batches")


class FilePages:
    """Handlers of /v1/files, /v1/files/{file_id} and /v1/files/{file_id}/content."""

    def __init__(self, deps: GatewayDependencies) -> None:
        self._deps = deps
        self._uploading: list[str] = []
        """Tenant of each upload under way."""

    async def create(self, exchange: Exchange) -> None:
        tenant = await authenticate(self._deps.keys, exchange)
        parts = find_batches(self._deps)
        num_uploads, num_own = len(self._uploading), self._uploading.count(tenant.id)
        if num_uploads >= MAX_UPLOADS or num_own >= MAX_TENANT_UPLOADS:
            raise Overloaded(
                f"{num_uploads} files are on their way to this gateway already, {num_own} of them yours.",
                retry_after_s=1.0,
            )
        self._uploading.append(tenant.id)
        try:
            if tenant.limits is not None:
                exchange.limit_headers = await self._deps.admission.charge(
                    tenant.id, tenant.limits, exchange.request_id
                )
            await self._check_room(parts, tenant, exchange.content_length)
            draft = await asyncio.to_thread(parts.folder.open_draft, tenant.id)
            try:
                record = await self._receive(exchange, tenant, parts, draft)
            finally:
                await asyncio.to_thread(parts.folder.discard, draft)
        finally:
            self._uploading.remove(tenant.id)
        log.info("file kept", extra={"request_id": exchange.request_id, "tenant": tenant.id, "file": record.id})
        await exchange.answer(msgspec.json.encode(record.describe()))

    async def list(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        parts = find_batches(self._deps)
        query = read_query(exchange.query, MAX_PAGE, MAX_PAGE)
        records = [file for file in await parts.files.all(tenant.id) if query.purpose in (None, file.purpose)]
        records = [file for file in records if file.expires > self._deps.now()]
        if not query.is_ascending:
            records.reverse()
        data, has_more = page(records, [file.id for file in records], query)
        await exchange.answer(
            msgspec.json.encode(
                FileList(
                    data=[file.describe() for file in data],
                    first_id=data[0].id if data else None,
                    last_id=data[-1].id if data else None,
                    has_more=has_more,
                )
            )
        )

    async def retrieve(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        record = await self._find(find_batches(self._deps), tenant, _id(exchange))
        await exchange.answer(msgspec.json.encode(record.describe()))

    async def content(self, exchange: Exchange) -> None:
        """The text, piece by piece as the client reads it."""
        tenant = await admit_read(self._deps, exchange)
        parts = find_batches(self._deps)
        record = await self._find(parts, tenant, _id(exchange).removesuffix(CONTENT))
        path = parts.folder.path(tenant.id, record.id)
        with exchange.client.watched(self._deps.config.request_timeout_s):
            try:
                file = await asyncio.to_thread(path.open, "rb")
            except FileNotFoundError:
                raise _not_found(record.id) from None
            try:
                headers = [(b"content-length", b"%d" % record.size_bytes)]
                await exchange.start(200, b"application/octet-stream", headers)
                left = record.size_bytes
                while left > 0 and exchange.method != "HEAD":
                    data = await asyncio.to_thread(file.read, min(SENT_BYTES, left))
                    if not data:
                        break  # the text is shorter than it was: the client sees that
                    left -= len(data)
                    await exchange.write(data)
                await exchange.write(b"", is_last=True)
            finally:
                file.close()

    async def delete(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        parts = find_batches(self._deps)
        record = await self._find(parts, tenant, _id(exchange))
        for batch in await parts.batches.not_ended(tenant.id):
            if batch.input_file_id == record.id:
                raise InvalidRequest(f"The batch {batch.id} reads this file; cancel it first.")
        await parts.files.remove(tenant.id, record.id)
        await asyncio.to_thread(parts.folder.remove, tenant.id, record.id)
        log.info("file deleted", extra={"request_id": exchange.request_id, "tenant": tenant.id, "file": record.id})
        await exchange.answer(msgspec.json.encode(FileDeleted(id=record.id)))

    async def _check_room(self, parts: BatchDependencies, tenant: Tenant, content_length: int | None) -> None:
        """Raises InvalidRequest when the tenant's files are as many bytes as it may have, Overloaded when the disk is
        full."""
        held, quota = await parts.files.held_bytes(tenant.id), parts.config.max_tenant_bytes
        if held + max(1, (content_length or 0) - FORM_BYTES) > quota:
            raise _over_quota(held, quota)
        floor = MIN_FREE_BYTES + len(self._uploading) * parts.config.max_file_bytes
        if await asyncio.to_thread(parts.folder.free_bytes) < floor:
            raise Overloaded("There is not enough room for another file on the disk.", retry_after_s=FULL_RETRY_S)

    async def _receive(self, exchange: Exchange, tenant: Tenant, parts: BatchDependencies, draft: Path) -> FileRecord:
        boundary = boundary_of(exchange.header(b"content-type") or b"")
        if boundary is None:
            raise InvalidRequest("A file is sent as multipart/form-data, with its 'purpose'.")
        body = exchange.client.parts(
            exchange.content_length,
            parts.config.max_file_bytes + FORM_BYTES,
            self._deps.config.body_timeout_s,
            UPLOAD_TIMEOUT_S,
        )
        form = await receive(boundary, body, draft, TEXT_FORM)
        if form.fields.get("purpose") != "batch":
            raise InvalidRequest("'purpose' must be 'batch': files are kept for batches only.", param="purpose")
        now, text = self._deps.now(), draft / TEXT
        record = FileRecord(
            id=f"file-{self._deps.random.getrandbits(96):024x}",
            size_bytes=text.stat().st_size,
            created=int(now),
            expires=int(now + _read_expiry(form.fields, parts.config.keep_s)),
            name=form.file_names[TEXT][:MAX_NAME_CHARS],
            purpose="batch",
            num_lines=await asyncio.to_thread(count_lines, text),
        )
        if record.size_bytes > parts.config.max_file_bytes:
            raise InvalidRequest(f"A file may have {parts.config.max_file_bytes} bytes (batches.max_file_bytes).")
        await asyncio.to_thread(parts.folder.put, text, tenant.id, record.id)
        try:
            if not await parts.files.put(tenant.id, record, parts.config.max_tenant_bytes):
                raise _over_quota(await parts.files.held_bytes(tenant.id), parts.config.max_tenant_bytes)
        except BaseException:
            await asyncio.to_thread(parts.folder.remove, tenant.id, record.id)
            raise
        return record

    async def _find(self, parts: BatchDependencies, tenant: Tenant, file_id: str) -> FileRecord:
        """Raises NotFound."""
        record = await parts.files.get(tenant.id, file_id)
        if record is None or record.expires <= self._deps.now():
            raise _not_found(file_id)
        return record


def find_batches(deps: GatewayDependencies) -> BatchDependencies:
    """Raises NotFound where the gateway keeps no files."""
    if deps.batches is None:
        raise NotFound("This gateway keeps no files and runs no batches: no folder is set for them (batches.folder).")
    return deps.batches


def _id(exchange: Exchange) -> str:
    return exchange.path.removeprefix(f"{FILES_PATH}/")


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"You have no file '{file_id[:100]}'.")


def _over_quota(held: int, quota: int) -> InvalidRequest:
    return InvalidRequest(
        f"Your files take {held} bytes, results of batches included, and may take {quota} (batches.max_tenant_bytes);"
        " delete some first."
    )


def _read_expiry(fields: Mapping[str, str], default_s: float) -> float:
    """Seconds that a file is kept. Raises InvalidRequest."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default_s
    if anchor != "created_at":
        raise InvalidRequest("'expires_after[anchor]' must be 'created_at'.", param="expires_after")
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) <= 9
    if seconds is None or not is_number or not MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S:
        raise InvalidRequest(
            f"'expires_after[seconds]' must lie in {MIN_EXPIRY_S}..{MAX_EXPIRY_S}.", param="expires_after"
        )
    return float(seconds)
