from hypothesis import given
from hypothesis import strategies as st

from penstock.router.dispatch.shares.lazy_heap import LazyHeap

NAMES = "abcdef"
steps = st.lists(st.tuples(st.sampled_from(["grow", "lower", "remove"]), st.sampled_from(NAMES), st.integers(1, 9)))


@given(steps)
def test_the_top_is_the_smallest_key_there_is(steps: list[tuple[str, str, int]]) -> None:
    keys = dict.fromkeys(NAMES, 0)
    heap: LazyHeap[tuple[int, str]] = LazyHeap(lambda name: (keys[name], name))
    for name in NAMES:
        heap.update(name)
    for kind, name, amount in steps:
        if kind == "grow":
            keys[name] += amount
        elif kind == "remove":
            heap.remove(name)
        else:
            keys[name] -= amount
            heap.update(name)

        present = [(keys[name], name) for name in NAMES if name in heap]
        top = heap.peek()
        assert (None if top is None else top[0]) == min(present, default=None)
        assert len(heap) == len(present)


def test_superseded_entries_are_dropped() -> None:
    keys = {"a": 0.0, "b": 1e9}
    heap: LazyHeap[tuple[float]] = LazyHeap(lambda name: (keys[name],))
    for _ in range(10_000):
        heap.update("a")
        heap.update("b")

    assert heap.num_entries < 100
