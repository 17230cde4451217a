"""A batch that one gateway gives up, and another takes: leases, and what is counted of lines that were under way."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.router.batches import run
from penstock.router.batches.config import BatchesConfig
from penstock.tenancy.usage import Used
from penstock.wire.errors import Overloaded, RateLimited
from tests.unit.router.batches.batch_fakes import lines, names, never, world

pytestmark = pytest.mark.usefixtures("quick")


async def test_what_one_gateway_leaves_in_the_middle_another_one_ends(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder, BatchesConfig(max_parallel=4)) as found:
        record = await found.create(lines(60))
        is_first, done, num_interrupted = True, asyncio.Event(), 0

        async def answer(prompt: str) -> Exception | None:
            nonlocal num_interrupted
            if is_first and len(found.outcomes) >= 20:
                num_interrupted += 1
                done.set()
                await never(prompt)
            return None

        found.answers.answer, found.answers.used_by_faults = answer, Used(1, 10, 0, 2, 7, 50)
        async with found.running("gateway-1"):
            await done.wait()
        is_first = False
        before = len(found.outcomes)
        ended = await found.run_until_ended(record, "gateway-2", "gateway-3")

        assert 20 <= before < 60
        assert names(found.text(ended.output_file_id)) == [f"line-{number}" for number in range(60)]
        assert num_interrupted > 0
        assert found.answers.settled_nano == 0, "who is answered by another gateway pays for one answer"
        assert await found.used() == Used(60, 600, 240, 300, 7 * num_interrupted)


async def test_what_tries_were_charged_before_their_gateway_gave_the_line_up_is_in_usage_as_in_the_budget(
    batch_redis: str, folder: Path
) -> None:
    async def answer(prompt: str) -> Exception | None:
        return RateLimited("Later.", retry_after_s=20.0)

    async with world(batch_redis, folder) as found:
        found.answers.answer, found.answers.used_by_faults = answer, Used(1, 10, 0, 2, 7, 50)
        record = await found.create(lines(2))
        async with found.running("gateway-1"):
            await found.until_run(2)  # each waits for its next try
        found.answers.answer = None
        await found.run_until_ended(record, "gateway-2")

        assert found.answers.settled_nano == 2 * 50
        assert await found.used() == Used(2, 20, 8, 10, 2 * 7, 2 * 50)


async def test_a_gateway_that_is_gone_without_a_word_loses_its_batch(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(3))
        assert await found.parts.batches.take(found.tenant, record.id, "gone", 0.5) is not None

        ended = await found.run_until_ended(record)

        assert ended.status == "completed"
        assert (await found.used()).requests == 3


async def test_without_its_lease_a_gateway_marks_nothing_and_stops(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(4))
        go_on, has_begun = asyncio.Event(), asyncio.Event()

        async def answer(prompt: str) -> Exception | None:
            if len(found.answers.asked) == 4:
                has_begun.set()
            await go_on.wait()
            return None

        found.answers.answer, found.answers.used_by_answers = answer, Used(1, 10, 4, 5, 7, 50)
        lease = await found.parts.batches.take(found.tenant, record.id, "gateway-1", 60)
        assert lease is not None
        running = asyncio.create_task(run.BatchRun(found.line_runner(), lease, record).run())
        async with asyncio.timeout(10):
            await has_begun.wait()
        await found.parts.batches.release(lease)
        go_on.set()
        async with asyncio.timeout(10):
            await running

        assert set(await found.parts.batches.marks(found.tenant, record.id, 4)) == {0}
        assert (found.answers.settled_nano, found.noted_nano) == (4 * 50, [])
        assert await found.used() == Used(cost_nano=4 * 7, charge_nano=4 * 50), "of what nobody sees, money"
        assert (await found.get(record)).status == "in_progress"


@pytest.mark.parametrize("when", ["before", "after", "too late"])
async def test_a_line_that_is_cancelled_while_its_mark_is_on_its_way_counts_once(
    when: str, batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(batch_redis, folder) as found:
        original, is_on_its_way, go_on = found.parts.batches.commit, asyncio.Event(), asyncio.Event()

        async def commit(*arguments: Any) -> bool:
            if when == "before":
                await original(*arguments)
            is_on_its_way.set()
            await go_on.wait()
            return await original(*arguments)

        monkeypatch.setattr(found.parts.batches, "commit", commit)
        found.answers.used_by_answers = Used(1, 10, 4, 5, 7, 50)
        record = await found.create(lines(1))
        lease = await found.parts.batches.take(found.tenant, record.id, "gateway-1", 60)
        assert lease is not None
        running = asyncio.create_task(run.BatchRun(found.line_runner(), lease, record).run())
        await is_on_its_way.wait()
        for _ in range(3):  # as whoever ends it repeats it
            running.cancel()
            for _ in range(100):  # until the line has been cancelled too
                await asyncio.sleep(0)
        assert not running.done(), "nobody waits for the mark"
        if when != "after":
            await found.parts.batches.release(lease)
        go_on.set()
        async with asyncio.timeout(10):
            await asyncio.wait([running])

        marks = await found.parts.batches.marks(found.tenant, record.id, 1)
        if when == "too late":
            assert (marks, found.outcomes, found.noted_nano) == ([0], [], [])
            assert await found.used() == Used(cost_nano=7, charge_nano=50)
        else:
            assert (marks, found.outcomes, found.noted_nano) == ([lease.epoch], ["completed"], [50])
            assert await found.used() == Used(1, 10, 4, 5, 7, 50)


async def test_a_line_that_is_cancelled_waits_for_its_mark_no_longer_than_redis_may_take(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "COMMIT_S", 0.3)
    async with world(batch_redis, folder) as found:
        is_on_its_way = asyncio.Event()

        async def commit(*arguments: Any) -> bool:
            is_on_its_way.set()
            raise Overloaded("Away.", retry_after_s=1.0)

        monkeypatch.setattr(found.parts.batches, "commit", commit)
        await found.create(lines(1))
        async with found.running("gateway-1"):
            await is_on_its_way.wait()
            began_s = time.monotonic()

        assert 0.3 <= time.monotonic() - began_s < 5
        assert "usage of a line not known" in caplog.messages
        assert await found.used() == Used(), "it may be counted already"
