import pytest
import torch

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.triton.plan import FEW_TOKENS, Plan, make_plan

CPU = torch.device("cpu")
SPANS = ((20, 1), (30, FEW_TOKENS + 1), (9, FEW_TOKENS))
"""(context, new tokens)."""


def plan(exact: bool) -> Plan:
    starts = torch.tensor([0, *(new for _, new in SPANS)]).cumsum(0).int()
    contexts = torch.tensor([context for context, _ in SPANS], dtype=torch.int32)
    return make_plan(starts, contexts, torch.tensor([[5, 3], [9, 2], [7, 0]], dtype=torch.int32), 16, exact, CPU)


def test_few_tokens_go_row_by_row_each_with_what_it_sees() -> None:
    rows = plan(exact=False).rows

    assert rows is not None
    assert rows.tokens.tolist() == [0, *range(10, 18)]
    assert rows.owners.tolist() == [0, *[2] * 8]
    assert rows.visible.tolist() == [20, *range(2, 10)]
    assert rows.max_visible == 20


def test_more_tokens_are_a_piece_that_knows_where_its_context_lies() -> None:
    (piece,) = plan(exact=False).pieces

    assert (piece.start, piece.end) == (1, 10)
    assert piece.blocks.tolist() == [9] * 16 + [2] * 14
    assert piece.offsets.tolist() == [*range(16), *range(14)]


def test_in_exact_mode_every_query_is_a_row() -> None:
    found = plan(exact=True)

    assert not found.pieces
    assert found.rows is not None
    assert found.rows.tokens.tolist() == list(range(18))
    assert found.rows.visible.tolist() == [20, *range(22, 31), *range(2, 10)]


@pytest.mark.parametrize("exact", [False, True])
def test_on_the_cpu_a_batch_stays_as_it_is(exact: bool) -> None:
    batch = AttentionBatch(*(torch.zeros(1, dtype=torch.int32) for _ in range(4)))

    assert batch.on(CPU, 16, exact) is batch
