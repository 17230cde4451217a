import asyncio
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.dispatch.attempt import Attempt, AttemptResult
from penstock.router.dispatch.lane import Claim, Lane
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.dispatch.waiting import WaitQueue
from penstock.router.dispatch.waiting_order import MAX_MOVED_BACK
from penstock.tenancy.share import DEFAULT_SHARE, Share
from penstock.wire.errors import ContextTooLong, DeadlineExceeded, Overloaded, RateLimited

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
    queue: WaitQueue,
    credits: Credits,
    number: int,
    lane: Lane = A,
    deadline_in_s: float = 100.0,
    tenant: str = "",
    share: Share = DEFAULT_SHARE,
    has_begun: bool = False,
    priority: int = 0,
) -> asyncio.Task[AttemptResult]:
    claim = Claim(number, tenant, share, has_begun, priority)
    return asyncio.ensure_future(
        queue.admit(lane, credits.attempt(number, *lane.pools), claim, deadline_in_s=deadline_in_s)
    )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def queue_of(
    max_waiting: int = 100,
    timeout_s: float = 50.0,
    clock: Callable[[], float] = lambda: 0.0,
    counters: VirtualCounters | None = None,
    max_share: float = 1.0,
) -> WaitQueue:
    made = VirtualCounters() if counters is None else counters
    return WaitQueue(max_waiting, timeout_s, made, max_share, clock, Random(0))


async def end(*tasks: asyncio.Task[AttemptResult]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_with_room_does_not_wait():
    queue, credits = queue_of(), Credits(a=1)
    await queue.admit(A, credits.attempt(0, "a"), Claim(0), deadline_in_s=1)

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


async def test_of_two_tenants_the_one_that_has_had_less_goes_first():
    counters = VirtualCounters()
    queue, credits = queue_of(counters=counters), Credits()
    tasks = [enter(queue, credits, number, tenant="flooder") for number in range(4)]
    tasks += [enter(queue, credits, number, tenant="light") for number in (4, 5)]
    await settle()
    for number in range(6):
        credits.give(queue, "a")
        tenant = "light" if credits.admitted[-1] in (4, 5) else "flooder"
        counters.charge(tenant, 10.0 if number else 15.0, 1.0)
    await asyncio.gather(*tasks)

    assert credits.admitted == [0, 4, 5, 1, 2, 3]


async def test_a_tenant_whose_counter_falls_while_it_waits_goes_earlier():
    counters = VirtualCounters()
    queue, credits = queue_of(counters=counters), Credits()
    tasks = [enter(queue, credits, number, tenant=tenant) for number, tenant in enumerate("abc")]
    await settle()
    for tenant, cost in (("a", 30.0), ("b", 20.0), ("c", 40.0), ("c", -25.0)):
        counters.charge(tenant, cost, 1.0)
    credits.give(queue, "a", 3)
    await asyncio.gather(*tasks)

    assert credits.admitted == [2, 1, 0]


async def test_at_equal_counters_the_earlier_class_goes_first():
    queue, credits = queue_of(), Credits()
    shares = [Share(service_class=name) for name in ("batch", "standard", "interactive", "unknown to this version")]
    tasks = [enter(queue, credits, number, tenant=str(number), share=share) for number, share in enumerate(shares)]
    await settle()
    credits.give(queue, "a", 4)
    await asyncio.gather(*tasks)

    assert credits.admitted == [2, 1, 3, 0]


async def test_an_answer_that_had_begun_goes_before_tenants_that_have_had_less():
    counters = VirtualCounters()
    queue, credits = queue_of(counters=counters), Credits()
    tasks = [enter(queue, credits, 5, tenant="light"), enter(queue, credits, 0, tenant="heavy", has_begun=True)]
    await settle()
    counters.charge("heavy", 1000.0, 1.0)
    credits.give(queue, "a")
    credits.give(queue, "a")
    await asyncio.gather(*tasks)

    assert credits.admitted == [0, 5]


async def test_places_kept_from_a_tenant_go_to_newcomers_that_have_had_less_and_to_no_others():
    counters = VirtualCounters()
    queue, credits = queue_of(counters=counters), Credits(a=1)
    counters.expect("heavy", 100.0, 1.0)
    counters.charge("heavier", 200.0, 1.0)
    held = asyncio.ensure_future(queue.admit(A, lambda: AttemptResult.MUST_WAIT, Claim(0, "heavy"), deadline_in_s=100))
    await settle()
    heavier = enter(queue, credits, 1, tenant="heavier")
    await settle()
    queue.wake("a")
    await settle()
    assert credits.admitted == []
    light = enter(queue, credits, 2, tenant="light")
    await light
    second = enter(queue, credits, 3, tenant="light")
    await settle()
    assert not second.done()
    credits.give(queue, "a")
    await second

    assert credits.admitted == [2, 3]
    assert not held.done()
    assert not heavier.done()
    await end(held, heavier)


async def test_a_tenant_with_its_share_is_tried_again_at_the_next_change():
    queue, results = queue_of(), [AttemptResult.MUST_WAIT, AttemptResult.MUST_WAIT, AttemptResult.PLACED]
    held = asyncio.ensure_future(queue.admit(A, lambda: results.pop(0), Claim(0, "heavy"), deadline_in_s=100))
    await settle()
    queue.wake("a")
    await settle()
    assert not held.done()
    queue.wake("a")

    assert await held is AttemptResult.PLACED


async def test_the_queue_tells_the_counters_who_waits():
    counters = VirtualCounters()
    queue, credits = queue_of(counters=counters), Credits()
    counters.charge("heavy", 1000.0, 1.0)
    first, second = enter(queue, credits, 0, tenant="heavy"), enter(queue, credits, 1, tenant="heavy")
    await settle()
    first.cancel()
    newcomer = enter(queue, credits, 2, tenant="idle till now")
    await settle()

    assert counters.counter("idle till now") == 1000.0
    assert {tenant for tenant, service in counters.given().items() if service.is_waiting} == {"heavy", "idle till now"}
    await end(first, second, newcomer)
    assert not any(service.is_waiting for service in counters.given().values())


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

    true_s = 3 * (12.0 - 3.0) / 3
    assert refused.value.retry_after_s is not None
    assert true_s <= refused.value.retry_after_s <= 1.25 * true_s
    assert len(queue) == 2
    await end(*waiting)


async def test_one_tenant_can_not_fill_the_queue():
    queue, credits = queue_of(max_waiting=4, max_share=0.5), Credits()
    waiting = [enter(queue, credits, number, tenant="flooder") for number in (0, 1)]
    await settle()
    with pytest.raises(RateLimited, match="share of the queue") as refused:
        await enter(queue, credits, 2, tenant="flooder")
    waiting += [enter(queue, credits, number, tenant="light") for number in (3, 4)]
    await settle()

    assert refused.value.retry_after_s is not None
    assert len(queue) == 4
    waiting[0].cancel()
    await settle()
    waiting.append(enter(queue, credits, 5, tenant="flooder"))
    await settle()
    assert len(queue) == 4
    await end(*waiting)


async def test_a_light_tenants_retry_after_is_that_of_its_own_turn():
    now = [0.0]
    queue, credits = queue_of(max_waiting=20, clock=lambda: now[0]), Credits(a=10)
    for number in range(10):
        await enter(queue, credits, number, tenant="flooder")
        now[0] += 1.0
    waiting = [enter(queue, credits, number, tenant="flooder") for number in range(10, 30)]
    await settle()
    with pytest.raises(Overloaded) as light:
        await enter(queue, credits, 30, tenant="light")
    with pytest.raises(Overloaded) as flooder:
        await enter(queue, credits, 31, tenant="flooder")

    assert light.value.retry_after_s is not None
    assert flooder.value.retry_after_s is not None
    assert 1.0 <= light.value.retry_after_s <= 2.0
    assert 21.0 <= flooder.value.retry_after_s <= 21.0 * 1.25
    await end(*waiting)


async def test_where_the_queue_is_full_a_newcomer_displaces_the_newest_of_the_latest_class_after_its_own():
    queue, credits = queue_of(max_waiting=3), Credits()
    shares = [Share(service_class=name) for name in ("batch", "standard", "batch")]
    tasks = [enter(queue, credits, number, tenant=str(number), share=share) for number, share in enumerate(shares)]
    await settle()
    with pytest.raises(Overloaded):
        await enter(queue, credits, 3, tenant="3", share=Share(service_class="batch"))
    first = enter(queue, credits, 4, tenant="4", share=Share(service_class="interactive"))
    await settle()
    with pytest.raises(Overloaded, match="'batch' are refused before others") as displaced:
        await tasks[2]
    assert displaced.value.retry_after_s is not None
    second = enter(queue, credits, 5, tenant="5", share=Share(service_class="standard"))
    await settle()
    assert [task.done() for task in (*tasks, first, second)] == [True, False, True, False, False]
    third = enter(queue, credits, 6, tenant="6", share=Share(service_class="interactive"))
    await settle()

    assert [task.done() for task in (*tasks, first, second, third)] == [True, False, True, False, True, False]
    await asyncio.gather(*tasks[::2], second, return_exceptions=True)
    await end(tasks[1], first, third)


async def test_an_answer_that_had_begun_displaces_any_other_and_is_displaced_by_none():
    queue, credits = queue_of(max_waiting=1), Credits()
    task = enter(queue, credits, 0, tenant="a", share=Share(service_class="interactive"))
    await settle()
    begun = enter(queue, credits, 1, tenant="b", share=Share(service_class="batch"), has_begun=True)
    with pytest.raises(Overloaded):
        await task
    with pytest.raises(Overloaded):
        await enter(queue, credits, 2, tenant="a", share=Share(service_class="interactive"))

    assert not begun.done()
    await end(begun)


@pytest.mark.parametrize(("deadline_in_s", "is_refused"), [(7.0, True), (9.0, False)])
async def test_a_request_that_can_not_be_placed_by_its_deadline_is_refused_at_once(deadline_in_s, is_refused):
    """16 ahead of it in its tenant, a placement a second of late: at twice that pace it waits for 8 seconds."""
    now = [0.0]
    queue, credits = queue_of(max_waiting=100, clock=lambda: now[0]), Credits()
    waiting = [enter(queue, credits, number, tenant="a") for number in range(32)]
    await settle()
    for _ in range(16):
        now[0] += 1.0
        credits.give(queue, "a")
        await settle()
    late = enter(queue, credits, 40, deadline_in_s=deadline_in_s, tenant="a")
    other = enter(queue, credits, 41, deadline_in_s=deadline_in_s, tenant="b")
    await settle()

    assert late.done() == is_refused
    assert not other.done()
    if is_refused:
        with pytest.raises(RateLimited, match="16 requests of this tenant are before this one"):
            await late
    await end(late, other, *waiting)


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
    big = asyncio.ensure_future(queue.admit(A, lambda: AttemptResult.MUST_WAIT, Claim(0), deadline_in_s=100))
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

    failing = asyncio.ensure_future(queue.admit(A, hopeless, Claim(0), deadline_in_s=100))
    other = enter(queue, credits, 1)
    await settle()
    is_hopeless = True
    credits.give(queue, "a")
    await other

    with pytest.raises(type(error)):
        await failing
    assert len(queue) == 0


steps = st.lists(
    st.tuples(st.sampled_from(["enter", "cancel", "give", "charge"]), st.sampled_from([A, B, AB]), st.integers(0, 30)),
    max_size=60,
)


@given(steps)
def test_whatever_happens_requests_of_a_tenant_stay_in_order_and_nothing_is_left(steps):
    async def main():
        counters = VirtualCounters()
        queue, credits = queue_of(counters=counters), Credits()
        tasks: dict[int, asyncio.Task[AttemptResult]] = {}
        lanes: dict[int, tuple[Lane, str]] = {}
        for number, (kind, lane, which) in enumerate(steps):
            tenant = "xyz"[which % 3]
            if kind == "enter":
                tasks[number], lanes[number] = enter(queue, credits, number, lane, tenant=tenant), (lane, tenant)
            elif kind == "cancel" and which in tasks:
                tasks[which].cancel()
            elif kind == "give":
                credits.give(queue, lane.pools[0])
            elif kind == "charge":
                counters.charge(tenant, which - 15.0, 1.0)
            await settle()
        for pool in ("a", "b"):
            assert not (
                credits.free.get(pool, 0) and queue.num_waiting(pool)
            )  # no place is free while someone could use it
        for entry in set(lanes.values()):
            in_lane = [number for number in credits.admitted if lanes[number] == entry]
            assert in_lane == sorted(in_lane)
        await end(*tasks.values())
        assert len(queue) == 0

    asyncio.run(main())


async def test_priorities_order_a_tenants_own_requests():
    queue, credits = queue_of(), Credits()
    tasks = [
        enter(queue, credits, number, tenant="a", priority=priority) for number, priority in enumerate((0, 5, -1, 0))
    ]
    await settle()
    for _ in tasks:
        credits.give(queue, "a")
    await asyncio.gather(*tasks)

    assert credits.admitted == [2, 0, 3, 1]


async def test_priorities_change_nothing_for_other_tenants():
    async def order(priorities: tuple[int, ...]) -> list[str]:
        counters = VirtualCounters()
        queue, credits = queue_of(counters=counters), Credits()
        tenants = ["loud", "loud", "loud", "calm", "calm", "calm"]
        tasks = [
            enter(queue, credits, number, tenant=tenant, priority=priority)
            for number, (tenant, priority) in enumerate(zip(tenants, priorities, strict=True))
        ]
        await settle()
        for _ in tasks:
            credits.give(queue, "a")
            counters.charge(tenants[credits.admitted[-1]], 10.0, 1.0)
        await asyncio.gather(*tasks)
        return [tenants[number] for number in credits.admitted]

    plain = await order((0,) * 6)

    assert await order((-(2**63),) * 3 + (0,) * 3) == plain
    assert await order((9, 0, -9, 0, 0, 0)) == plain


async def test_what_has_begun_goes_before_any_priority():
    queue, credits = queue_of(), Credits()
    tasks = [
        enter(queue, credits, 0, tenant="a", priority=-9),
        enter(queue, credits, 1, tenant="a", has_begun=True, priority=9),
    ]
    await settle()
    credits.give(queue, "a", 2)
    await asyncio.gather(*tasks)

    assert credits.admitted == [1, 0]


async def test_the_longest_wait_is_that_of_whom_priorities_pass_over():
    now = [0.0]
    queue, credits = queue_of(clock=lambda: now[0]), Credits()
    late = enter(queue, credits, 0, tenant="a", priority=5)
    await settle()
    now[0] = 3.0
    early = enter(queue, credits, 1, tenant="a", priority=-5)
    await settle()
    now[0] = 4.0

    assert queue.oldest_s("a") == 4.0
    credits.give(queue, "a")
    await early
    assert queue.oldest_s("a") == 4.0
    await end(late)
    assert queue.oldest_s("a") == 0.0


async def test_a_wake_that_costs_too_much_at_once_goes_on_by_itself():
    count = 3 * MAX_MOVED_BACK
    queue, credits = queue_of(max_waiting=count), Credits()
    late = set(range(count))

    def attempt(number: int) -> Attempt:
        def try_once() -> AttemptResult:
            if credits.free.get("a") and number in late:
                late.remove(number)
                return AttemptResult.OVERDUE
            return credits.attempt(number, "a")()

        return try_once

    waiting = [
        asyncio.ensure_future(queue.admit(A, attempt(number), Claim(number, ""), deadline_in_s=100.0))
        for number in range(count)
    ]
    await settle()
    credits.give(queue, "a", count)
    await settle()

    assert sorted(credits.admitted) == list(range(count))
    assert {task.result() for task in waiting} == {AttemptResult.PLACED}
