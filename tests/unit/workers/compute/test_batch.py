"""A step as tensors: where its tokens lie, and which of its rows choose a token."""

import random

import pytest
import torch

from penstock.wire.frames import SamplingParams
from penstock.workers.compute import batch as batches
from penstock.workers.compute.batch import Span, build_batch, fill_in, lay_out
from penstock.workers.compute.triton.attention.block_tables import BlockTables
from penstock.workers.engine.sequence import Chunk, Sequence, Step

BLOCK_SIZE = 4


def sequence(num_tokens: int, blocks: list[int], **sampling: float) -> Sequence:
    token_ids = [random.Random(i).randrange(96) for i in range(num_tokens)]
    seq = Sequence(
        "r", token_ids, SamplingParams(max_tokens=50, **{"temperature": 0.0} | sampling), num_tokens, [], b"", 0.0
    )  # type: ignore[arg-type]
    seq.block_table = blocks
    return seq


def test_a_step_lies_side_by_side_in_its_blocks() -> None:
    decoding, prefilling = sequence(6, [3, 1]), sequence(9, [2, 5, 4])
    decoding.num_computed_tokens = 5
    prefilling.num_computed_tokens = 3

    batch = build_batch(Step([Chunk(decoding, 5, 1), Chunk(prefilling, 3, 4)], []), BLOCK_SIZE)

    assert batch.token_ids.tolist() == [decoding.token_ids[5], *prefilling.token_ids[3:7]]
    assert batch.positions.tolist() == [5, 3, 4, 5, 6]
    assert batch.attention.query_start.tolist() == [0, 1, 5]
    assert batch.attention.context_len.tolist() == [6, 7]
    assert batch.attention.block_tables.tolist() == [[3, 1], [2, 5]]
    assert batch.attention.slot_mapping.tolist() == [1 * 4 + 1, 2 * 4 + 3, 5 * 4, 5 * 4 + 1, 5 * 4 + 2]
    assert (batch.rows.tolist(), batch.sampled) == ([0], [0])
    assert [batch.attention.query_start.dtype, batch.attention.slot_mapping.dtype] == [torch.int32, torch.int64]


def test_a_draft_lies_behind_its_chunk_and_every_token_of_it_chooses() -> None:
    decoding, other, prefilling = sequence(6, [3, 1, 6]), sequence(3, [8]), sequence(9, [2, 5, 4])
    drafted = Chunk(decoding, 5, 1, 3, [90, 91, 92])

    batch = build_batch(Step([drafted, Chunk(prefilling, 3, 4), Chunk(other, 2, 1)], []), BLOCK_SIZE)

    assert batch.token_ids.tolist() == [
        decoding.token_ids[5],
        90,
        91,
        92,
        *prefilling.token_ids[3:7],
        other.token_ids[2],
    ]
    assert batch.positions.tolist() == [5, 6, 7, 8, 3, 4, 5, 6, 2]
    assert batch.attention.context_len.tolist() == [9, 7, 3]
    assert batch.attention.slot_mapping.tolist()[:4] == [1 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3, 6 * 4]
    assert (batch.rows.tolist(), batch.sampled) == ([0, 1, 2, 3, 8], [0, 2])


def test_block_tables_are_padded_with_zero() -> None:
    short, long = sequence(2, [7]), sequence(9, [1, 2, 3])

    tables = build_batch(Step([Chunk(short, 0, 2), Chunk(long, 0, 9)], []), BLOCK_SIZE).attention.block_tables

    assert tables.tolist() == [[7, 0, 0], [1, 2, 3]]


def test_by_tables_that_stay_on_the_device_a_batch_brings_rows_and_changes_only() -> None:
    decoding, prefilling = sequence(6, [3, 1]), sequence(9, [2, 5, 4])
    tables = BlockTables(2, 3, torch.device("cpu"))
    step = Step([Chunk(decoding, 5, 1), Chunk(prefilling, 3, 4)], [])

    own = build_batch(step, BLOCK_SIZE, tables).attention

    assert own.block_tables.shape == (2, 0)
    assert own.slot_mapping.tolist() == [1 * 4 + 1, 2 * 4 + 3, 5 * 4, 5 * 4 + 1, 5 * 4 + 2]
    assert own.tables is not None
    assert own.tables.rows.tolist() == [0, 1]
    assert dict(zip(own.tables.places.tolist(), own.tables.blocks.tolist(), strict=True)) == {0: 3, 1: 1, 3: 2, 4: 5}


def test_tokens_that_only_the_device_knows_are_filled_in() -> None:
    token_ids = torch.tensor([7, -2, 0, -1, -2])

    fill_in(token_ids, torch.tensor([40.0, 50.0, 60.0], dtype=torch.float64))

    assert token_ids.tolist() == [7, 50, 0, 40, 50]


def test_few_tokens_are_laid_out_as_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    spans = [
        Span(
            [chance.randrange(96) for _ in range(chance.randint(1, 7))],
            start := chance.randrange(20),
            chance.sample(range(100), (start + 7) // BLOCK_SIZE + 1),
        )
        for _ in range(9)
    ]
    few = lay_out(spans, BLOCK_SIZE)
    monkeypatch.setattr(batches, "FEW_TOKENS", 0)
    many = lay_out(spans, BLOCK_SIZE)

    for one, other in ((few.token_ids, many.token_ids), (few.positions, many.positions)):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    for name in ("query_start", "context_len", "block_tables", "slot_mapping"):
        one, other = getattr(few.attention, name), getattr(many.attention, name)
        assert torch.equal(one, other), name
        assert one.dtype == other.dtype


def test_the_least_and_the_largest_id_are_found_among_few_tokens_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seq = sequence(9, [2, 5, 4])
    seq.token_ids[3:6] = [7, -3, 95]
    batch = build_batch(Step([Chunk(seq, 3, 3)], []), BLOCK_SIZE)

    assert (batch.rows.tolist(), batch.rows.dtype) == ([], torch.int64)
    assert batch.least_and_largest_id == (-3, 95)
    monkeypatch.setattr(batches, "FEW_TOKENS", 0)
    assert batch.least_and_largest_id == (-3, 95)
