from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from penstock_loadtest.fake.behaviour import Shedding
from penstock_loadtest.fake.engine import LoadShedder, PrefixCache, Slots


@given(count=st.integers(1, 4), steps=st.lists(st.sampled_from(["enter", "leave", "give up"]), max_size=60))
def test_slots_are_never_oversubscribed_and_the_queue_is_fair(count: int, steps: list[str]) -> None:
    slots: Slots[int] = Slots(count)
    serving: set[int] = set()
    queue: deque[int] = deque()
    for item, step in enumerate(steps):
        if step == "enter":
            (serving.add if slots.enter(item) else queue.append)(item)
        elif step == "leave" and serving:
            serving.pop()
            following = slots.leave()
            assert following == (queue.popleft() if queue else None)
            if following is not None:
                serving.add(following)
        elif step == "give up" and queue:
            slots.give_up(queue.pop())

        assert (slots.serving, slots.waiting) == (len(serving), len(queue))
        assert len(serving) <= count
        assert not queue or len(serving) == count


def test_without_a_count_everyone_is_served_at_once() -> None:
    slots: Slots[int] = Slots(None)

    assert all(slots.enter(item) for item in range(100))
    assert slots.leave() is None
    assert slots.serving == 99


@given(rate=st.floats(0.5, 50), burst=st.integers(1, 5), gaps=st.lists(st.floats(0, 2), min_size=1, max_size=60))
def test_a_gate_never_lets_more_in_than_its_rate_and_its_retry_after_is_enough(
    rate: float, burst: int, gaps: list[float]
) -> None:
    load_shedder = LoadShedder(Shedding(rate=rate, burst=burst))
    now, taken = 100.0, []
    for gap in gaps:
        now += gap
        retry_after_s = load_shedder.retry_after_s(now, 0)
        if retry_after_s is None:
            taken.append(now)
        else:
            now += retry_after_s + 1e-6
            assert load_shedder.retry_after_s(now, 0) is None
            taken.append(now)

    for first in range(len(taken)):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + rate * (taken[last] - taken[first]) + 1e-6


def test_a_gate_without_rules_is_open() -> None:
    assert LoadShedder(None).retry_after_s(0.0, 10**9) is None


def test_a_prompt_never_counts_as_cached_whole() -> None:
    cache = PrefixCache(4, 100)

    assert [cache.cached_tokens("n", list(range(8))) for _ in range(2)] == [0, 4]
    assert cache.cached_tokens("n", list(range(9))) == 8
    assert cache.cached_tokens("other", list(range(9))) == 0


def test_blocks_behind_a_miss_are_not_hits_and_the_oldest_are_forgotten() -> None:
    cache = PrefixCache(2, 3)
    cache.cached_tokens("n", [1, 2, 3, 4, 5])

    assert cache.cached_tokens("n", [9, 9, 3, 4, 5]) == 0
    assert cache.cached_tokens("n", [1, 2, 3, 4, 5]) == 0  # 4 blocks seen, 3 remembered: the first went
