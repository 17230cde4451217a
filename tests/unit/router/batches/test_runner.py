"""Whole batches, from a file to files, over a real Redis and a real folder; lines are answered as the test says."""

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.router.batches import run, runner, scan
from penstock.router.batches.capacity import Capacity
from penstock.router.batches.config import BatchesConfig
from penstock.router.batches.lines import BatchLine
from penstock.router.batches.scan import ScannedInput
from penstock.router.batches.unavailable import end_tasks
from penstock.tenancy.tenants import tenant_key
from penstock.tenancy.usage import Used
from penstock.wire.errors import EngineFault, InvalidRequest, ModelNotFound, Overloaded, RateLimited
from tests.unit.router.batches.batch_fakes import eventually, line, lines, names, never, world

pytestmark = pytest.mark.usefixtures("quick")


async def test_every_line_is_run_once_and_its_result_is_in_the_order_of_the_input(
    batch_redis: str, folder: Path
) -> None:
    async with world(batch_redis, folder) as found:
        found.answers.used_by_answers = Used(1, 10, 4, 5, 7, 50)
        record = await found.create(lines(40))

        ended = await found.run_until_ended(record)

        rows = found.text(ended.output_file_id)
        assert (ended.status, ended.num_lines, ended.error_file_id) == ("completed", 40, None)
        assert names(rows) == [f"line-{number}" for number in range(40)]
        assert rows[7]["response"]["body"] == {"object": "text_completion", "text": "of line-7"}
        assert sorted(found.answers.asked) == sorted(names(rows))
        assert await found.used() == Used(40, 400, 160, 200, 40 * 7, 40 * 50)
        assert found.noted_nano == [50] * 40
        [counts] = await found.parts.batches.counts(found.tenant, [record.id])
        assert (counts.completed, counts.failed, counts.completion_tokens) == (40, 0, 200)
        output = await found.parts.files.get(found.tenant, ended.output_file_id or "")
        assert output is not None
        assert (output.purpose, output.num_lines) == ("batch_output", 40)
        assert not found.parts.folder.results(found.tenant, record.id).exists()
        assert await found.parts.files.held_bytes(found.tenant) == len(lines(40)) + output.size_bytes
        assert found.outcomes == ["completed"] * 40


@pytest.mark.parametrize("stays", [True, False])
async def test_each_line_of_a_batch_that_stays_says_so_whoever_takes_it_over(
    batch_redis: str, folder: Path, stays: bool
) -> None:
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(12), stays=stays)
        async with found.running("gateway-1"):
            await found.until_run(4)

        ended = await found.run_until_ended(record, "gateway-2")

        assert ended.status == "completed"
        assert len(found.answers.stays) >= 12
        assert set(found.answers.stays) == {stays}


@pytest.mark.parametrize("call", ["replace", "retire"])
async def test_results_go_also_where_the_gateway_goes_just_when_the_batch_has_ended(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(2))
        original, has_ended = getattr(found.parts.batches, call), asyncio.Event()

        async def end_with_it(*arguments: Any) -> object:
            result = await original(*arguments)
            if (await found.get(record)).has_ended:
                has_ended.set()
                await asyncio.Event().wait()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(found.parts.batches, call, end_with_it)
            async with found.running("gateway-1"):
                await has_ended.wait()

        assert (await found.run_until_ended(record, "gateway-2")).status == "completed"


async def test_a_folder_that_is_away_when_a_batch_ends_is_cleared_later(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(2))
        remove, calls = found.parts.folder.remove, 0

        def fail_first(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls <= 3:  # of the run itself, and of two looks behind it
                raise OSError(5, "away")
            remove(*arguments)

        monkeypatch.setattr(found.parts.folder, "remove", fail_first)

        assert (await found.run_until_ended(record)).status == "completed"
        assert calls == 4


async def test_what_fails_is_in_the_error_file(batch_redis: str, folder: Path) -> None:
    async def answer(prompt: str) -> Exception | None:
        return {"line-1": InvalidRequest("No.", param="n"), "line-3": ValueError("secret")}.get(prompt)

    async with world(batch_redis, folder) as found:
        found.answers.answer = answer
        record = await found.create(lines(5) + b"\n" + line("streamed", stream=True))

        ended = await found.run_until_ended(record)

        assert ended.status == "completed"
        assert names(found.text(ended.output_file_id)) == ["line-0", "line-2", "line-4"]
        refused, broken, streamed = found.text(ended.error_file_id)
        assert refused["response"]["status_code"] == 400
        assert refused["response"]["body"]["error"]["message"] == "No."
        assert broken["response"]["status_code"] == 500
        assert "secret" not in msgspec.json.encode(broken).decode()
        assert streamed["response"]["body"]["error"]["param"] == "stream"
        assert await found.used() == Used(3, 30, 12, 15)


async def test_a_line_waits_for_room_as_long_as_it_takes_and_counts_once(batch_redis: str, folder: Path) -> None:
    tries: dict[str, int] = {}

    async def answer(prompt: str) -> Exception | None:
        tries[prompt] = tries.get(prompt, 0) + 1
        if tries[prompt] < 6:
            return (RateLimited if tries[prompt] % 2 else Overloaded)("Later.", retry_after_s=0.01)
        return None

    async with world(batch_redis, folder) as found:
        found.answers.answer = answer

        ended = await found.run_until_ended(await found.create(lines(3)))

        assert len(found.text(ended.output_file_id)) == 3
        assert set(tries.values()) == {6}
        assert found.outcomes.count("repeated") == 15
        assert (await found.used()).requests == 3


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Bodies of the lines that were read, in that order."""
    found: list[bytes] = []
    real = ScannedInput.read

    def read(self: ScannedInput, number: int) -> BatchLine:
        read_line = real(self, number)
        found.append(read_line.body)
        return read_line

    monkeypatch.setattr(ScannedInput, "read", read)
    return found


def is_held(bodies: list[bytes]) -> bool:
    """Whether anybody but the list holds one of them."""
    gc.collect()
    return any(sys.getrefcount(bodies[at]) > 2 for at in range(len(bodies)))  # the list, and the argument


async def test_a_line_is_not_read_before_it_has_a_place(batch_redis: str, folder: Path, bodies: list[bytes]) -> None:
    async with world(batch_redis, folder) as found:
        found.has_room = False
        record = await found.create(lines(3))
        async with found.running("gateway-1"):
            await found.until(record, lambda each: each.status == "in_progress")
            await asyncio.sleep(0.1)
            assert bodies == []
            found.has_room = True
            await found.until_run(3)


async def test_a_line_that_waits_to_be_repeated_holds_no_body(
    batch_redis: str, folder: Path, bodies: list[bytes]
) -> None:
    pauses_s = {f"line-{number}": [30.0, 0.01] for number in range(3)}

    async def answer(prompt: str) -> Exception | None:
        return RateLimited("Later.", retry_after_s=pauses_s[prompt].pop(0)) if pauses_s[prompt] else None

    async def are_free() -> bool:
        return not is_held(bodies)

    async with world(batch_redis, folder) as found:
        found.answers.answer = answer
        record = await found.create(lines(3))
        async with found.running("gateway-1"):
            await found.until_run(3)
            await eventually(are_free)  # the threads that have read them let them go a little later
            assert len(bodies) == 3
        ended = await found.run_until_ended(record, "gateway-2")

        assert len(found.text(ended.output_file_id)) == 3
        assert len(bodies) == 3 + 6, "each is read again by the next gateway, and once more behind its pause"


async def test_a_fault_is_tried_again_a_few_times_and_then_the_lines_result(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(prompt: str) -> Exception | None:
        return EngineFault("Broken.") if prompt == "line-0" else ModelNotFound("None.")

    monkeypatch.setattr(run, "MAX_TRIES", 2)
    async with world(batch_redis, folder) as found:
        found.answers.answer = answer

        ended = await found.run_until_ended(await found.create(lines(2)))

        assert ended.output_file_id is None
        assert [row["response"]["status_code"] for row in found.text(ended.error_file_id)] == [500, 404]
        assert found.answers.asked.count("line-0") == 2
        assert found.answers.asked.count("line-1") == 1, "it would fail again"


async def test_all_tries_of_a_line_are_used_by_one_request(batch_redis: str, folder: Path) -> None:
    tries = 0

    async def answer(prompt: str) -> Exception | None:
        nonlocal tries
        tries += 1
        return [EngineFault("Broken."), Overloaded("Later.", retry_after_s=0.01), None][tries - 1]

    async with world(batch_redis, folder) as found:
        found.answers.answer, found.answers.used_by_faults = answer, Used(1, 10, 0, 2)
        record = await found.create(lines(1))

        ended = await found.run_until_ended(record)

        assert ended.status == "completed"
        assert await found.used() == Used(1, 30, 4, 9)
        [counts] = await found.parts.batches.counts(found.tenant, [record.id])
        assert (counts.prompt_tokens, counts.completion_tokens) == (30, 9)


async def test_a_cancelled_batch_ends_with_the_results_that_there_are(batch_redis: str, folder: Path) -> None:
    async def answer(prompt: str) -> Exception | None:
        if prompt != "line-0":
            await never(prompt)
        return None

    async with world(batch_redis, folder) as found:
        found.answers.answer, found.answers.used_by_faults = answer, Used(1, 10, 0, 2)
        record = await found.create(lines(3))
        async with found.running("gateway-1"):
            await found.until_run(1)
            begun = await found.get(record)
            assert await found.parts.batches.replace(found.tenant, begun, begun.move_to("cancelling", found.now))
            ended = await found.until(record, lambda each: each.has_ended)

        assert (ended.status, ended.cancelled_at) == ("cancelled", int(found.now))
        assert names(found.text(ended.output_file_id)) == ["line-0"]
        assert [(row["custom_id"], row["error"]["code"]) for row in found.text(ended.error_file_id)] == [
            ("line-1", "batch_cancelled"),
            ("line-2", "batch_cancelled"),
        ]
        assert await found.used() == Used(3, 30, 4, 9), "lines under way are charged with what they have used"
        [counts] = await found.parts.batches.counts(found.tenant, [record.id])
        assert (counts.prompt_tokens, counts.completion_tokens) == (10, 5)


async def test_a_batch_that_is_cancelled_before_it_begins_has_no_files(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(3))
        await found.parts.batches.replace(found.tenant, record, record.move_to("cancelling", found.now))

        ended = await found.run_until_ended(record)

        assert (ended.status, ended.output_file_id, ended.error_file_id) == ("cancelled", None, None)
        assert found.answers.asked == []


@pytest.mark.parametrize("how", ["cancelled", "expired", "lost"])
async def test_whatever_ends_a_batch_ends_the_reading_of_its_file(
    how: str, batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "TURN_S", -1.0)
    monkeypatch.setattr(scan, "PAUSE_S", 0.02)  # 60 s for the file
    has_read: asyncio.Queue[int] = asyncio.Queue()
    loop, has_begun = asyncio.get_running_loop(), asyncio.Event()

    def read(*arguments: Any) -> ScannedInput:
        loop.call_soon_threadsafe(has_begun.set)
        scanned = scan.scan(*arguments)
        loop.call_soon_threadsafe(has_read.put_nowait, len(scanned.starts))
        return scanned

    monkeypatch.setattr(run, "scan", read)
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(3000), window="1m")
        async with asyncio.timeout(20), found.running("gateway-1"):
            await has_begun.wait()
            if how == "cancelled":
                await found.parts.batches.replace(found.tenant, record, record.move_to("cancelling", found.now))
            elif how == "expired":
                found.now += 61
            else:
                await found.client.pexpire(tenant_key(found.tenant, f"batch:{record.id}:lease"), 1)
            assert await has_read.get() < 3000
            if how != "lost":
                ended = await found.until(record, lambda each: each.has_ended)
                assert (ended.status, ended.error_file_id) == (how, None)


async def test_when_its_window_is_over_a_batch_ends_with_what_it_has(batch_redis: str, folder: Path) -> None:
    async def answer(prompt: str) -> Exception | None:
        if prompt == "line-2":
            await never(prompt)
        return None

    async with world(batch_redis, folder) as found:
        found.answers.answer = answer
        record = await found.create(lines(3), window="1m")
        async with found.running("gateway-1"):
            await found.until_run(2)
            found.now += 61
            ended = await found.until(record, lambda each: each.has_ended)

        assert ended.status == "expired"
        assert names(found.text(ended.output_file_id)) == ["line-0", "line-1"]
        [late] = found.text(ended.error_file_id)
        assert (late["custom_id"], late["response"], late["error"]["code"]) == ("line-2", None, "batch_expired")


async def test_a_file_with_a_bad_line_runs_nothing_and_says_which(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(2) + b"\n{\n" + line("line-0"))

        ended = await found.run_until_ended(record)

        assert ended.status == "failed"
        assert [(error.line, error.code) for error in ended.errors] == [
            (3, "invalid_json_line"),
            (4, "duplicate_custom_id"),
        ]
        assert found.answers.asked == []


async def test_a_file_that_is_not_there_fails_its_batch(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(2))
        found.parts.folder.remove(found.tenant, record.input_file_id)

        assert [error.code for error in (await found.run_until_ended(record)).errors] == ["file_not_found"]


async def test_lines_wait_while_others_wait_for_a_replica(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        found.has_room = False
        record = await found.create(lines(3))
        async with found.running("gateway-1"):
            await found.until(record, lambda each: each.status == "in_progress")
            await asyncio.sleep(0.1)
            assert found.answers.asked == []
            found.has_room = True
            assert (await found.until(record, lambda each: each.has_ended)).status == "completed"


async def test_lines_wait_while_their_tenant_has_more_bytes_than_it_may(batch_redis: str, folder: Path) -> None:
    text = lines(4)
    async with world(batch_redis, folder, BatchesConfig(max_tenant_bytes=len(text) + 10)) as found:
        other = await found.bring(b"x" * 10)
        record = await found.create(text)
        async with found.running("gateway-1"):
            await found.until(record, lambda each: each.status == "in_progress")
            await asyncio.sleep(0.1)
            assert found.answers.asked == []
            await found.parts.files.remove(found.tenant, other.id)
            await found.until_run(1)


@pytest.mark.parametrize("why", ["limit", "quota"])
async def test_a_batch_that_waits_for_its_tenant_keeps_no_other_waiting(
    why: str, batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(prompt: str) -> Exception | None:
        return RateLimited("Later.", retry_after_s=0.01) if why == "limit" and prompt.startswith("line") else None

    monkeypatch.setattr(runner, "MAX_RUNNING", 1)
    config = BatchesConfig(max_tenant_bytes=len(lines(2))) if why == "quota" else BatchesConfig()
    async with world(batch_redis, folder, config) as found, world(batch_redis, folder) as other:
        found.answers.answer = answer
        stuck = await found.create(lines(2))
        gateway = found.runner()
        running = asyncio.create_task(gateway.run())
        try:
            await found.until(stuck, lambda each: each.status == "in_progress")
            if why == "limit":
                await found.until_run(2)
            record = await other.create(line("other"))
            await gateway.reconcile()
            assert (await other.get(record)).status == "validating", "the first may still go on"
            monkeypatch.setattr(run, "STALLED_S", 0.0)
            await other.until(record, lambda each: each.has_ended)
        finally:
            await end_tasks([running])


async def test_a_gateway_takes_no_more_batches_than_it_can_hold(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_HELD", 1)
    monkeypatch.setattr(run, "STALLED_S", 0.0)
    async with world(batch_redis, folder, BatchesConfig(max_tenant_bytes=1)) as found:
        stuck = await found.create(lines(1))
        gateway = found.runner()
        running = asyncio.create_task(gateway.run())
        try:
            await found.until(stuck, lambda each: each.status == "in_progress")
            await found.create(lines(1))
            await gateway.reconcile()
            assert gateway.num_running == 1
        finally:
            await end_tasks([running])


async def test_no_more_lines_run_at_once_than_there_are_places(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_running, most, num_asking = 0, 0, 0
    are_full, acquire = asyncio.Event(), Capacity.acquire

    async def count_and_acquire(self: Capacity) -> None:
        nonlocal num_asking
        num_asking += 1
        await acquire(self)

    async def all_ask() -> bool:
        return num_asking == 6

    async def answer(prompt: str) -> Exception | None:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        if num_running == 3:
            are_full.set()
        await are_full.wait()
        await asyncio.sleep(0.001)
        num_running -= 1
        return None

    monkeypatch.setattr(Capacity, "acquire", count_and_acquire)
    async with world(batch_redis, folder, BatchesConfig(max_parallel=3)) as found:
        found.answers.answer = answer
        found.has_room = False
        records = [await found.create(lines(10)) for _ in range(2)]
        async with found.running("gateway-1"):
            await eventually(all_ask)  # three lines of each
            found.has_room = True
            for record in records:
                await found.until(record, lambda each: each.has_ended)

        assert most == 3
        firsts = [name for name in found.answers.asked[:10] if name in ("line-0", "line-1", "line-2")]
        assert len(firsts) > 3, "two batches take turns; two lines may still be read meanwhile, by other threads"


async def test_a_tenant_that_was_deleted_has_its_batches_ended(batch_redis: str, folder: Path) -> None:
    async with world(batch_redis, folder) as found:
        found.is_tenant_gone = True
        record = await found.create(lines(2))

        ended = await found.run_until_ended(record)

        assert ended.status == "cancelled"
        assert found.answers.asked == []


async def test_a_batch_that_breaks_here_is_tried_again(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_scans = 0
    real = run.scan

    def scan(*arguments: Any) -> Any:
        nonlocal num_scans
        num_scans += 1
        if num_scans == 1:
            raise PermissionError("no")
        return real(*arguments)

    monkeypatch.setattr(run, "scan", scan)
    async with world(batch_redis, folder) as found:
        ended = await found.run_until_ended(await found.create(lines(2)))

        assert (ended.status, num_scans) == ("completed", 2)


async def test_results_that_the_disk_does_not_take_are_written_when_it_does(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num_failures = run.ResultFile.append, 0

    def append(self: run.ResultFile, number: int, outcome: Any, result: bytes) -> None:
        nonlocal num_failures
        if num_failures < 3:
            num_failures += 1
            raise OSError("no space left")
        real(self, number, outcome, result)

    monkeypatch.setattr(run.ResultFile, "append", append)
    async with world(batch_redis, folder) as found:
        ended = await found.run_until_ended(await found.create(lines(2)))

        assert len(found.text(ended.output_file_id)) == 2


async def test_a_batch_whose_end_was_interrupted_is_ended_by_the_next_gateway(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(batch_redis, folder) as found:
        record = await found.create(lines(3))
        real, is_broken = found.parts.batches.replace, True

        async def replace(tenant: str, before: Any, after: Any) -> bool:
            if is_broken and after.status == "completed":
                raise ConnectionResetError
            return await real(tenant, before, after)

        monkeypatch.setattr(found.parts.batches, "replace", replace)
        async with found.running("gateway-1"):
            await found.until(record, lambda each: each.status == "finalizing")
        is_broken = False
        ended = await found.run_until_ended(record, "gateway-2")

        assert ended.status == "completed"
        assert len(found.text(ended.output_file_id)) == 3
        assert [file.purpose for file in await found.parts.files.all(found.tenant)].count("batch_output") == 1
        assert (await found.used()).requests == 3


async def test_a_batch_whose_creation_was_interrupted_is_forgotten_after_a_while(
    batch_redis: str, folder: Path
) -> None:
    async with world(batch_redis, folder) as found:
        name = f"{found.tenant}/batch_{1:024x}"
        await found.client.zadd("penstock:open-batches", {name: found.now})
        gateway = found.runner()

        await gateway.reconcile()
        assert found.tenant in [each.tenant for each in await found.parts.batches.open_batches()]
        found.now += 61
        await gateway.reconcile()
        assert found.tenant not in [each.tenant for each in await found.parts.batches.open_batches()]
