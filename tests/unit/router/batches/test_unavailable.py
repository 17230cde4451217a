import asyncio
import contextlib

import pytest
from redis.exceptions import TimeoutError as RedisTimeout

from penstock.router.batches.unavailable import end_tasks, raising_overloaded
from penstock.wire.errors import Overloaded


@pytest.mark.parametrize("error", [RedisTimeout("slow"), ConnectionResetError(), TimeoutError()])
async def test_what_redis_fails_with_is_overloaded(error: Exception) -> None:
    with pytest.raises(Overloaded), raising_overloaded():
        raise error


async def test_a_cancellation_that_the_client_turns_into_an_error_stays_one() -> None:
    began = asyncio.Event()

    async def ask() -> None:
        with contextlib.suppress(Overloaded), raising_overloaded():
            try:
                began.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise RedisTimeout("while it was cancelled") from None

    task = asyncio.create_task(ask())
    await began.wait()
    task.cancel()
    await asyncio.wait([task])

    assert task.cancelled()


async def test_a_cancellation_that_is_lost_is_repeated() -> None:
    num_lost = 0

    async def lose() -> None:
        nonlocal num_lost
        while num_lost < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                num_lost += 1
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(lose()), asyncio.create_task(asyncio.Event().wait())]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await end_tasks(tasks, repeat_s=0.01)

    assert all(task.cancelled() for task in tasks)
    assert num_lost == 3
