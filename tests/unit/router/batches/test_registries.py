"""Records, leases and marks in a real Redis, with a gateway's rights."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.base.redis import connect
from penstock.router.batches import batch_registry
from penstock.router.batches.batch_record import BatchCounts
from penstock.router.batches.batch_registry import CommittedLine, Lease, LineUsage
from penstock.router.batches.config import BatchesConfig
from penstock.router.batches.file_registry import FileRecord
from penstock.tenancy.usage import UsageLog, Used
from penstock.wire.errors import InvalidRequest, Overloaded
from tests.unit.router.batches.batch_fakes import NOW, World, lines, world

USAGE = LineUsage("m", "", Used(1, 10, 4, 5))


async def taken(found: World, batch_id: str, gateway: str = "g1", ttl_s: float = 60.0) -> Lease:
    lease = await found.parts.batches.take(found.tenant, batch_id, gateway, ttl_s)
    assert lease is not None
    return lease


def file(number: int, size: int) -> FileRecord:
    return FileRecord(
        id=f"file-{number:024x}",
        size_bytes=size,
        created=number,
        expires=10**9,
        name="a.jsonl",
        purpose="batch",
        num_lines=1,
    )


async def test_files_are_a_tenants_and_count_against_its_bytes(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        files = found.parts.files

        assert await files.put(found.tenant, file(1, 60), max_bytes=100)
        assert not await files.put(found.tenant, file(2, 41), max_bytes=100)
        assert await files.put(found.tenant, file(2, 40), max_bytes=100)
        assert await files.put(found.tenant, file(2, 40), max_bytes=100), "the same once more"
        assert await files.put(found.tenant, file(3, 1000)), "results are kept in any case"
        assert [each.size_bytes for each in await files.all(found.tenant)] == [60, 40, 1000]
        assert await files.held_bytes(found.tenant) == 1100
        assert await files.get("somebody-else", file(1, 0).id) is None
        assert await files.get(found.tenant, "../secret") is None
        assert await files.remove(found.tenant, file(3, 0).id)
        assert not await files.remove(found.tenant, file(3, 0).id)
        assert await files.held_bytes(found.tenant) == 100
        assert found.tenant in await files.tenants()


async def test_lines_that_wait_are_bounded_until_their_batches_end(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(6))
        batches = found.parts.batches
        next_one = msgspec.structs.replace(record, id=f"batch_{1:024x}")

        with pytest.raises(InvalidRequest, match="10 lines that wait"):
            await batches.create(found.tenant, next_one, max_lines=10)
        assert [each.id for each in await batches.all(found.tenant)] == [record.id]
        await batches.retire(found.tenant, record.id)
        await batches.create(found.tenant, next_one, max_lines=10)
        assert (found.tenant, next_one.id) in [each[:2] for each in await batches.open_batches()]
        assert await batches.get("somebody-else", record.id) is None


async def test_one_gateway_holds_a_batch_until_it_gives_it_up_or_is_gone(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        record, batches = await found.create(lines(1)), found.parts.batches

        first = await taken(found, record.id)
        assert await batches.take(found.tenant, record.id, "g2", 60) is None
        assert await batches.renew(first, 60)
        await batches.release(first)
        await asyncio.sleep(0.01)
        second = await taken(found, record.id, "g2", ttl_s=0.05)
        assert (first.epoch, second.epoch) == (1, 2)
        assert not await batches.renew(first, 60)
        await batches.release(first)  # it is somebody else's
        await asyncio.sleep(0.06)
        assert not await batches.renew(second, 60), "it has ended by itself"
        assert (await taken(found, record.id, "g1")).epoch == 3


async def test_a_line_is_marked_and_counted_once_and_by_the_holder_alone(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        record, batches = await found.create(lines(300)), found.parts.batches
        first = await taken(found, record.id)
        line = CommittedLine(270, "completed", 100, USAGE)

        assert await batches.commit(first, line, NOW)
        assert await batches.commit(first, line, NOW), "its answer was lost, so it is repeated"
        await batches.release(first)
        await asyncio.sleep(0.01)
        assert not await batches.commit(first, CommittedLine(1, "completed", 100, USAGE), NOW)
        assert await batches.commit(first, line, NOW), "it was noted while the lease was held"
        second = await taken(found, record.id, "g2")
        assert await batches.commit(second, line, NOW), "it was done before"
        assert await batches.commit(second, CommittedLine(0, "failed", 50, None), NOW)

        marks = await batches.marks(found.tenant, record.id, 300)
        assert {number: mark for number, mark in enumerate(marks) if mark} == {0: 2, 270: 1}
        assert await found.used() == USAGE.used
        assert await batches.counts(found.tenant, [record.id, "batch_unknown"]) == [
            BatchCounts(completed=1, failed=1, prompt_tokens=10, cached_tokens=4, completion_tokens=5),
            BatchCounts(),
        ]
        size = len(lines(300))
        assert await found.parts.files.held_bytes(found.tenant) == size + 150


async def test_a_lines_usage_adds_to_that_of_other_requests(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        log = UsageLog(found.client, "g1", now=lambda: NOW)
        log.add(found.tenant, "m", "", Used(1, 1, 0, 1))
        assert await log.flush()
        record = await found.create(lines(1))
        await found.parts.batches.commit(await taken(found, record.id), CommittedLine(0, "completed", 1, USAGE), NOW)

        assert await found.used() == Used(2, 11, 4, 6)


async def test_a_record_is_replaced_by_one_of_two_that_want_it(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        record, batches = await found.create(lines(1)), found.parts.batches
        cancelling, begun = record.move_to("cancelling", NOW), record.move_to("in_progress", NOW)

        assert await batches.replace(found.tenant, record, cancelling)
        assert not await batches.replace(found.tenant, record, begun)
        assert await batches.get(found.tenant, record.id) == cancelling


async def test_a_batch_that_is_forgotten_does_not_exist_any_more(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        record, batches = await found.create(lines(1)), found.parts.batches
        await batches.commit(await taken(found, record.id), CommittedLine(0, "completed", 1, None), NOW)

        await batches.forget(found.tenant, record.id)

        assert await batches.all(found.tenant) == []
        assert found.tenant not in [each.tenant for each in await batches.open_batches()]


async def test_a_tenant_with_as_many_batches_as_it_may_have_loses_the_oldest_that_ended(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_registry, "MAX_BATCHES", 3)
    monkeypatch.setattr(batch_registry, "FORGOTTEN_AT_ONCE", 1)
    async with world(batch_redis, folder) as found:
        batches = found.parts.batches
        running, first, second = [await found.create(lines(1)) for _ in range(3)]
        for record in (first, second):
            await batches.replace(found.tenant, record, record.move_to("completed", NOW))
            await batches.retire(found.tenant, record.id)

        third = await found.create(lines(1))
        assert {each.id for each in await batches.all(found.tenant)} == {running.id, second.id, third.id}
        fourth = await found.create(lines(1))
        expected = {running.id, third.id, fourth.id}
        assert {each.id for each in await batches.all(found.tenant)} == expected
        with pytest.raises(InvalidRequest, match="3 batches that have not ended"):
            await found.create(lines(1))
        assert {each.id for each in await batches.not_ended(found.tenant)} == expected


async def test_batches_that_have_ended_are_not_among_the_others(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        batches = found.parts.batches
        assert await batches.not_ended(found.tenant) == []
        running, ended, retired = [await found.create(lines(1)) for _ in range(3)]
        for record in (ended, retired):
            await batches.replace(found.tenant, record, record.move_to("completed", NOW))
        await batches.retire(found.tenant, retired.id)

        assert await batches.not_ended(found.tenant) == [running]


async def test_whoever_has_too_many_files_gets_no_results_to_them(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_registry, "MAX_FILES", 2)
    async with world(batch_redis, folder) as found:
        await found.create(lines(1))

        with pytest.raises(InvalidRequest, match="2 files, results included"):
            await found.create(lines(1))


async def test_without_redis_everything_is_overloaded(folder: Path) -> None:
    async with connect("unix:///nonexistent/redis.sock") as client:
        found = World(client, folder, BatchesConfig())

        for call in (
            found.parts.files.all("t"),
            found.parts.files.held_bytes("t"),
            found.parts.batches.all("t"),
            found.parts.batches.open_batches(),
            found.parts.batches.take("t", "b", "g", 1.0),
        ):
            with pytest.raises(Overloaded):
                await call
