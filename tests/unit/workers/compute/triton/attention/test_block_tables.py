import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import build_batch
from penstock.workers.compute.triton.attention.block_tables import BlockTables, Changes, TableRows, Wanted
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import Scheduler
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.paged_hash import VOCAB, HashRunner, answer, make_sequence

BLOCK_SIZE = 4
MAX_LEN = 60
WIDTH = MAX_LEN // BLOCK_SIZE
NUM_ROWS = 6


class Owner(NamedTuple):
    name: str


A, B, C = (Owner(name) for name in "abc")


def wanted(owner: Owner, blocks: list[int], first: int = 0, version: int = 0) -> Wanted:
    return Wanted(owner, version, blocks, first, len(blocks))


def listed(changes: Changes) -> tuple[list[int], dict[int, int]]:
    """Rows, and block by place."""
    return changes.rows.tolist(), dict(zip(changes.places.tolist(), changes.blocks.tolist(), strict=True))


def test_a_sequence_sends_its_table_once_and_then_its_new_blocks() -> None:
    rows = TableRows(num_rows=2, width=10)

    assert listed(rows.update([wanted(A, [7, 5])])) == ([0], {0: 7, 1: 5})
    assert listed(rows.update([wanted(A, [7, 5], first=1)])) == ([0], {})
    assert listed(rows.update([wanted(B, [9]), wanted(A, [7, 5, 8], first=1)])) == ([1, 0], {10: 9, 2: 8})


def test_a_block_that_has_become_another_is_sent_again() -> None:
    rows = TableRows(num_rows=1, width=10)
    rows.update([wanted(A, [7, 5, 3])])

    assert listed(rows.update([wanted(A, [7, 6], first=1)])) == ([0], {1: 6})
    assert listed(rows.update([wanted(A, [7, 6, 3], first=1)])) == ([0], {})


def test_a_sequence_that_has_lost_its_blocks_sends_all_of_the_new_ones() -> None:
    rows = TableRows(num_rows=1, width=10)
    rows.update([wanted(A, [7, 5])])

    assert listed(rows.update([wanted(A, [7, 9], first=1, version=1)])) == ([0], {0: 7, 1: 9})


def test_a_row_that_another_needs_is_taken_from_one_that_is_not_in_the_step() -> None:
    rows = TableRows(num_rows=2, width=10)
    rows.update([wanted(A, [7]), wanted(B, [8])])

    assert listed(rows.update([wanted(C, [9]), wanted(B, [8])])) == ([0, 1], {0: 9})
    assert listed(rows.update([wanted(A, [7, 1], first=1)])) == ([1], {10: 7, 11: 1})
    with pytest.raises(AssertionError, match="3 sequences, the table 2 rows"):
        rows.update([wanted(A, [7]), wanted(B, [8]), wanted(C, [9])])


def test_the_row_of_a_sequence_that_has_ended_is_free() -> None:
    rows = TableRows(num_rows=2, width=10)
    rows.update([wanted(A, [7]), wanted(B, [8])])
    rows.forget(B)
    rows.forget(C)

    assert listed(rows.update([wanted(A, [7]), wanted(C, [9])])) == ([0, 1], {10: 9})


def test_behind_a_failed_step_everything_is_sent_again() -> None:
    rows = TableRows(num_rows=2, width=10)
    rows.update([wanted(A, [7, 5])])
    rows.clear()

    assert listed(rows.update([wanted(A, [7, 5], first=1)])) == ([0], {0: 7, 1: 5})


def test_a_step_that_reads_more_than_its_table_has_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not have"):
        TableRows(num_rows=1, width=10).update([Wanted(A, 0, [7], 0, 2)])


def test_whole_tables_take_the_place_of_all_rows() -> None:
    tables = BlockTables(3, 4, torch.device("cpu"))
    step = tables.update([wanted(A, [7, 5])])
    step.change(step.places, step.blocks)

    whole = tables.replace(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    whole.change(whole.places, whole.blocks)

    assert whole.rows.tolist() == [0, 1]
    assert tables.table.tolist() == [[1, 2, 0, 0], [3, 4, 0, 0], [0] * 4]
    assert len(tables.update([wanted(A, [7, 5], first=1)]).places) == 2


class Load:
    """A scheduler under random work: shared prefixes, beams, drafts that are right or wrong, too few blocks."""

    def __init__(self, seed: int, num_blocks: int) -> None:
        self.draw = random.Random(seed)
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_ROWS,
            max_batched_tokens=20,
            speculation=SpeculationConfig(method="ngram", max_draft_tokens=5),
        )
        self.hasher = ChainHasher(bytes(16), BLOCK_SIZE)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.runner = HashRunner(num_blocks, BLOCK_SIZE, MAX_LEN, self._propose)
        self.scheduler = Scheduler(self.pool, self.hasher, config, MAX_LEN, frozenset())
        self.num_preempted = 0

    def _propose(self, seq: Sequence, count: int) -> list[int]:
        right = answer(seq.token_ids[: seq.num_prompt_tokens], seq.sampling, eos=())[seq.num_output_tokens :][:count]
        return [token if self.draw.random() < 0.7 else (token + 1) % VOCAB for token in right]

    def add(self) -> None:
        first, length = self.draw.choice((0, 0, self.draw.randrange(40))), self.draw.randint(1, 30)
        num_beams = self.draw.choice((0, 0, 0, 2, 3))
        sampling = SamplingParams(self.draw.randint(1, 25), ignore_eos=True, num_beams=num_beams)
        prompt = [(first + 7 * place) % VOCAB for place in range(length)]
        self.scheduler.add(make_sequence(self.hasher, prompt, sampling))

    def step(self) -> Step:
        if self.draw.random() < 0.4:
            self.add()
        step = self.scheduler.schedule()
        self.num_preempted += len(step.preempted)
        return step


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_blocks=st.sampled_from([18, 25, 80]))
def test_tables_that_change_by_difference_are_those_that_each_step_would_make(seed: int, num_blocks: int) -> None:
    load = Load(seed, num_blocks)
    tables = BlockTables(NUM_ROWS, WIDTH, torch.device("cpu"))
    for _ in range(50):
        step = load.step()
        if not step.chunks:
            continue
        sampled = load.runner.launch(step)()  # which also makes the drafts
        if load.draw.random() < 0.1:  # a step that fails before it changes anything
            build_batch(step, BLOCK_SIZE, tables)
            tables.clear()
        batch, rebuilt = build_batch(step, BLOCK_SIZE, tables).attention, build_batch(step, BLOCK_SIZE).attention
        assert batch.tables is not None
        batch.tables.change(batch.tables.places, batch.tables.blocks)

        assert len(set(batch.tables.rows.tolist())) == len(step.chunks)
        assert torch.equal(batch.slot_mapping, rebuilt.slot_mapping)
        for row, context, own in zip(batch.tables.rows, batch.context_len, rebuilt.block_tables, strict=True):
            count = -(-int(context) // BLOCK_SIZE)
            assert tables.table[row, :count].tolist() == own[:count].tolist()
        for output in load.scheduler.commit(step, sampled):
            if output.finish is not None:
                tables.forget(output.seq)
    event(f"preemptions: {min(3, load.num_preempted)}")


def test_a_step_of_decoding_rows_sends_only_blocks_that_are_new() -> None:
    seqs = [Sequence("r", [1] * 9, SamplingParams(9), 9, [], b"", 0.0) for _ in range(3)]
    for index, seq in enumerate(seqs):
        seq.block_table = list(range(4 * index, 4 * index + 4))
    tables = BlockTables(3, WIDTH, torch.device("cpu"))
    num_sent = []
    for place in range(8, 14):
        batch = build_batch(Step([Chunk(seq, place, 1) for seq in seqs], []), BLOCK_SIZE, tables)
        assert batch.attention.tables is not None
        num_sent.append(len(batch.attention.tables.places))
        for seq in seqs:
            seq.token_ids.append(1)

    assert num_sent == [9, 0, 0, 0, 3, 0]
