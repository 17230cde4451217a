import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.wire.frames import SamplingParams
from penstock.workers.engine.blocks import BlockPool, KeyChanges
from penstock.workers.engine.sequence import Sequence


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def holder(blocks: list[int]) -> Sequence:
    return Sequence("holder", [0], SamplingParams(max_tokens=1), 1, [], b"", 0.0, block_table=blocks)


def cached_chain(pool: BlockPool, length: int, first_key: int = 0) -> list[int]:
    """Blocks that were published under consecutive keys and are free again."""
    blocks = pool.allocate(length)
    for index, block in enumerate(blocks):
        pool.publish(block, key(first_key + index))
    pool.free(blocks)
    return blocks


def test_a_match_ends_at_the_first_key_that_is_not_cached() -> None:
    pool = BlockPool(8, 4)
    blocks = cached_chain(pool, 3)

    assert pool.match([key(0), key(1), key(9), key(2)], limit=4) == blocks[:2]
    assert pool.match([key(0), key(1), key(2)], limit=2) == blocks[:2]
    assert pool.match([key(9)], limit=1) == []
    pool.check([])


def test_a_match_changes_nothing() -> None:
    pool = BlockPool(4, 4)
    cached_chain(pool, 2)

    pool.match([key(0), key(1)], limit=2)

    assert pool.num_free == 4
    assert pool.allocate(4)[:2] == [2, 3]  # still those longest unused first


def test_a_chain_is_given_up_from_its_end() -> None:
    pool = BlockPool(3, 4)
    blocks = cached_chain(pool, 3)

    assert pool.allocate(1) == blocks[-1:]
    assert pool.match([key(0), key(1), key(2)], limit=3) == blocks[:2]


def test_the_chain_used_last_is_given_up_last() -> None:
    pool = BlockPool(4, 4)
    first, second = cached_chain(pool, 2), cached_chain(pool, 2, first_key=10)
    pool.take(first)
    pool.free(first)

    assert pool.allocate(2) == second[::-1]


def test_a_block_without_a_key_is_reused_before_any_cached_one() -> None:
    pool = BlockPool(3, 4)
    cached_chain(pool, 2)
    worthless = pool.allocate(1)
    pool.free(worthless)

    assert pool.allocate(1) == worthless
    assert len(pool.cached_keys()) == 2


def test_an_evicted_block_loses_its_key() -> None:
    pool = BlockPool(2, 4)
    cached_chain(pool, 2)

    table = pool.allocate(2)

    assert pool.cached_keys() == []
    assert pool.match([key(0)], limit=1) == []
    pool.check([holder(table)])


def test_hits_that_lie_in_the_free_list_are_not_counted_as_room() -> None:
    pool = BlockPool(4, 4)
    hits = cached_chain(pool, 2)

    assert pool.can_take(hits, 2)
    assert not pool.can_take(hits, 3)
    pool.take(hits)
    assert pool.can_take(hits, 2)  # held by another already: taking them again costs no room
    assert not pool.can_take([], 3)


def test_a_block_held_twice_is_free_when_both_let_go() -> None:
    pool = BlockPool(2, 4)
    blocks = cached_chain(pool, 1)
    pool.take(blocks)
    pool.take(blocks)
    pool.free(blocks)

    assert pool.num_free == 1
    pool.check([holder(blocks)])
    pool.free(blocks)
    assert pool.num_free == 2


def test_the_first_block_keeps_a_key_that_two_publish() -> None:
    pool = BlockPool(2, 4)
    first, second = pool.allocate(2)
    pool.publish(first, key(0))
    pool.publish(second, key(0))

    assert pool.match([key(0)], limit=1) == [first]
    pool.check([holder([first, second])])
    pool.free([first, second])
    assert pool.match([key(0)], limit=1) == [first]
    assert list(pool.garbage()) == [second]


def test_a_free_block_can_not_be_published() -> None:
    pool = BlockPool(1, 4)

    with pytest.raises(AssertionError, match="published by nobody"):
        pool.publish(0, key(0))


def test_changes_are_net_since_the_last_drain() -> None:
    pool = BlockPool(2, 4)
    cached_chain(pool, 2)
    assert pool.drain_changes() == KeyChanges([key(0), key(1)], [])
    assert pool.drain_changes() is None

    cached_chain(pool, 2)  # both evicted, both there again
    assert pool.drain_changes() is None

    cached_chain(pool, 2, first_key=10)
    pool.allocate(1)  # stored and evicted between two drains
    assert pool.drain_changes() == KeyChanges([key(10)], [key(1), key(0)])


def test_a_withdrawn_block_is_found_no_more_and_is_allocated_first_when_it_is_free() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    for block, key in zip(table, (b"a", b"b"), strict=True):
        pool.publish(block, key)
    assert pool.drain_changes() == ([b"a", b"b"], [])
    pool.withdraw(table[1:])
    pool.free(table)

    assert pool.match([b"a", b"b"], 2) == table[:1]
    assert pool.drain_changes() == ([], [b"b"])
    assert pool.allocate(1) == table[1:]


def test_a_check_finds_a_table_that_nobody_counted() -> None:
    pool = BlockPool(2, 4)
    table = pool.allocate(1)

    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([holder(table), holder(table)])


class PoolMachine(RuleBasedStateMachine):
    """Random holders against a model: a dict from key to block, and the mirror a router would keep from the changes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 4)
        self.holders: list[Sequence] = []
        self.mirror: set[bytes] = set()

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            self.holders.append(holder(self.pool.allocate(count)))

    @rule(first=st.integers(0, 6), length=st.integers(1, 4), count=st.integers(0, 3))
    def hit(self, first: int, length: int, count: int) -> None:
        hits = self.pool.match([key(number) for number in range(first, first + length)], length)
        if self.pool.can_take(hits, count):
            self.pool.take(hits)
            self.holders.append(holder(hits + self.pool.allocate(count)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), number=st.integers(0, 9))
    def publish(self, data: st.DataObject, number: int) -> None:
        table = data.draw(st.sampled_from(self.holders)).block_table
        block = data.draw(st.sampled_from(table)) if table else None
        named = {self.pool.match([known], 1)[0] for known in self.pool.cached_keys()}
        if block is not None and block not in named:
            self.pool.publish(block, key(number))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.holders))
        self.holders.remove(seq)
        self.pool.free(seq.block_table)

    @rule()
    def drain(self) -> None:
        changes = self.pool.drain_changes() or KeyChanges([], [])
        assert self.mirror.isdisjoint(changes.stored)
        assert self.mirror.issuperset(changes.removed)
        self.mirror = (self.mirror | set(changes.stored)) - set(changes.removed)
        assert self.mirror == set(self.pool.cached_keys())

    @invariant()
    def is_consistent(self) -> None:
        self.pool.check(self.holders)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
