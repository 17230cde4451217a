"""The thread that prepares requests: bounded, in order, and its errors arrive."""

import asyncio
import threading
from collections.abc import Iterator
from itertools import count

import pytest

from penstock_loadtest.errors import TraceInvalid
from penstock_loadtest.planned import Planned
from penstock_loadtest.run.prefetch import PrefetchQueue


def plan(numbers: Iterator[int] | range, *, turn: int = 0) -> Iterator[Planned]:
    return (Planned(index=n, at_s=0.0, prompt=f"{n}", max_tokens=1, turn=turn) for n in numbers)


def body(planned: Planned) -> bytes:
    return b"x" * 100


async def drained(queue: PrefetchQueue) -> list[int]:
    indexes = []
    while (item := await queue.next()) is not None:
        indexes.append(item.planned.index)
    return indexes


async def test_everything_comes_in_order_though_little_fits() -> None:
    async with PrefetchQueue(plan(range(5000)), body, max_items=7) as queue:
        assert await drained(queue) == list(range(5000))
        assert await queue.next() is None


async def test_the_thread_runs_ahead_by_so_many_requests_and_no_more() -> None:
    drawn = []

    def prepare(planned: Planned) -> bytes:
        drawn.append(planned.index)
        return body(planned)

    async with PrefetchQueue(plan(count()), prepare, max_items=20) as queue:
        await queue.wait_filled(10, asyncio.Event())
        assert len(drawn) == 20
        for _ in range(9):
            await queue.next()
        assert len(drawn) == 20


async def test_the_thread_runs_ahead_by_so_many_bytes_and_no_more() -> None:
    drawn = []

    def prepare(planned: Planned) -> bytes:
        drawn.append(planned.index)
        return body(planned)

    async with PrefetchQueue(plan(count()), prepare, max_bytes=1000) as queue:
        await queue.wait_filled(10, asyncio.Event())
        assert len(drawn) == 10


async def test_bodies_of_later_turns_are_left_to_the_runner() -> None:
    async with PrefetchQueue(plan(range(1), turn=1), body) as queue:
        item = await queue.next()
        assert item is not None
        assert item.body is None


async def test_an_error_of_the_plan_comes_behind_what_it_yielded() -> None:
    def broken() -> Iterator[Planned]:
        yield from plan(range(3))
        raise TraceInvalid("trace.jsonl, line 4: not JSON.")

    async with PrefetchQueue(broken(), body) as queue:
        for _ in range(3):
            assert await queue.next() is not None
        with pytest.raises(TraceInvalid, match="line 4"):
            await queue.next()


async def test_an_error_is_raised_before_the_first_request_where_it_is_already_known() -> None:
    def broken() -> Iterator[Planned]:
        yield from plan(range(3))
        raise TraceInvalid("trace.jsonl, line 4: not JSON.")

    async with PrefetchQueue(broken(), body) as queue:
        with pytest.raises(TraceInvalid, match="line 4"):
            await queue.wait_filled(10, asyncio.Event())


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_filling_ends_with_ctrl_c_and_with_its_time(is_stopped: bool) -> None:
    release = threading.Event()

    def prepare(planned: Planned) -> bytes:
        release.wait(20)
        return body(planned)

    stop = asyncio.Event()
    if is_stopped:
        stop.set()
    async with PrefetchQueue(plan(range(3)), prepare) as queue:
        await queue.wait_filled(20 if is_stopped else 0.01, stop)
        release.set()
        assert await drained(queue) == [0, 1, 2]


def test_leaving_ends_the_thread_wherever_it_is() -> None:
    async def main() -> None:
        async with PrefetchQueue(plan(count()), body, max_items=5):
            pass

    before = num_own_threads()
    asyncio.run(main())

    assert num_own_threads() <= before


def num_own_threads() -> int:
    """Threads that somebody must end: the test runner's own connection shows up as a daemon, at any time."""
    return sum(not thread.daemon for thread in threading.enumerate())
