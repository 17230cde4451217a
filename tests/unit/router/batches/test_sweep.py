import os
from pathlib import Path

from penstock.router.batches.config import BatchesConfig
from penstock.router.batches.sweep import ORPHAN_S, Sweeper
from penstock.tenancy.tenants import Tenant
from tests.unit.router.batches.batch_fakes import World, lines, world


async def sweep(found: World) -> None:
    async def find_tenant(tenant: str) -> Tenant | None:
        return None if found.is_tenant_gone and tenant == found.tenant else Tenant(tenant, b"salt")

    await Sweeper(found.parts, find_tenant, lambda: found.now).sweep()


def on_disk(found: World, folder: Path) -> set[str]:
    return {path.name for path in (folder / found.tenant).iterdir()}


async def test_files_go_when_their_time_is_over_but_not_while_a_batch_reads_them(
    batch_redis: str, folder: Path
) -> None:
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(2), window="7d")
        unused = await found.bring(b"x")

        await sweep(found)
        assert on_disk(found, folder) == {record.input_file_id, unused.id}
        found.now += 2 * 86400
        await sweep(found)
        assert on_disk(found, folder) == {record.input_file_id}
        assert [file.id for file in await found.parts.files.all(found.tenant)] == [record.input_file_id]

        await found.parts.batches.replace(found.tenant, record, record.move_to("cancelled", found.now))
        await sweep(found)
        assert on_disk(found, folder) == set()


async def test_ended_batches_are_remembered_as_long_as_is_set(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder, BatchesConfig(keep_days=2)) as found:
        record = await found.create(lines(1))
        await found.parts.batches.replace(found.tenant, record, record.move_to("completed", found.now))

        found.now += 86400
        await sweep(found)
        assert len(await found.parts.batches.all(found.tenant)) == 1
        found.now += 86401
        await sweep(found)
        assert await found.parts.batches.all(found.tenant) == []


async def test_nothing_is_left_of_a_tenant_that_was_deleted(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        await found.bring(b"x")
        record = await found.create(lines(1))
        await found.parts.batches.replace(found.tenant, record, record.move_to("completed", found.now))
        found.is_tenant_gone = True

        await sweep(found)

        assert on_disk(found, folder) == set()
        assert await found.parts.files.all(found.tenant) == []
        assert await found.parts.batches.all(found.tenant) == []


async def test_texts_without_a_record_go_when_nobody_can_be_writing_them(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        home = folder / found.tenant
        draft = found.parts.folder.open_draft(found.tenant)
        (draft / "text").write_bytes(b"x")
        (home / f"file-{1:024x}").write_bytes(b"x")
        (home / "batch_of_yore").mkdir()
        record = await found.create(lines(1))
        found.parts.folder.results(found.tenant, record.id).mkdir()
        everything = on_disk(found, folder)

        for path in home.rglob("*"):
            os.utime(path, (found.now, found.now))
        await sweep(found)
        assert on_disk(found, folder) == everything
        found.now += ORPHAN_S + 1
        await sweep(found)
        assert on_disk(found, folder) == {record.id, record.input_file_id}
