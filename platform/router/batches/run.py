"""One batch under a lease: from its input to its output and error file.

Not which batch (`runner`). Whoever holds the lease may begin anywhere: what is done is in the registry's marks and the
folder's results, and everything here may be repeated. Invariants: a line's result is on the disk before its mark is
set; a mark and the line's usage are set in one step; without the lease nothing is marked, and no line runs for long.
What a line has used is counted once: with its mark, or when the batch is stopped in the middle of it. Of a line that is
given up to another gateway, what it has cost counts at once, and its tokens and requests when it is run again; the try
that was under way is not charged. A mark that is on its way to Redis when its line is cancelled is waited for: only its
answer says what is counted. What its tries before were charged stays: their budget has been settled, and usage
has the same sum.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal, TypeVar

import msgspec

from penstock.router.batches.answer import Answer, Serve, TriedUsage, answer
from penstock.router.batches.batch_record import BatchRecord
from penstock.router.batches.batch_registry import CommittedLine, Lease, LineUsage
from penstock.router.batches.capacity import Capacity
from penstock.router.batches.dependencies import BatchDependencies
from penstock.router.batches.file_registry import FileRecord
from penstock.router.batches.lines import NOT_RUN, encode_answer, encode_not_run
from penstock.router.batches.results import ResultFile, assemble
from penstock.router.batches.scan import ScannedInput, scan
from penstock.router.batches.unavailable import end_tasks
from penstock.router.transport.stay import STAY_PAIR
from penstock.tenancy.tenants import Tenant
from penstock.tenancy.usage import Used
from penstock.wire.batches import BatchError
from penstock.wire.errors import Overloaded

LEASE_S = 15.0
"""Time after which another gateway may take a batch whose gateway has gone, seconds."""
RENEW_S = 1.0
"""Time between two looks at lease, record and tenant, seconds."""
MARGIN_S = 5.0
"""How long before its end a lease that can't be renewed counts as lost, seconds."""
WAITING = frozenset({429, 503})
"""Statuses after which a line waits, however long that takes: a limit, or no room."""
REPEATED = frozenset({500, 502, 504})
"""Statuses after which a line is run again, up to MAX_TRIES times in all."""
MAX_TRIES = 3
COMMIT_S = 5.0
"""Longest wait of a line that is cancelled for the answer to its mark, seconds: as long as a call of Redis may take."""
STALLED_S = 60.0
"""Time without any line's answer after which a batch that waits for its tenant counts as stalled, seconds."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 30.0
REDIS_PAUSE_S = 0.5
DISK_PAUSE_S = 5.0

T = TypeVar("T")
Stop = Literal["cancelled", "expired"]

log = logging.getLogger("penstock.batches")


@dataclass(frozen=True)
class LineRunner:
    """What the lines of all batches are run with."""

    parts: BatchDependencies
    serve: Serve
    find_tenant: Callable[[str], Awaitable[Tenant | None]]
    """Finds a tenant by id; None: there is none any more. Raises Overloaded."""
    capacity: Capacity
    max_line_bytes: int
    count: Callable[[str], None]
    """Called with the outcome of each line, and with `repeated` for each that is run again."""
    charge: Callable[[str, LineUsage], None]
    """Adds to a tenant's usage what a line has used that gets no mark here."""
    note_charge: Callable[[LineUsage], None]
    """Called with what each line has used whose usage was added with its mark."""
    now: Callable[[], float]
    """Unix time, seconds."""
    clock: Callable[[], float]
    """Monotonic time, seconds."""
    random: Random
    """Source of request ids."""


class BatchRun:
    """The running of one batch. record: as it was when the lease was taken."""

    def __init__(self, runner: LineRunner, lease: Lease, record: BatchRecord) -> None:
        self._runner = runner
        self._parts = runner.parts
        self._lease = lease
        self._record = record
        self._tenant: Tenant | None = None
        self._stop: Stop | None = None
        self._lines: asyncio.Task[None] | None = None
        self._is_lost = asyncio.Event()
        self._is_over = False
        """Whether somebody else may run the batch now: what a thread still does must not be put in place."""
        self._has_quota = asyncio.Event()
        self._is_refused = False
        """Whether the latest line was refused, by a limit or for want of room."""
        self._answered_s = runner.clock()
        """Time of the latest answer to a line that was no refusal; monotonic seconds."""
        self._own = asyncio.Semaphore(self._parts.config.max_parallel)
        """Lines of this batch under way, those that wait to be repeated included."""
        self._writing = asyncio.Lock()

    @property
    def is_stalled(self) -> bool:
        """Whether its lines only wait, and have for a while: for limits, or for their tenant's room on the disk."""
        is_waiting = self._is_refused or not self._has_quota.is_set()
        return is_waiting and self._runner.clock() - self._answered_s >= STALLED_S

    async def run(self) -> None:
        """Run until the batch has ended, or the lease is lost. Raises OSError where the folder can't be read, and
        Overloaded where Redis does not answer before any line has begun."""
        await self._look()
        work = asyncio.create_task(self._work())
        keeping = asyncio.create_task(self._keep())
        try:
            await asyncio.wait([work, keeping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_over = True
            await end_tasks([work, keeping])
        for task in (work, keeping):
            if not task.cancelled():
                task.result()

    # beside the lines

    async def _keep(self) -> None:
        """Renew the lease until it is lost."""
        held_until_s = self._runner.clock() + LEASE_S - MARGIN_S
        while self._runner.clock() < held_until_s:
            try:
                async with asyncio.timeout(RENEW_S):
                    await self._is_lost.wait()
                return
            except TimeoutError:
                pass
            began_s = self._runner.clock()
            try:
                if not await self._parts.batches.renew(self._lease, LEASE_S):
                    return
                held_until_s = began_s + LEASE_S - MARGIN_S
                await self._look()
            except Overloaded:
                continue
        log.warning("batch lost", extra={"batch": self._lease.batch_id, "tenant": self._lease.tenant})

    async def _look(self) -> None:
        """Look whether the lines may go on. Raises Overloaded."""
        tenant = self._lease.tenant
        found = await self._runner.find_tenant(tenant)
        record = await self._parts.batches.get(tenant, self._lease.batch_id)
        if found is not None:
            self._tenant = found
        if found is None or record is None or record.status == "cancelling":
            self._stop_lines("cancelled")
        elif self._runner.now() >= record.expires_at:
            self._stop_lines("expired")
        if await self._parts.files.held_bytes(tenant) < self._parts.config.max_tenant_bytes:
            self._has_quota.set()
        else:
            self._has_quota.clear()

    def _stop_lines(self, stop: Stop) -> None:
        if self._stop is None:
            self._stop = stop
            if self._lines is not None:
                self._lines.cancel()

    def _needs_no_input(self) -> bool:
        """Whether the input is not to be read any more; a batch that has begun needs it for its files."""
        return self._is_over or (self._stop is not None and self._record.in_progress_at is None)

    # the batch

    async def _work(self) -> None:
        source = self._parts.folder.path(self._lease.tenant, self._record.input_file_id)
        config = self._parts.config
        try:
            scanned = await asyncio.to_thread(
                scan, source, self._record.endpoint, config.max_lines, self._runner.max_line_bytes, self._needs_no_input
            )
        except FileNotFoundError:
            gone = BatchError(code="file_not_found", message="The input file is not there any more.")
            await self._end(lambda record: record.fail([gone], self._runner.now()))
            return
        if self._record.status == "validating" and self._stop is None:
            if scanned.errors:
                await self._end(lambda record: record.fail(scanned.errors, self._runner.now()))
                return
            await self._move(partial(_begin, num_lines=len(scanned.starts), now=self._runner.now()))
        await self._run_until_stopped(scanned)
        await self._finish(scanned)

    async def _run_until_stopped(self, scanned: ScannedInput) -> None:
        """Run the lines until all are done or the batch is stopped."""
        if self._stop is not None or self._record.status != "in_progress":
            return
        marks = await self._marks(scanned)
        if self._stop is not None:
            return
        self._lines = asyncio.create_task(self._run_lines(scanned, marks))
        try:
            await asyncio.wait([self._lines])
        finally:
            await end_tasks([self._lines])
        if not self._lines.cancelled():
            self._lines.result()

    async def _marks(self, scanned: ScannedInput) -> list[int]:
        lease = self._lease
        return await self._patiently(
            lambda: self._parts.batches.marks(lease.tenant, lease.batch_id, len(scanned.starts))
        )

    async def _run_lines(self, scanned: ScannedInput, marks: Sequence[int]) -> None:
        folder = self._parts.folder.results(self._lease.tenant, self._lease.batch_id)
        results = await asyncio.to_thread(ResultFile, folder, self._lease.epoch)
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, mark in enumerate(marks):
                    if not mark:
                        await self._own.acquire()
                        await self._has_quota.wait()
                        tasks.create_task(self._run_line(scanned, results, number))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            asyncio.get_running_loop().run_in_executor(None, results.close)  # behind a write that is under way

    async def _run_line(self, scanned: ScannedInput, results: ResultFile, number: int) -> None:
        usage = TriedUsage(lambda: self._is_over and self._stop is None)
        try:
            custom_id, answered = await self._answer(scanned, number, usage)
            await self._store(results, number, custom_id, answered, usage)
        except asyncio.CancelledError:
            self._count_unmarked(usage.take(), is_run_again=self._stop is None)
            raise
        finally:
            self._own.release()

    def _count_unmarked(self, usage: LineUsage | None, *, is_run_again: bool) -> None:
        """Count what was used by a line that gets no mark here."""
        if usage is None:
            return
        if is_run_again:
            money = Used(cost_nano=usage.used.cost_nano, charge_nano=usage.used.charge_nano)
            usage = usage._replace(used=money)
        self._runner.charge(self._lease.tenant, usage)

    async def _answer(self, scanned: ScannedInput, number: int, usage: TriedUsage) -> tuple[str, Answer]:
        """Name of a line and the last answer to it; it is repeated as long as that may help. While it waits, for a
        place or to be repeated, nothing of it is held but its number."""
        runner, num_tries = self._runner, 0
        while True:
            await runner.capacity.acquire()
            try:
                custom_id, answered = await self._try(scanned, number, usage)
            finally:
                runner.capacity.release()
            self._is_refused = answered.status in WAITING
            if not self._is_refused:
                self._answered_s = runner.clock()
            if self._is_refused:
                pause_s = min(max(answered.retry_after_s or 1.0, MIN_PAUSE_S), MAX_PAUSE_S)
            elif answered.status in REPEATED and num_tries < MAX_TRIES - 1:
                num_tries += 1
                pause_s = 2.0**num_tries
            else:
                return custom_id, answered
            del answered
            runner.count("repeated")
            await asyncio.sleep(pause_s)

    async def _try(self, scanned: ScannedInput, number: int, usage: TriedUsage) -> tuple[str, Answer]:
        """Name of a line and an answer to it."""
        runner = self._runner
        assert self._tenant is not None
        line = await asyncio.to_thread(scanned.read, number)
        custom_id, request_id = line.custom_id, f"{runner.random.getrandbits(96):024x}"
        headers = (STAY_PAIR,) if self._record.stays else ()
        answering = answer(
            runner.serve, self._tenant, self._record.endpoint, line.body, request_id, runner.clock, usage, headers
        )
        del line  # the answer takes minutes, and this may be megabytes
        return custom_id, await answering

    async def _store(
        self, results: ResultFile, number: int, custom_id: str, answered: Answer, usage: TriedUsage
    ) -> None:
        """Write a line's result, then its mark and usage."""
        outcome: Literal["completed", "failed"] = "completed" if answered.status == 200 else "failed"
        result = encode_answer(
            self._lease.batch_id, number, custom_id, answered.status, answered.request_id, answered.body
        )
        await self._append(results, number, outcome, result)
        line = CommittedLine(number, outcome, len(result), usage.take())
        committing = asyncio.create_task(self._commit(line))
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            await _wait_through(committing, COMMIT_S)
            await end_tasks([committing])
            if committing.cancelled():  # it may be counted: rather not at all than twice
                log.warning("usage of a line not known", extra={"batch": self._lease.batch_id})
            else:
                committing.result()
            raise

    async def _commit(self, line: CommittedLine) -> None:
        """Set a line's mark and count its usage; without the lease only what it has cost."""
        if await self._patiently(lambda: self._parts.batches.commit(self._lease, line, self._runner.now())):
            self._runner.count(line.outcome)
            if line.usage is not None:
                self._runner.note_charge(line.usage)
        else:
            self._count_unmarked(line.usage, is_run_again=True)
            self._is_lost.set()

    async def _append(
        self, results: ResultFile, number: int, outcome: Literal["completed", "failed"], result: bytes
    ) -> None:
        """Write a row; waits while the disk is full or away."""
        async with self._writing:
            while True:
                try:
                    await asyncio.to_thread(results.append, number, outcome, result)
                except OSError as error:
                    extra = {"batch": self._lease.batch_id, "error": type(error).__name__}
                    log.warning("result not written", extra=extra)
                    await asyncio.sleep(DISK_PAUSE_S)
                else:
                    return

    # the end

    async def _finish(self, scanned: ScannedInput) -> None:
        """Write the files of a batch whose lines are over, and end it."""
        if self._stop != "cancelled":
            await self._move(lambda record: record.move_to("finalizing", self._runner.now()))
        output = errors = None
        status: Literal["completed", "expired", "cancelled"] = self._stop or "completed"
        if not scanned.errors and self._tenant is not None and self._record.in_progress_at is not None:
            marks = await self._marks(scanned)
            if status == "expired" and all(marks):
                status = "completed"
            output, errors = await self._put_files(scanned, marks)

        def end(record: BatchRecord) -> BatchRecord:
            ended = record.move_to(status, self._runner.now())
            return msgspec.structs.replace(ended, output_file_id=output, error_file_id=errors)

        await self._end(end)

    async def _put_files(self, scanned: ScannedInput, marks: Sequence[int]) -> tuple[str | None, str | None]:
        """Ids of the output and the error file; None for one without a line."""
        lease, folder = self._lease, self._parts.folder
        results = folder.results(lease.tenant, lease.batch_id)

        def explain(number: int) -> bytes:
            code, message = NOT_RUN[None if marks[number] else self._stop]
            return encode_not_run(lease.batch_id, number, scanned.read(number).custom_id, code, message)

        def write() -> list[FileRecord]:
            draft = folder.open_draft(lease.tenant)
            try:
                counts = assemble(results, marks, explain, draft / "output", draft / "errors")
                made = []
                for kind, num_lines in zip(("output", "errors"), counts, strict=True):
                    record = self._describe(kind, (draft / kind).stat().st_size, num_lines)
                    if num_lines and not self._is_over:
                        folder.put(draft / kind, lease.tenant, record.id)
                    made.append(record)
                return made
            finally:
                folder.discard(draft)

        ids: list[str | None] = []
        for record in await asyncio.to_thread(write):
            if record.num_lines:
                await self._patiently(partial(self._parts.files.put, lease.tenant, record))
            ids.append(record.id if record.num_lines else None)
        return ids[0], ids[1]

    def _describe(self, kind: str, size_bytes: int, num_lines: int) -> FileRecord:
        """Record of the output or error file, whose id is the same whoever writes it."""
        now, batch_id = int(self._runner.now()), self._lease.batch_id
        return FileRecord(
            id=f"file-{batch_id.removeprefix('batch_')}{kind[0]}",
            size_bytes=size_bytes,
            created=now,
            expires=now + self._record.output_seconds,
            name=f"{batch_id}_{kind}.jsonl",
            purpose="batch_output",
            num_lines=num_lines,
        )

    async def _move(self, change: Callable[[BatchRecord], BatchRecord]) -> None:
        """Change the batch's record, whoever changes it at the same time; one that is being cancelled, or has ended, is
        left as it is."""
        while True:
            before = await self._patiently(partial(self._parts.batches.get, self._lease.tenant, self._record.id))
            if before is None:
                return
            is_fixed = before.has_ended or (before.status == "cancelling" and not change(before).has_ended)
            after = before if is_fixed else change(before)
            if before.status == "cancelling":
                self._stop_lines("cancelled")
            if after == before or await self._patiently(
                partial(self._parts.batches.replace, self._lease.tenant, before, after)
            ):
                self._record = after
                return

    async def _end(self, change: Callable[[BatchRecord], BatchRecord]) -> None:
        await self._move(change)
        lease = self._lease
        # While a batch has not been retired, somebody looks after it, also when this gateway goes in between.
        await asyncio.to_thread(self._parts.folder.remove, lease.tenant, lease.batch_id)
        await self._patiently(lambda: self._parts.batches.retire(lease.tenant, lease.batch_id))
        extra = {"batch": lease.batch_id, "tenant": lease.tenant, "status": self._record.status}
        log.info("batch ended", extra=extra)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Result of a call of a registry, which is repeated until Redis answers; the lease bounds that."""
        while True:
            try:
                return await call()
            except Overloaded:
                await asyncio.sleep(REDIS_PAUSE_S)


async def _wait_through(task: "asyncio.Task[None]", timeout_s: float) -> None:
    """Wait for a task's end, also where the one that waits is cancelled again and again."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    while not task.done() and (left_s := until_s - loop.time()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task], timeout=left_s)


def _begin(record: BatchRecord, num_lines: int, now: float) -> BatchRecord:
    return msgspec.structs.replace(record.move_to("in_progress", now), num_lines=num_lines)
