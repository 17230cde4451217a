import asyncio

import pytest

from penstock.router.api.reads import KEEP_S, MAX_KEPT, KeptPages
from penstock.tenancy.tenants import Limits, Settings
from tests.unit.router.http_fakes import running_gateway

FOUR = Settings(limits=Limits(requests_per_minute=4))
READS = ("/v1/models", "/v1/models/tiny", "/v1/receipts/none", "/v1/usage")


class Reader:
    """Counts readings; each is a page of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.count = 0
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.pages = KeptPages(lambda: self.now_s)

    async def get(self, tenant: str = "a") -> bytes:
        return await self.pages.get(tenant, self._read)

    async def _read(self) -> bytes:
        self.count += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return b"%d" % self.count


async def test_a_page_is_read_once_a_second_for_each_tenant() -> None:
    reader = Reader()

    assert [await reader.get(), await reader.get(), await reader.get("b"), await reader.get()] == [
        b"1",
        b"1",
        b"2",
        b"1",
    ]
    reader.now_s += KEEP_S
    assert await reader.get() == b"3"


async def test_many_at_once_wait_for_one_reading_and_one_that_hangs_up_fails_no_other() -> None:
    reader = Reader()
    reader.gate.clear()
    tasks = [asyncio.create_task(reader.get()) for _ in range(10)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    reader.gate.set()

    assert await asyncio.gather(*tasks[1:]) == [b"1"] * 9


async def test_a_failed_reading_is_not_kept() -> None:
    reader = Reader()
    reader.error = RuntimeError("away")
    with pytest.raises(RuntimeError):
        await reader.get()
    reader.error = None

    assert await reader.get() == b"2"


async def test_what_is_too_old_to_be_sent_again_takes_no_memory() -> None:
    reader = Reader()
    for tenant in ("a", "b", "c"):
        await reader.get(tenant)
    reader.now_s += KEEP_S
    await reader.get("d")

    assert len(reader.pages) == 1


async def test_the_pages_kept_are_bounded() -> None:
    reader = Reader()
    for number in range(MAX_KEPT + 1):
        await reader.get(str(number))
    count = reader.count
    await reader.get("0")

    assert reader.count == count + 1


@pytest.mark.parametrize("path", READS)
async def test_reads_count_among_the_requests_per_minute(path: str) -> None:
    async with running_gateway(settings=FOUR, num_gateways=1) as world:
        statuses = [(await world.client.get(path)).status_code for _ in range(4)]
        refused = await world.client.get(path)

        assert 429 not in statuses
        assert refused.status_code == 429
        assert refused.headers["x-ratelimit-limit-requests"] == "4"
        assert (await world.chat()).status_code == 429


async def test_reads_of_a_tenant_without_such_a_limit_are_not_counted() -> None:
    async with running_gateway(settings=Settings(limits=Limits(tokens_per_minute=100))) as world:
        responses = [await world.client.get("/v1/models") for _ in range(20)]

        assert {response.status_code for response in responses} == {200}


async def test_usage_in_a_form_that_is_none_is_refused() -> None:
    async with running_gateway() as world:
        refused = await world.client.get("/v1/usage?format=xml")

        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "format"
