"""Messages between ranks come as they were sent."""

from multiprocessing.connection import Pipe

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import build_batch
from penstock.workers.compute.parallel.messages import (
    Compute,
    Copy,
    Poison,
    decode,
    encode,
    pack_step,
    receive,
    send,
    unpack_step,
)
from penstock.workers.compute.triton.attention.block_tables import BlockTables
from penstock.workers.engine.sequence import Chunk, Sequence, Step

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def test_where_block_tables_stay_on_the_devices_a_step_takes_their_changes_to_each_rank() -> None:
    seq = Sequence("r", list(range(6)), SamplingParams(4), 6, [], b"", 0.0, block_table=[7, 5])
    of_rank_0, own = (BlockTables(2, 3, CPU) for _ in range(2))
    batch = build_batch(Step([Chunk(seq, 0, 6)], []), BLOCK_SIZE, of_rank_0)

    order = decode(encode(pack_step(3, batch, [], [], is_greedy=False, is_scored=False)))
    assert isinstance(order, Compute)
    got, _ = unpack_step(order, {}, own)

    tables = got.attention.tables
    assert tables is not None
    assert tables.table is own.table
    tables.change(tables.places, tables.blocks)
    assert own.table[int(tables.rows[0])].tolist() == [7, 5, 0]


def test_where_they_do_not_a_step_brings_whole_tables() -> None:
    seq = Sequence("r", list(range(6)), SamplingParams(4), 6, [], b"", 0.0, block_table=[7, 5])
    batch = build_batch(Step([Chunk(seq, 0, 6)], []), BLOCK_SIZE)

    got, _ = unpack_step(pack_step(3, batch, [], [], is_greedy=False, is_scored=False), {}, None)

    assert got.attention.tables is None
    assert got.attention.block_tables.tolist() == [[7, 5]]


arrays = st.builds(
    lambda kind, shape, first: (np.arange(np.prod(shape)) + first).astype(kind).reshape(shape),
    st.sampled_from(["int64", "int32"]),
    st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 3), st.integers(0, 5))),
    st.integers(-5, 2**31 - 60),
)


@given(
    st.integers(0, 2**40),
    st.lists(arrays, max_size=10),
    st.lists(st.tuples(st.integers(0, 999), st.none() | arrays), max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 999), max_size=3),
)
def test_a_step_has_the_same_arrays_on_the_other_side(
    number: int,
    numbers: list[np.ndarray],
    adapters: list[tuple[int, np.ndarray | None]],
    is_greedy: bool,
    dropped: list[int],
) -> None:
    order = Compute(number, tuple(numbers), adapters, is_greedy, not is_greedy, dropped)

    found = decode(encode(order))

    assert isinstance(found, Compute)
    assert (found.number, found.is_greedy, found.is_scored) == (number, is_greedy, not is_greedy)
    assert found.dropped == dropped
    assert [key for key, _ in found.adapters] == [key for key, _ in adapters]
    rows = [(of for _, of in given) for given in (found.adapters, adapters)]
    for mine, theirs in [*zip(found.arrays, numbers, strict=True), *zip(*rows, strict=True)]:
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.dtype == theirs.dtype
            assert np.array_equal(mine, theirs)
            assert mine.flags.aligned
            assert mine.flags.writeable


def test_other_orders_come_as_they_are() -> None:
    here, there = Pipe()

    send([here], Copy([(1, 2)]))
    send([here], Poison(np.array([3])))

    assert receive(there) == Copy([(1, 2)])
    poison = receive(there)
    assert isinstance(poison, Poison)
    assert poison.blocks.tolist() == [3]


def test_a_decode_step_of_many_rows_is_little_more_than_its_numbers() -> None:
    numbers = tuple(np.arange(256) for _ in range(7))

    packed = encode(Compute(9, numbers, [], is_greedy=True, is_scored=False, dropped=[]))

    assert len(packed) < sum(array.nbytes for array in numbers) + 200
