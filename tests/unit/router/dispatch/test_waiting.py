import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.dispatch.waiting import Attempt, AttemptResult, Lane, WaitQueue
from penstock.wire.errors import ContextTooLong, DeadlineExceeded, Overloaded

A, B, AB = Lane(("a",)), Lane(("b",)), Lane(("a", "b"))


class Credits:
    """Places of each pool, and who got them in which order."""

    def __init__(self, **free: int) -> None:
        self.free = free
        self.admitted: list[int] = []

    def attempt(self, number: int, *pools: str) -> Attempt:
        def attempt() -> AttemptResult:
            pool = next((pool for pool in pools if self.free.get(pool, 0)), None)
            if pool is None:
                return AttemptResult.MUST_WAIT
            self.free[pool] -= 1
            self.admitted.append(number)
            return AttemptResult.PLACED

        return attempt

    def give(self, queue: WaitQueue, pool: str, places: int = 1) -> None:
        self.free[pool] = self.free.get(pool, 0) + places
        queue.wake(pool)


def enter(
    queue: WaitQueue, credits: Credits, number: int, lane: Lane = A, deadline_in_s: float = 100.0
) -> asyncio.Task[AttemptResult]:
    return asyncio.ensure_future(
        queue.admit(lane, credits.attempt(number, *lane.pools), arrival=number, deadline_in_s=deadline_in_s)
    )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def queue_of(max_waiting: int = 100, timeout_s: float = 50.0, clock: Callable[[], float] = lambda: 0.0) -> WaitQueue:
    return WaitQueue(max_waiting, timeout_s, clock)


async def end(*tasks: asyncio.Task[AttemptResult]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_with_room_does_not_wait():
    queue, credits = queue_of(), Credits(a=1)
    await queue.admit(A, credits.attempt(0, "a"), arrival=0, deadline_in_s=1)

    assert credits.admitted == [0]
    assert len(queue) == 0


async def test_waiters_are_admitted_in_the_order_of_their_arrival():
    queue, credits = queue_of(), Credits()
    tasks = [enter(queue, credits, number) for number in range(5)]
    await settle()
    for _ in range(5):
        credits.give(queue, "a")
    await asyncio.gather(*tasks)

    assert credits.admitted == [0, 1, 2, 3, 4]
    assert len(queue) == 0


async def test_a_newcomer_does_not_overtake_who_waits_in_its_lane():
    queue, credits = queue_of(), Credits()
    first = enter(queue, credits, 0)
    await settle()
    credits.free["a"] = 1  # nobody was woken yet
    second = enter(queue, credits, 1)
    await settle()
    assert credits.admitted == []
    queue.wake("a")
    await first

    assert credits.admitted == [0]
    await end(second)


async def test_a_request_that_comes_back_keeps_its_place():
    queue, credits = queue_of(), Credits()
    tasks = [enter(queue, credits, number) for number in (7, 9, 3)]
    await settle()
    credits.give(queue, "a", 3)
    await asyncio.gather(*tasks)

    assert credits.admitted == [3, 7, 9]


async def test_waiters_for_one_pool_do_not_block_those_for_another():
    queue, credits = queue_of(), Credits()
    blocked, both, free = enter(queue, credits, 0, A), enter(queue, credits, 1, AB), enter(queue, credits, 2, B)
    await settle()
    credits.give(queue, "b", 2)
    await asyncio.gather(both, free)

    assert credits.admitted == [1, 2]
    assert (queue.num_waiting("a"), queue.num_waiting("b")) == (1, 0)
    await end(blocked)


async def test_one_place_goes_to_the_oldest_over_all_lanes():
    queue, credits = queue_of(), Credits()
    tasks = [
        enter(queue, credits, number, lane) for number, lane in ((2, A), (1, AB), (0, Lane(("a",), frozenset({"x"}))))
    ]
    await settle()
    credits.give(queue, "a")
    credits.give(queue, "a")
    await settle()

    assert credits.admitted == [0, 1]
    await end(*tasks)


async def test_a_full_queue_refuses_with_the_time_a_place_should_take():
    now = [0.0]
    queue, credits = queue_of(max_waiting=2, clock=lambda: now[0]), Credits(a=3)
    for number in range(3):
        now[0] += 3.0
        await enter(queue, credits, number)
    waiting = [enter(queue, credits, number) for number in (3, 4)]
    await settle()
    now[0] = 12.0
    with pytest.raises(Overloaded) as refused:
        await enter(queue, credits, 5)

    assert refused.value.retry_after_s == pytest.approx(3 * (12.0 - 3.0) / 3)
    assert len(queue) == 2
    await end(*waiting)


async def test_the_queue_timeout_refuses_and_leaves_no_trace():
    queue, credits = queue_of(timeout_s=0.001), Credits()
    with pytest.raises(Overloaded) as refused:
        await enter(queue, credits, 0)

    assert refused.value.retry_after_s is not None
    assert len(queue) == 0
    credits.give(queue, "a")
    assert credits.admitted == []


async def test_the_deadline_of_a_request_ends_its_wait():
    queue, credits = queue_of(), Credits()
    with pytest.raises(DeadlineExceeded):
        await enter(queue, credits, 0, deadline_in_s=0.001)

    assert len(queue) == 0


async def test_a_cancelled_waiter_leaves_no_trace_and_its_place_to_the_next():
    queue, credits = queue_of(), Credits()
    first, second = enter(queue, credits, 0), enter(queue, credits, 1)
    await settle()
    first.cancel()
    credits.give(queue, "a")
    await second

    assert credits.admitted == [1]
    assert len(queue) == 0
    assert first.cancelled()


async def test_when_a_head_that_did_not_fit_gives_up_the_next_is_asked():
    queue, credits = queue_of(), Credits(a=1)
    big = asyncio.ensure_future(queue.admit(A, lambda: AttemptResult.MUST_WAIT, arrival=0, deadline_in_s=100))
    await settle()
    small = enter(queue, credits, 1)
    await settle()
    assert not small.done()
    big.cancel()
    await small

    assert credits.admitted == [1]


@pytest.mark.parametrize("error", [ContextTooLong("too long"), ValueError("a bug")])
async def test_an_attempt_that_fails_ends_its_own_wait_only(error):
    queue, credits = queue_of(), Credits()
    is_hopeless = False

    def hopeless() -> AttemptResult:
        if is_hopeless:
            raise error
        return AttemptResult.MUST_WAIT

    failing = asyncio.ensure_future(queue.admit(A, hopeless, arrival=0, deadline_in_s=100))
    other = enter(queue, credits, 1)
    await settle()
    is_hopeless = True
    credits.give(queue, "a")
    await other

    with pytest.raises(type(error)):
        await failing
    assert len(queue) == 0


steps = st.lists(
    st.tuples(st.sampled_from(["enter", "cancel", "give"]), st.sampled_from([A, B, AB]), st.integers(0, 30)),
    max_size=60,
)


@given(steps)
def test_whatever_happens_lanes_stay_in_order_and_nothing_is_left(steps):
    async def main():
        queue, credits = queue_of(), Credits()
        tasks: dict[int, asyncio.Task[AttemptResult]] = {}
        lanes: dict[int, Lane] = {}
        for number, (kind, lane, which) in enumerate(steps):
            if kind == "enter":
                tasks[number], lanes[number] = enter(queue, credits, number, lane), lane
            elif kind == "cancel" and which in tasks:
                tasks[which].cancel()
            elif kind == "give":
                credits.give(queue, lane.pools[0])
            await settle()
        for pool in ("a", "b"):
            assert not (
                credits.free.get(pool, 0) and queue.num_waiting(pool)
            )  # no place is free while someone could use it
        for lane in (A, B, AB):
            in_lane = [number for number in credits.admitted if lanes[number] == lane]
            assert in_lane == sorted(in_lane)
        await end(*tasks.values())
        assert len(queue) == 0

    asyncio.run(main())
