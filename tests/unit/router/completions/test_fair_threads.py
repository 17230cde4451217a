import asyncio
import threading
from collections.abc import Callable

import pytest

from penstock.router.completions.fair_threads import FairThreads
from penstock.wire.errors import InvalidRequest, RateLimited


class Gate:
    """Work that holds its thread until it is let go."""

    def __init__(self) -> None:
        self.begun, self._open = threading.Event(), threading.Event()

    def work(self) -> None:
        self.begun.set()
        assert self._open.wait(10)

    def release(self) -> None:
        self._open.set()


async def begun(threads: FairThreads, tenant: str = "heavy") -> tuple[Gate, "asyncio.Task[None]"]:
    gate = Gate()
    task = asyncio.create_task(threads.run(tenant, 1, gate.work))
    await asyncio.to_thread(gate.begun.wait, 10)
    return gate, task


async def queue(threads: FairThreads, tenant: str, work: Callable[[], None]) -> "asyncio.Task[None]":
    task = asyncio.create_task(threads.run(tenant, 1, work))
    await asyncio.sleep(0)
    return task


async def test_work_runs_in_a_thread_and_its_result_or_error_comes_back() -> None:
    threads = FairThreads()

    def refuse() -> None:
        raise InvalidRequest("no")

    assert await threads.run("a", 1, threading.current_thread) is not threading.current_thread()
    with pytest.raises(InvalidRequest, match="no"):
        await threads.run("a", 1, refuse)
    assert await threads.run("a", 1, lambda: 5) == 5


async def test_tenants_take_turns_however_much_one_of_them_sent_first() -> None:
    threads = FairThreads(num_threads=1)
    done: list[str] = []
    gate, first = await begun(threads)
    tasks = [await queue(threads, "heavy", lambda: done.append("heavy")) for _ in range(4)]
    tasks += [await queue(threads, "light", lambda: done.append("light")) for _ in range(2)]
    tasks += [await queue(threads, "other", lambda: done.append("other"))]

    gate.release()
    await asyncio.gather(first, *tasks)

    assert done == ["heavy", "light", "other", "heavy", "light", "heavy", "heavy"]


async def test_what_a_tenant_may_have_waiting_is_bounded_and_leaves_others_their_turn() -> None:
    threads = FairThreads(num_threads=1, max_waiting=2)
    gate, first = await begun(threads)
    waiting = [await queue(threads, "heavy", lambda: None) for _ in range(2)]

    with pytest.raises(RateLimited) as caught:
        await threads.run("heavy", 1, lambda: None)
    light = await queue(threads, "light", lambda: None)
    gate.release()
    await asyncio.gather(first, light, *waiting)

    assert caught.value.retry_after_s == 1.0


async def test_who_is_gone_before_its_turn_is_never_begun_and_holds_up_nobody() -> None:
    threads = FairThreads(num_threads=1)
    done: list[str] = []
    gate, first = await begun(threads)
    gone = await queue(threads, "heavy", lambda: done.append("gone"))
    light = await queue(threads, "light", lambda: done.append("light"))

    gone.cancel()
    gate.release()
    await asyncio.gather(first, light)

    assert gone.cancelled()
    assert done == ["light"]
    assert await threads.run("new", 1, lambda: 1) == 1


async def test_a_turn_that_comes_as_its_caller_goes_is_passed_on() -> None:
    threads = FairThreads(num_threads=1)
    gate, first = await begun(threads)
    gone = await queue(threads, "heavy", lambda: None)
    light = await queue(threads, "light", lambda: None)

    gate.release()
    threads._executor.submit(lambda: None).result(10)  # the loop has been told now, and does it next
    asyncio.get_running_loop().call_soon(gone.cancel)
    async with asyncio.timeout(10):
        await asyncio.gather(first, light)

    assert gone.cancelled()
    assert await threads.run("new", 1, lambda: 1) == 1


async def test_work_whose_caller_is_gone_keeps_its_thread_to_its_end() -> None:
    threads = FairThreads(num_threads=1)
    gate, first = await begun(threads)

    first.cancel()
    light = await queue(threads, "light", lambda: None)
    await asyncio.sleep(0.01)
    is_held = not light.done()
    gate.release()
    async with asyncio.timeout(10):
        await light

    assert is_held


async def test_what_a_tenant_may_have_waiting_is_bounded_by_its_size_too() -> None:
    threads = FairThreads(num_threads=1, max_waiting_cost=100)
    gate, first = await begun(threads)
    large = asyncio.create_task(threads.run("heavy", 1000, lambda: "large"))  # alone it may be of any size
    await asyncio.sleep(0)

    with pytest.raises(RateLimited):
        await threads.run("heavy", 1, lambda: None)
    light = asyncio.create_task(threads.run("light", 60, lambda: None))
    await asyncio.sleep(0)
    with pytest.raises(RateLimited):
        await threads.run("light", 41, lambda: None)
    light.cancel()
    await asyncio.sleep(0)
    again = asyncio.create_task(threads.run("light", 41, lambda: None))
    gate.release()
    await asyncio.gather(first, again)

    assert await large == "large"
