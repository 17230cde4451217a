"""The thread that prepares requests: bounded, in order, and its errors arrive."""

import asyncio
import threading
from collections.abc import Iterator
from itertools import count

import pytest

from penstock_loadtest.errors import TraceInvalid
from penstock_loadtest.planned import Planned
from penstock_loadtest.run.ahead import Ahead


def plan(numbers: Iterator[int] | range, *, turn: int = 0) -> Iterator[Planned]:
    return (Planned(index=n, at_s=0.0, prompt=f"{n}", max_tokens=1, turn=turn) for n in numbers)


def body(planned: Planned) -> bytes:
    return b"x" * 100


async def drained(ahead: Ahead) -> list[int]:
    indexes = []
    while (item := await ahead.next()) is not None:
        indexes.append(item.planned.index)
    return indexes


async def test_everything_comes_in_order_though_little_fits() -> None:
    async with Ahead(plan(range(5000)), body, max_items=7) as ahead:
        assert await drained(ahead) == list(range(5000))
        assert await ahead.next() is None


async def test_the_thread_runs_ahead_by_so_many_requests_and_no_more() -> None:
    drawn = []

    def prepare(planned: Planned) -> bytes:
        drawn.append(planned.index)
        return body(planned)

    async with Ahead(plan(count()), prepare, max_items=20) as ahead:
        await ahead.wait_filled(10, asyncio.Event())
        assert len(drawn) == 20
        for _ in range(9):
            await ahead.next()
        assert len(drawn) == 20


async def test_the_thread_runs_ahead_by_so_many_bytes_and_no_more() -> None:
    drawn = []

    def prepare(planned: Planned) -> bytes:
        drawn.append(planned.index)
        return body(planned)

    async with Ahead(plan(count()), prepare, max_bytes=1000) as ahead:
        await ahead.wait_filled(10, asyncio.Event())
        assert len(drawn) == 10


async def test_bodies_of_later_turns_are_left_to_the_runner() -> None:
    async with Ahead(plan(range(1), turn=1), body) as ahead:
        item = await ahead.next()
        assert item is not None
        assert item.body is None


async def test_an_error_of_the_plan_comes_behind_what_it_yielded() -> None:
    def broken() -> Iterator[Planned]:
        yield from plan(range(3))
        raise TraceInvalid("trace.jsonl, line 4: not JSON.")

    async with Ahead(broken(), body) as ahead:
        for _ in range(3):
            assert await ahead.next() is not None
        with pytest.raises(TraceInvalid, match="line 4"):
            await ahead.next()


async def test_an_error_is_raised_before_the_first_request_where_it_is_already_known() -> None:
    def broken() -> Iterator[Planned]:
        yield from plan(range(3))
        raise TraceInvalid("trace.jsonl, line 4: not JSON.")

    async with Ahead(broken(), body) as ahead:
        with pytest.raises(TraceInvalid, match="line 4"):
            await ahead.wait_filled(10, asyncio.Event())


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_filling_ends_with_ctrl_c_and_with_its_time(is_stopped: bool) -> None:
    release = threading.Event()

    def prepare(planned: Planned) -> bytes:
        release.wait(20)
        return body(planned)

    stop = asyncio.Event()
    if is_stopped:
        stop.set()
    async with Ahead(plan(range(3)), prepare) as ahead:
        await ahead.wait_filled(20 if is_stopped else 0.01, stop)
        release.set()
        assert await drained(ahead) == [0, 1, 2]


async def test_leaving_ends_the_thread_wherever_it_is() -> None:
    before = threading.active_count()
    async with Ahead(plan(count()), body, max_items=5):
        pass

    assert threading.active_count() <= before
