import numpy as np
import pytest
import torch

from penstock.workers.compute.triton.attention.plan import (
    FEW_TOKENS,
    MOST_TOKENS,
    PIECE_TOKENS,
    TOKENS_PER_QUERY,
    Plan,
    Tiles,
    make_plan,
    plan_queries,
)
from penstock.workers.compute.triton.staging import ALIGNMENT

CPU = torch.device("cpu")
SPANS = ((20, 1), (300, PIECE_TOKENS + 2), (19, FEW_TOKENS), (40, FEW_TOKENS + 1))
"""(context, new tokens)."""
BLOCK_SIZE = 16


def plan_of(*spans: tuple[int, int], exact: bool = False) -> Plan:
    starts = torch.tensor([0, *(new for _, new in spans)]).cumsum(0).int()
    contexts = torch.tensor([context for context, _ in spans], dtype=torch.int32)
    most = -(-max(context for context, _ in spans) // BLOCK_SIZE)
    tables = torch.arange(len(spans) * most, dtype=torch.int32).view(len(spans), most)
    return make_plan(starts, contexts, tables, BLOCK_SIZE, exact, CPU)


def listed(tiles: Tiles) -> list[tuple[int, ...]]:
    """(first query, sequence, tokens that the last one sees, queries, queries before) of each tile."""
    return list(zip(*(part.tolist() for part in tiles[:5]), strict=True))


def test_a_single_token_is_a_row_with_what_it_sees() -> None:
    rows = plan_of(*SPANS).rows

    assert rows is not None
    assert (rows.tokens.tolist(), rows.owners.tolist(), rows.visible.tolist()) == ([0], [0], [20])
    assert rows.max_visible == 20


def test_few_tokens_are_a_run() -> None:
    runs = plan_of(*SPANS).runs

    assert runs is not None
    assert listed(runs) == [(1 + PIECE_TOKENS + 2, 2, 19, FEW_TOKENS, 0)]
    assert (runs.num_queries, runs.max_visible) == (FEW_TOKENS, 19)


def test_more_tokens_are_pieces_in_tiles_those_that_see_most_first() -> None:
    pieces = plan_of(*SPANS).pieces

    assert pieces is not None
    last = 1 + PIECE_TOKENS + 2 + FEW_TOKENS
    assert [tile[:4] for tile in listed(pieces)] == [
        (1 + PIECE_TOKENS, 1, 300, 2),
        (1, 1, 298, PIECE_TOKENS),
        (last, 3, 40, FEW_TOKENS + 1),
    ]
    assert pieces.num_queries == PIECE_TOKENS + 2 + FEW_TOKENS + 1


@pytest.mark.parametrize(
    ("context", "new", "is_run"),
    [
        (30 * TOKENS_PER_QUERY, 30, True),
        (30 * TOKENS_PER_QUERY - 1, 30, False),
        (MOST_TOKENS * TOKENS_PER_QUERY, MOST_TOKENS, True),
        (4 * MOST_TOKENS * TOKENS_PER_QUERY, MOST_TOKENS + 1, False),
    ],
)
def test_where_the_context_is_long_more_tokens_are_a_run(context: int, new: int, is_run: bool) -> None:
    found = plan_of((context, new))

    assert (found.runs is not None) is is_run
    assert (found.pieces is not None) is not is_run


def test_a_longer_run_has_tiles_each_with_what_it_sees() -> None:
    runs = plan_of((50 * TOKENS_PER_QUERY, 1), (40 * TOKENS_PER_QUERY, 2 * FEW_TOKENS + 5)).runs

    context = 40 * TOKENS_PER_QUERY
    assert runs is not None
    assert listed(runs) == [
        (1, 1, context - FEW_TOKENS - 5, FEW_TOKENS, 0),
        (1 + FEW_TOKENS, 1, context - 5, FEW_TOKENS, FEW_TOKENS),
        (1 + 2 * FEW_TOKENS, 1, context, 5, 2 * FEW_TOKENS),
    ]


def test_how_a_sequence_is_taken_does_not_depend_on_its_company() -> None:
    together = plan_of(*SPANS)
    start = 0
    for owner, span in enumerate(SPANS):
        alone = plan_of(span)
        for ours, theirs in ((together.runs, alone.runs), (together.pieces, alone.pieces)):
            own = [] if ours is None else [tile for tile in listed(ours) if tile[1] == owner]
            expected = [] if theirs is None else listed(theirs)
            assert [(tile[0] - start, tile[2], tile[3]) for tile in own] == [
                (tile[0], tile[2], tile[3]) for tile in expected
            ]
        start += span[1]


def test_in_exact_mode_every_query_is_a_row() -> None:
    found = plan_of((20, 1), (30, 9), (9, 8), exact=True)

    assert found.runs is None
    assert found.pieces is None
    assert found.rows is not None
    assert found.rows.tokens.tolist() == list(range(18))
    assert found.rows.owners.tolist() == [0, *[1] * 9, *[2] * 8]
    assert found.rows.visible.tolist() == [20, *range(22, 31), *range(2, 10)]


def test_arrays_lie_in_one_piece_of_memory_where_kernels_expect_them() -> None:
    found = plan_of(*SPANS)
    assert found.rows is not None
    assert found.runs is not None
    assert found.pieces is not None
    arrays = [found.block_tables, *found.rows[:3], *found.runs[:5], *found.pieces[:5]]

    assert len({array.untyped_storage().data_ptr() for array in arrays}) == 1
    assert all(array.dtype == torch.int32 and not 4 * array.storage_offset() % ALIGNMENT for array in arrays)
    assert found.block_tables[3].tolist() == list(range(3 * 19, 4 * 19))


def test_a_query_that_sees_more_than_blocks_hold_is_refused() -> None:
    with pytest.raises(AssertionError, match="no block"):
        make_plan(torch.tensor([0, 1]).int(), torch.tensor([17]).int(), torch.zeros(1, 1).int(), 16, False, CPU)


def test_queries_name_their_sequences_rows_of_the_tables() -> None:
    starts = np.array([0, *np.cumsum([new for _, new in SPANS])])
    contexts = np.array([context for context, _ in SPANS])

    found = plan_queries(starts, contexts, np.array([7, 3, 5, 0]), exact=False)

    assert [set(cut.owners.tolist()) for cut in (found.rows, found.runs, found.pieces)] == [{7}, {5}, {3, 0}]
