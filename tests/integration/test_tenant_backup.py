"""`penstock tenant export` and `apply` of what it wrote, against a real Redis."""

import asyncio
import errno
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import redis.asyncio

from penstock.adapters.registry import Adapter, Registry
from penstock.base.errors import ConfigError, PenstockError
from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.cli import tenant_backup
from penstock.cli.tenant import delete
from penstock.prefix.published import Prefix, publish, read_published, withdraw
from penstock.tenancy.keys import KeyStore, create_key, list_keys, put_key, revoke_key
from penstock.tenancy.tenants import Limits, Settings, Tenants
from penstock.wire.errors import InvalidRequest, Unauthenticated
from tests.integration.test_first_tenants import penstock

T = TypeVar("T")
SECRET = b"\x5a" * 32
LATER = 4_000_000_000.0


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path / "redis", socket_dir=socket_dir)
    embedded.start()
    yield embedded
    embedded.stop()


def adapter(digest: str) -> Adapter:
    return Adapter(digest, "demo", "model", 8, ("q_proj",), 1000, 1)


async def who(client: redis.asyncio.Redis, key: str) -> str | None:
    """Id of the tenant of a key, for a gateway that has just started; None if the key is refused."""
    try:
        return (await KeyStore(client, SECRET, cache_s=0.0, lookup_timeout_s=5.0).tenant(key)).id
    except Unauthenticated:
        return None


async def fill(client: redis.asyncio.Redis) -> list[str]:
    """acme with a key, a revoked key and two adapters, one removed; gone, deleted. Returns the keys."""
    await Tenants(client).create("acme", Settings(limits=Limits(max_parallel=3), models=("demo",)), now=100.0)
    keys = [await create_key(client, SECRET, tenant) for tenant in ("acme", "acme", "gone")]
    registry = Registry(client, max_per_tenant=8)
    await registry.put("acme", "tone", adapter("1"))
    await registry.put("acme", "tone", adapter("2"))
    await registry.put("acme", "old", adapter("3"))
    await registry.remove("acme", "old")
    await revoke_key(client, SECRET, keys[1])
    await delete(client, "gone")
    return keys


async def exported(client: redis.asyncio.Redis) -> bytes:
    return b"".join(await tenant_backup.export(client, SECRET, 1000.0))


async def applied(client: redis.asyncio.Redis, data: bytes) -> tenant_backup.Report:
    return await tenant_backup.restore(client, tenant_backup.parse(data, SECRET), 2000.0)


def run(server: EmbeddedRedis, work: Callable[[redis.asyncio.Redis], Awaitable[T]]) -> T:
    async def main() -> T:
        async with connect(server.url) as client:
            return await work(client)

    return asyncio.run(main())


async def test_what_was_wiped_and_applied_is_as_it_was(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        keys = await fill(client)
        before = [await Tenants(client).all_stored(), await list_keys(client, "acme")]
        data = await exported(client)
        await client.flushall()
        assert [await who(client, key) for key in keys] == [None, None, None]
        report = await applied(client, data)

        assert [await who(client, key) for key in keys] == ["acme", None, None]
        assert [await Tenants(client).all_stored(), await list_keys(client, "acme")] == before
        assert list(await Tenants(client).all()) == ["acme"]
        registry = Registry(client, max_per_tenant=8)
        found = await registry.all("acme")
        assert {name: (each.adapter.digest, each.version) for name, each in found.items()} == {"tone": ("2", 2)}
        assert (await registry.put("acme", "old", adapter("4"))).version == 2
        assert (report.made, report.deleted, report.keys_put, report.revoked, report.adapters_put) == (1, 1, 1, 2, 2)


async def test_what_was_revoked_or_deleted_before_the_wipe_stays_so(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        keys = await fill(client)
        data = await exported(client)
        await client.flushall()
        await applied(client, data)

        assert not await put_key(client, SECRET, "acme", keys[1])
        with pytest.raises(InvalidRequest, match="not used again"):
            await create_key(client, SECRET, "gone")


async def test_applied_twice_it_changes_nothing(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        await fill(client)
        data = await exported(client)
        first = await applied(client, data)
        again = await applied(client, data)

        assert first == again == tenant_backup.Report(same=1, deleted=1, keys_same=1, adapters_same=2)
        assert (await exported(client)).splitlines()[:-1] == data.splitlines()[:-1]


async def test_what_has_changed_since_the_export_is_not_taken_back(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        await Tenants(client).create("acme", Settings(), now=100.0)
        await Tenants(client).create("beta", Settings(), now=100.0)
        keys = [await create_key(client, SECRET, tenant) for tenant in ("acme", "beta", "acme")]
        data = await exported(client)
        await Tenants(client).change("acme", lambda _: Settings(tier_policy="edge_only"), now=LATER)
        new = await create_key(client, SECRET, "acme")
        await revoke_key(client, SECRET, keys[2])
        await delete(client, "beta")
        report = await applied(client, data)

        assert (await Tenants(client).get("acme")).settings.tier_policy == "edge_only"
        assert [await who(client, key) for key in (*keys, new)] == ["acme", None, None, "acme"]
        assert (report.newer, report.deleted, report.keys_same, report.keys_left_out) == (1, 1, 1, 2)
        assert report.remarks == [
            "acme: left as it is, its settings were changed since",
            "beta: left out, it was deleted since",
        ]


async def test_over_an_older_state_settings_deletions_and_revocations_of_the_export_win(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        await Tenants(client).create("acme", Settings(), now=100.0)
        await Tenants(client).create("beta", Settings(), now=100.0)
        keys = [await create_key(client, SECRET, tenant) for tenant in ("acme", "beta")]
        old = await exported(client)
        await Tenants(client).change("acme", lambda _: Settings(tier_policy="edge_only"), now=LATER)
        await revoke_key(client, SECRET, keys[0])
        await delete(client, "beta")
        latest = await exported(client)
        await client.flushall()
        await applied(client, old)  # as a disk of yesterday would have it
        assert [await who(client, key) for key in keys] == ["acme", "beta"]
        report = await applied(client, latest)

        assert [await who(client, key) for key in keys] == [None, None]
        assert (await Tenants(client).get("acme")).settings.tier_policy == "edge_only"
        assert list(await Tenants(client).all()) == ["acme"]
        assert (report.changed, report.deleted, report.revoked) == (1, 1, 1)
        assert report.remarks == ["beta: deleted, as the export says; keys revoked: 1"]


async def test_no_key_and_no_secret_stands_in_an_export(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        keys = await fill(client)
        data = await exported(client)

    assert b"acme" in data
    for key in keys:
        assert key.removeprefix("sk-penstock-").encode() not in data
    assert SECRET.hex().encode() not in data


async def test_what_is_cut_or_of_another_platform_is_refused_and_nothing_is_applied(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        await fill(client)
        data = await exported(client)

    lines = data.splitlines(keepends=True)
    later = lines[0].replace(b'"version":1', b'"version":2')
    for mistake, sentence in (
        (b"".join(lines[:-1]), "is not whole"),
        (b"".join([*lines[:2], *lines[3:]]), "is not whole"),
        (data[:-30], r"line \d+ of the export can't be read"),
        (later + b"".join(lines[1:]), "has the version 2"),
        (data.replace(b'"max_parallel":3', b'"max_parallel":-3'), "max_parallel must be at least 1"),
        (data.replace(b'"tenant","id":"acme"', b'"tenant","id":"a b"'), "a tenant id is"),
        (later + b'{"line":"of version 2"}\n' + b"".join(lines[1:]), "has the version 2"),
    ):
        assert tenant_backup.is_export(mistake)
        with pytest.raises(PenstockError, match=sentence):
            tenant_backup.parse(mistake, SECRET)
    with pytest.raises(ConfigError, match="another cluster secret"):
        tenant_backup.parse(data, b"another secret..")


async def test_default_limits_and_published_prefixes_come_back_where_redis_lost_them(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        await Tenants(client).set_defaults(Limits(max_parallel=4))
        await publish(client, "house", "Be brief.", 100.0)
        data = await exported(client)
        await client.flushall()
        report = await applied(client, data)
        found = await read_published(client)

        assert await Tenants(client).defaults() == Limits(max_parallel=4)
        assert found is not None
        assert found.prefixes == [Prefix("house", "Be brief.", 100)]
        assert (report.defaults_put, report.prefixes_put, report.prefixes_left) == (1, 1, 0)


async def test_default_limits_and_prefixes_that_were_changed_since_stay(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        await Tenants(client).set_defaults(Limits(max_parallel=4))
        await publish(client, "house", "Be brief.", 100.0)
        await publish(client, "old", "Be long.", 100.0)
        data = await exported(client)
        await Tenants(client).set_defaults(Limits(max_parallel=5))
        await withdraw(client, "old")
        await publish(client, "house", "Be briefer.", 200.0)
        report = await applied(client, data)
        found = await read_published(client)

        assert await Tenants(client).defaults() == Limits(max_parallel=5)
        assert found is not None
        assert [prefix.text for prefix in found.prefixes] == ["Be briefer."]
        assert (report.defaults_put, report.prefixes_put, report.prefixes_left) == (0, 0, 2)


async def test_a_record_that_can_not_be_read_is_said_and_no_backup_written(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        for name in ("penstock:key:{00}", "penstock:tenant:{acme}:settings"):
            await client.set(name, b"{")
            with pytest.raises(ConfigError, match="can't be read"):
                await exported(client)
            await client.delete(name)


def test_an_empty_file_is_no_backup(server: EmbeddedRedis, tmp_path: Path) -> None:
    """A pipe from an export that failed leaves one."""
    file = tmp_path / "tenants.jsonl"
    file.write_text("\n")
    refused = penstock(server.url, "tenant", "apply", str(file))

    assert refused.returncode == 2
    assert "is empty" in refused.stderr


def test_an_export_that_can_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """Pieces of it would fill the volume for good: each has another name, and old ones are removed after a success."""

    def lines() -> Iterator[bytes]:
        yield b"{}\n"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        tenant_backup.write(lines(), output=None, folder=tmp_path, keep=3, now=1000.0)

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_left_is_replaced(tmp_path: Path) -> None:
    tenant_backup.write([b"{}\n"], output=None, folder=tmp_path, keep=3, now=1000.0)
    [whole] = tmp_path.iterdir()
    (tmp_path / ".tenants-19700101T002000Z.jsonl.new").write_bytes(b"{")
    tenant_backup.write([b"{}\n"], output=None, folder=tmp_path, keep=3, now=2000.0)

    assert whole in list(tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2


def test_an_apply_that_revokes_waits_for_the_disk_as_a_revocation_does(server: EmbeddedRedis, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    run(server, fill)
    assert penstock(server.url, "tenant", "export", "--output", str(file)).returncode == 0
    run(server, lambda client: client.config_set("appendonly", "no"))
    nothing_new = penstock(server.url, "tenant", "apply", str(file))
    run(server, lambda client: client.flushall())
    revoking = penstock(server.url, "tenant", "apply", str(file))

    assert "note: Redis" not in nothing_new.stderr
    assert "note: Redis" in revoking.stderr


def test_the_commands_write_files_that_only_their_owner_reads_and_the_latest_stay(
    server: EmbeddedRedis, tmp_path: Path
) -> None:
    keys = run(server, fill)
    assert tenant_backup.is_export(penstock(server.url, "tenant", "export").stdout.encode())
    folder, file = tmp_path / "backups", tmp_path / "one.jsonl"
    folder.mkdir()
    (folder / "tenants-20010101T000000Z.jsonl").write_text("old")
    (folder / "mine").write_text("kept")
    assert penstock(server.url, "tenant", "export", "--folder", str(folder), "--keep", "1").returncode == 0
    assert penstock(server.url, "tenant", "export", "--output", str(file)).returncode == 0
    run(server, lambda client: client.flushall())
    found = penstock(server.url, "tenant", "apply", str(file))

    assert found.returncode == 0, found.stderr
    assert "keys: 1 put back, 0 there already, 0 left out; 2 revoked" in found.stdout
    assert run(server, lambda client: who(client, keys[0])) == "acme"
    assert file.stat().st_mode & 0o777 == 0o600
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 2
    assert names[0] == "mine"
    assert "2001" not in names[1]
    assert json.loads(file.read_bytes().splitlines()[1])["record"]["created"] == 100
    assert msgspec.json.decode(file.read_bytes().splitlines()[-1])["line"] == "end"
