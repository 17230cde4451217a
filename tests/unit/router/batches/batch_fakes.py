"""Batches over a real Redis and a real folder, whose lines are answered as the test says."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import redis.asyncio

from penstock.base.redis import connect
from penstock.router.batches.batch_record import BatchRecord, new_record
from penstock.router.batches.capacity import Capacity
from penstock.router.batches.config import BatchesConfig
from penstock.router.batches.dependencies import BatchDependencies, make_dependencies
from penstock.router.batches.file_registry import FileRecord
from penstock.router.batches.folder import count_lines
from penstock.router.batches.run import LineRunner
from penstock.router.batches.runner import BatchRunner
from penstock.router.batches.unavailable import end_tasks
from penstock.router.transport.exchange import Exchange
from penstock.router.transport.stay import read_stay
from penstock.tenancy.tenants import Tenant
from penstock.tenancy.usage import UsageLog, UsageRow, Used, day_name, read_usage
from penstock.wire.batches import BatchCreate

ENDPOINT = "/v1/completions"
NOW = 1_000_000.0
MODEL = "tiny"
_numbers = itertools.count()


def line(custom_id: str, url: str = ENDPOINT, **body: object) -> bytes:
    row = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, "prompt": custom_id, **body}}
    return msgspec.json.encode(row)


def lines(count: int) -> bytes:
    return b"\n".join(line(f"line-{number}") for number in range(count))


@dataclass
class Answers:
    """What lines are answered with, and how often each was asked."""

    asked: list[str] = field(default_factory=list)
    """Prompts, in the order in which they were asked."""
    stays: list[bool] = field(default_factory=list)
    """Whether each asked to stay on the edge."""
    answer: Callable[[str], Awaitable[Exception | None]] | None = None
    """Called with the prompt of each line; what it returns is raised. None: each is answered."""

    used_by_faults: Used = field(default_factory=Used)
    """What a line has used that is answered with an error, or not any more."""
    used_by_answers: Used = field(default_factory=lambda: Used(1, 10, 4, 5))
    settled_nano: int = 0
    """Sum of what the tenant's budget was settled with."""

    async def serve(self, exchange: Exchange, tenant: Tenant, path: str) -> None:
        body = await exchange.client.body(None, 2**20, 1.0)
        prompt = msgspec.json.decode(body)["prompt"]
        self.asked.append(prompt)
        self.stays.append(read_stay(exchange))
        try:
            error = None if self.answer is None else await self.answer(prompt)
        except asyncio.CancelledError:
            self._settle(exchange, self.used_by_faults)
            raise
        if error is not None:
            self._settle(exchange, self.used_by_faults)
            raise error
        self._settle(exchange, self.used_by_answers)
        await exchange.answer(msgspec.json.encode({"object": "text_completion", "text": f"of {prompt}"}))

    def _settle(self, exchange: Exchange, used: Used) -> None:
        assert exchange.take_usage is not None
        self.settled_nano += exchange.take_usage(MODEL, "", used).charge_nano


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition in Redis holds."""
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 (Redis tells nobody)
            await asyncio.sleep(0.01)


class World:
    """A tenant of its own, and gateways that run its batches."""

    def __init__(self, client: redis.asyncio.Redis, folder: Path, config: BatchesConfig) -> None:
        self.client = client
        self.tenant = f"tenant-{next(_numbers)}"
        self.parts: BatchDependencies = make_dependencies(msgspec.structs.replace(config, folder=str(folder)), client)
        self.answers = Answers()
        self.now = NOW
        self.clock_s = 0.0
        self.has_room = True
        self.is_tenant_gone = False
        self.outcomes: list[str] = []
        self.noted_nano: list[int] = []
        """Charges of the lines that were marked."""
        self.usage_log = UsageLog(client, "gateway", now=lambda: self.now)

    def runner(self, gateway: str = "gateway-1", clock: Callable[[], float] | None = None) -> BatchRunner:
        return BatchRunner(self.line_runner(clock), gateway)

    def line_runner(self, clock: Callable[[], float] | None = None) -> LineRunner:
        async def find_tenant(tenant: str) -> Tenant | None:
            return None if self.is_tenant_gone else Tenant(tenant, b"salt")

        return LineRunner(
            parts=self.parts,
            serve=self.answers.serve,
            find_tenant=find_tenant,
            capacity=Capacity(self.parts.config.max_parallel, lambda: self.has_room),
            max_line_bytes=2**16,
            count=self.outcomes.append,
            charge=lambda tenant, usage: self.usage_log.add(tenant, *usage),
            note_charge=lambda usage: self.noted_nano.append(usage.used.charge_nano),
            now=lambda: self.now,
            clock=clock or asyncio.get_running_loop().time,
            random=Random(1),
        )

    async def bring(self, text: bytes) -> FileRecord:
        """A file with that text."""
        file_id = f"file-{next(_numbers):024x}"
        draft = self.parts.folder.open_draft(self.tenant)
        (draft / "text").write_bytes(text)
        num_lines = count_lines(draft / "text")
        self.parts.folder.put(draft / "text", self.tenant, file_id)
        self.parts.folder.discard(draft)
        record = FileRecord(
            id=file_id,
            size_bytes=len(text),
            created=int(self.now),
            expires=int(self.now) + 86400,
            name="in.jsonl",
            purpose="batch",
            num_lines=num_lines,
        )
        assert await self.parts.files.put(self.tenant, record)
        return record

    async def create(self, text: bytes, window: str = "24h", *, stays: bool = False, **more: Any) -> BatchRecord:
        """A batch that nobody runs yet."""
        file = await self.bring(text)
        wanted = BatchCreate(input_file_id=file.id, endpoint=ENDPOINT, completion_window=window, **more)
        record = new_record(f"batch_{next(_numbers):024x}", wanted, file.num_lines, 86400, self.now, stays=stays)
        await self.parts.batches.create(self.tenant, record, 10_000)
        return record

    async def get(self, record: BatchRecord) -> BatchRecord:
        found = await self.parts.batches.get(self.tenant, record.id)
        assert found is not None
        return found

    async def run_until_ended(self, record: BatchRecord, *gateways: str) -> BatchRecord:
        """Run gateways until the batch has ended."""
        results = self.parts.folder.results(self.tenant, record.id)
        async with self.running(*gateways or ("gateway-1",)):
            return await self.until(record, lambda found: found.has_ended and not results.exists())

    async def until(self, record: BatchRecord, condition: Callable[[BatchRecord], bool]) -> BatchRecord:
        found = record

        async def is_there() -> bool:
            nonlocal found
            found = await self.get(record)
            return condition(found)

        await eventually(is_there)
        return found

    @asynccontextmanager
    async def running(self, *gateways: str) -> AsyncIterator[list["asyncio.Task[None]"]]:
        tasks = [asyncio.create_task(self.runner(gateway).run()) for gateway in gateways]
        try:
            yield tasks
        finally:
            async with asyncio.timeout(20):
                await end_tasks(tasks)

    def text(self, file_id: str | None) -> list[dict[str, Any]]:
        """Lines of a file."""
        if file_id is None:
            return []
        data = self.parts.folder.path(self.tenant, file_id).read_bytes()
        return [cast("dict[str, Any]", msgspec.json.decode(row)) for row in data.splitlines()]

    async def until_run(self, count: int) -> None:
        """Wait until so many lines are done."""

        async def are_done() -> bool:
            return len(self.outcomes) >= count

        await eventually(are_done)

    async def used(self) -> Used:
        """All that the tenant has used on that day."""
        assert await self.usage_log.flush()
        rows: list[UsageRow] = await read_usage(self.client, self.tenant, [day_name(int(self.now) // 86400)])
        total = Used()
        for row in rows:
            total = total.plus(row.used)
        return total


@asynccontextmanager
async def world(url: str, folder: Path, config: BatchesConfig | None = None) -> AsyncIterator[World]:
    async with connect(url) as client:
        found = World(client, folder, config or BatchesConfig())
        for batch in await found.parts.batches.all(found.tenant):  # of tests before: the gateways would run them
            await found.parts.batches.forget(found.tenant, batch.id)
        yield found


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["custom_id"] for row in rows]


async def never(prompt: str) -> None:
    await asyncio.Event().wait()
