"""Tenants as a stream of JSON lines, to be kept outside of Redis, and back: `penstock tenant export` and `apply`.

Holds records of all tenants (deleted ones too), the default limits, digests of keys and tombstones of revoked ones, the
registrations of adapters, published prefixes; never a key, never an adapter's files, and no usage. Keys work again only
under the cluster secret that made them, so the first line has a check value of it. The last line has the number of
lines, so a stream that was cut is refused. Invariant of a restore: it takes nothing away that is newer. Deletions and
revocations win whichever side has them, of two settings those that were changed last; default limits and published
prefixes come back only where Redis has none. So it can run twice, and beside running gateways.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import redis.asyncio

from penstock.adapters.registry import StoredAdapter, forget_tenant, put_stored_adapter, read_stored_adapters
from penstock.base.errors import ConfigError
from penstock.prefix.published import Prefix, read_published, restore_published
from penstock.tenancy.keys import StoredKey, put_stored, read_stored, revoke_all
from penstock.tenancy.tenants import NO_LIMITS, Limits, Record, Tenants, check_id

VERSION = 1


class Header(msgspec.Struct, frozen=True, tag="penstock-tenants", tag_field="line"):
    """The first line of a stream."""

    version: int
    exported: int
    """Unix time, seconds."""
    secret_check: str
    """See `check_value`."""


class TenantLine(msgspec.Struct, frozen=True, tag="tenant", tag_field="line"):
    id: str
    record: Record


class KeyLine(msgspec.Struct, frozen=True, tag="key", tag_field="line"):
    digest: str
    tenant: str
    created: int


class RevokedLine(msgspec.Struct, frozen=True, tag="revoked", tag_field="line"):
    digest: str
    until: int
    """Unix time at which the tombstone may go, seconds."""


class AdapterLine(msgspec.Struct, frozen=True, tag="adapter", tag_field="line"):
    tenant: str
    name: str
    version: int
    record: str | None
    """Record of the registry. null: the name was removed, and only its version counts on."""


class DefaultsLine(msgspec.Struct, frozen=True, tag="defaults", tag_field="line"):
    limits: Limits


class PrefixLine(msgspec.Struct, frozen=True, tag="prefix", tag_field="line"):
    prefix: Prefix


class End(msgspec.Struct, frozen=True, tag="end", tag_field="line"):
    lines: int
    """Number of the lines before this one."""


Line = Header | TenantLine | KeyLine | RevokedLine | AdapterLine | DefaultsLine | PrefixLine | End


@dataclass(slots=True)
class Report:
    """What a restore did: counts, and a sentence about each tenant that did not become what the export says."""

    made: int = 0
    changed: int = 0
    same: int = 0
    newer: int = 0
    deleted: int = 0
    """Tenants that the export or Redis has as deleted."""
    keys_put: int = 0
    keys_same: int = 0
    keys_left_out: int = 0
    """Keys that were revoked, or whose tenant is deleted or missing."""
    revoked: int = 0
    """Tombstones written; each ends a key that may have worked."""
    adapters_put: int = 0
    adapters_same: int = 0
    """Names of adapters that Redis knew already, under which nothing was changed."""
    defaults_put: int = 0
    """1 if default limits were written."""
    prefixes_put: int = 0
    prefixes_left: int = 0
    """Prefixes that were not published again, since something has been published or withdrawn in this Redis."""
    takes_away: bool = False
    """Whether a deletion or a revocation was written."""
    remarks: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return [
            *self.remarks,
            f"tenants: {self.made} made, {self.changed} changed, {self.same} as exported already, "
            f"{self.newer} left as they are because they were changed since, {self.deleted} deleted ones",
            f"keys: {self.keys_put} put back, {self.keys_same} there already, {self.keys_left_out} left out; "
            f"{self.revoked} revoked",
            f"adapters: {self.adapters_put} registered again, {self.adapters_same} known already",
            f"default limits: {'put back' if self.defaults_put else 'left as they are'}",
            f"published prefixes: {self.prefixes_put} published again, {self.prefixes_left} left as they are",
        ]


def check_value(secret: bytes) -> str:
    """A value that tells whether two cluster secrets are the same, and nothing else about them."""
    return hashlib.blake2b(b"", key=secret, digest_size=8, person=b"penstock-export").hexdigest()


async def export(client: redis.asyncio.Redis, secret: bytes, now: float) -> list[bytes]:
    """The stream, line by line, each with its newline. now: Unix time. Raises RedisError, and ConfigError for a record
    that can't be read."""
    try:
        found = await _read(client, int(now))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"Redis holds something that can't be read, so there is no export: {error}") from error
    lines: list[Line] = [Header(VERSION, int(now), check_value(secret)), *found]
    lines.append(End(len(lines)))
    return [msgspec.json.encode(line) + b"\n" for line in lines]


async def _read(client: redis.asyncio.Redis, now: int) -> list[Line]:
    lines: list[Line] = []
    lines += [TenantLine(tenant_id, record) for tenant_id, record in (await Tenants(client).all_stored()).items()]
    for key in await read_stored(client):
        lines.append(
            KeyLine(key.digest, key.tenant, key.created) if key.tenant else RevokedLine(key.digest, now + key.ttl_s)
        )
    lines += [AdapterLine(*adapter) for adapter in await read_stored_adapters(client)]
    if (defaults := await Tenants(client).defaults()) != NO_LIMITS:
        lines.append(DefaultsLine(defaults))
    published = await read_published(client)
    lines += [PrefixLine(prefix) for prefix in (published.prefixes if published is not None else ())]
    return lines


def is_export(data: bytes) -> bool:
    """Whether a file is a stream of `export`, and not the YAML of first tenants."""
    return data.lstrip().startswith(b'{"line":"penstock-tenants"')


def parse(data: bytes, secret: bytes) -> list[Line]:
    """The lines between the first and the last. Raises ConfigError for a stream that is not whole, not ours, of a later
    version, or of another cluster secret; InvalidRequest for ids and settings that can't be (somebody may have edited
    it)."""
    decoded = _decode(data)
    header = next(decoded, None)  # before the others, which a later version may write otherwise
    if not isinstance(header, Header):
        raise ConfigError("this is no export of tenants: `penstock tenant export` begins one with another line")
    if header.version != VERSION:
        raise ConfigError(f"this export has the version {header.version}, and this Penstock reads version {VERSION}")
    lines = [header, *decoded]
    end = lines[-1]
    if not isinstance(end, End) or end.lines != len(lines) - 1:
        raise ConfigError(f"this export is not whole: it ends after {len(lines)} lines; nothing was applied")
    if header.secret_check != check_value(secret):
        raise ConfigError(
            "this export was made under another cluster secret, without which its keys open nothing; name the state "
            "folder or the secret of that platform. Nothing was applied"
        )
    for line in lines:
        if isinstance(line, TenantLine):
            check_id(line.id)
            line.record.settings.check()
        elif isinstance(line, DefaultsLine):
            line.limits.check()
    return lines[1:-1]


async def restore(client: redis.asyncio.Redis, lines: Iterable[Line], now: float) -> Report:
    """Write what `parse` returned to Redis. now: Unix time. Raises RedisError; what was written until then stays, and
    the restore can be repeated."""
    wanted = list(lines)
    report = Report()
    # tenants first, then revocations, then keys: at no moment works a key that must not
    alive = {line.id for line in wanted if isinstance(line, TenantLine) and await _restore_tenant(client, line, report)}
    for line in wanted:
        if isinstance(line, RevokedLine) and line.until > now:
            report.revoked += bool(await put_stored(client, StoredKey(line.digest, "", 0, int(line.until - now) + 1)))
    report.takes_away |= report.revoked > 0
    for line in wanted:
        if isinstance(line, KeyLine):
            await _restore_key(client, line, line.tenant in alive, report)
        elif isinstance(line, AdapterLine) and line.tenant in alive:
            is_new = await put_stored_adapter(client, StoredAdapter(line.tenant, line.name, line.version, line.record))
            report.adapters_put += is_new
            report.adapters_same += not is_new
        elif isinstance(line, DefaultsLine):
            report.defaults_put += await Tenants(client).restore_defaults(line.limits)
    prefixes = [line.prefix for line in wanted if isinstance(line, PrefixLine)]
    has_published = await restore_published(client, prefixes) if prefixes else False
    report.prefixes_put, report.prefixes_left = (len(prefixes), 0) if has_published else (0, len(prefixes))
    return report


async def _restore_key(client: redis.asyncio.Redis, line: KeyLine, is_tenant_there: bool, report: Report) -> None:
    stored = StoredKey(line.digest, line.tenant, line.created, 0)
    is_new = await put_stored(client, stored) if is_tenant_there else None
    report.keys_put += is_new is True
    report.keys_same += is_new is False
    report.keys_left_out += is_new is None


async def _restore_tenant(client: redis.asyncio.Redis, line: TenantLine, report: Report) -> bool:
    """Returns whether the tenant is there afterwards."""
    before = await Tenants(client).restore(line.id, line.record)
    is_deleted = line.record.deleted or (before is not None and before.deleted)
    if is_deleted:
        report.deleted += 1
        report.takes_away |= before is None or not before.deleted
        if before is not None and not before.deleted:
            await forget_tenant(client, line.id)
            num_keys = await revoke_all(client, line.id)
            report.remarks.append(f"{line.id}: deleted, as the export says; keys revoked: {num_keys}")
        elif not line.record.deleted:
            report.remarks.append(f"{line.id}: left out, it was deleted since")
        return False
    if before is None:
        report.made += 1
    elif before == line.record:
        report.same += 1
    elif before.updated < line.record.updated:
        report.changed += 1
    else:
        report.newer += 1
        report.remarks.append(f"{line.id}: left as it is, its settings were changed since")
    return True


def _decode(data: bytes) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"line {number} of the export can't be read: {error}; nothing was applied") from error


def read(file: Path) -> bytes:
    """The bytes of a file, or of standard input for `-`. Raises ConfigError."""
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror or error}.") from error


def text(file: Path, data: bytes) -> str:
    """What `read` returned, as text. Raises ConfigError."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start}).") from error


def write(lines: Iterable[bytes], *, output: Path | None, folder: Path | None, keep: int, now: float) -> None:
    """Write a stream to standard output, to the file `output`, or into a folder under a name with its time (UTC); of
    all that have such names the `keep` latest stay. Raises ConfigError."""
    path = output if folder is None else folder / f"tenants-{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%SZ}.jsonl"
    if path is None:
        sys.stdout.buffer.writelines(lines)
        return
    try:
        for left in folder.glob(".tenants-*T*Z.jsonl.new") if folder is not None else ():
            left.unlink()  # of a run that was killed
        count = _write_private(path, lines)
        for old in sorted(folder.glob("tenants-*T*Z.jsonl"))[:-keep] if folder is not None else ():
            old.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror or error}.") from error
    print(f"{path}: {count} lines", file=sys.stderr)


def _write_private(path: Path, lines: Iterable[bytes]) -> int:
    """A file that its owner alone can read, there as a whole or not at all; returns the number of lines."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    count = 0
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for line in lines:
                count += 1
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return count
