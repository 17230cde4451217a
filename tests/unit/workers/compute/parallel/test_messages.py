import pickle

import torch

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import build_batch
from penstock.workers.compute.parallel.messages import pack_step, unpack_step
from penstock.workers.compute.triton.attention.block_tables import BlockTables
from penstock.workers.engine.sequence import Chunk, Sequence, Step

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def test_where_block_tables_stay_on_the_devices_a_step_takes_their_changes_to_each_rank() -> None:
    seq = Sequence("r", list(range(6)), SamplingParams(4), 6, [], b"", 0.0, block_table=[7, 5])
    of_rank_0, own = (BlockTables(2, 3, CPU) for _ in range(2))
    batch = build_batch(Step([Chunk(seq, 0, 6)], []), BLOCK_SIZE, of_rank_0)

    order = pickle.loads(pickle.dumps(pack_step(3, batch, [], [], is_greedy=False, is_scored=False)))
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
