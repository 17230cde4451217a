import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
import uvloop

from penstock_loadtest.client.schedule import CALLS_AT_ONCE, Schedule
from tests.real_time import real_time

RUNNERS = [asyncio.run, uvloop.run]


def run(loop: Callable[[Awaitable[None]], None], test: Callable[[Schedule], Awaitable[None]]) -> None:
    async def main() -> None:
        schedule = Schedule()
        try:
            async with asyncio.timeout(20):
                await test(schedule)
        finally:
            schedule.close()

    loop(main())


@pytest.mark.parametrize("loop", RUNNERS)
def test_calls_come_in_order_of_time_and_never_early(loop: Callable[[Awaitable[None]], None]) -> None:
    async def test(schedule: Schedule) -> None:
        calls: list[tuple[float, float]] = []
        done = asyncio.Event()
        start = time.perf_counter()
        for delay in (0.03, 0.01, 0.0101, 0.02, -1.0):
            schedule.at(start + delay, lambda now, due=start + delay: calls.append((due, now)))  # type: ignore[misc]
        schedule.at(start + 0.04, lambda now: done.set())
        await done.wait()

        assert [due - start for due, _ in calls] == pytest.approx([-1.0, 0.01, 0.0101, 0.02, 0.03])
        assert all(now >= due for due, now in calls)

    run(loop, test)


@real_time
@pytest.mark.parametrize("loop", RUNNERS)
def test_calls_are_late_by_less_than_an_event_loop_could_tell(loop: Callable[[Awaitable[None]], None]) -> None:
    """A loop that keeps whole milliseconds calls 0.3 ms early, or 0.7 ms late."""

    async def test(schedule: Schedule) -> None:
        late: list[float] = []
        done = asyncio.Event()

        def plan() -> None:
            due = time.perf_counter() + 0.0013
            schedule.at(due, lambda now: note(now - due))

        def note(late_s: float) -> None:
            late.append(late_s)
            if len(late) == 100:
                done.set()
            else:
                plan()

        plan()
        await done.wait()

        assert min(late) >= 0
        assert sorted(late)[2] < 0.0005  # three at least, however busy the machine is

    run(loop, test)


@pytest.mark.parametrize("loop", RUNNERS)
def test_a_call_may_schedule_others_and_its_failure_does_not_stop_them(loop: Callable[[Awaitable[None]], None]) -> None:
    async def test(schedule: Schedule) -> None:
        done = asyncio.Event()
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))

        def fail(now: float) -> None:
            schedule.at(now, lambda _: schedule.at(now + 0.001, lambda _: done.set()))
            raise ValueError("meant")

        schedule.at(time.perf_counter(), fail)
        await done.wait()

        assert [str(failure) for failure in failures] == ["meant"]

    run(loop, test)


@pytest.mark.parametrize("loop", RUNNERS)
def test_a_backlog_of_calls_leaves_the_loop_its_turns(loop: Callable[[Awaitable[None]], None]) -> None:
    async def test(schedule: Schedule) -> None:
        turns: list[int] = []
        calls: list[float] = []

        def turn() -> None:
            turns.append(len(calls))
            if len(calls) < 10 * CALLS_AT_ONCE:
                asyncio.get_running_loop().call_soon(turn)

        for _ in range(10 * CALLS_AT_ONCE):
            schedule.at(0.0, calls.append)
        turn()
        while len(calls) < 10 * CALLS_AT_ONCE:  # noqa: ASYNC110 (each round is what is looked at)
            await asyncio.sleep(0)

        assert max(after - before for before, after in pairwise(turns)) <= CALLS_AT_ONCE

    run(loop, test)
