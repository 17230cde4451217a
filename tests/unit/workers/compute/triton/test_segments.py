import torch

from penstock.workers.compute.triton.segments import (
    FEW_ROWS,
    FIELDS,
    LONG_TILE,
    SHORT_TILE,
    AdapterMatrices,
    make_segments,
    table_of,
)

CPU = torch.device("cpu")


def test_a_table_says_where_matrices_lie_and_which_columns_they_add_to() -> None:
    a, first, second = torch.randn(5, 8), torch.randn(4, 2), torch.randn(6, 3)

    table = table_of([[None, AdapterMatrices(a, [(0, 4, first), (10, 16, second)])]], CPU)

    assert table.shape == (1, 2, FIELDS)
    assert not table[0, 0].any()
    assert table[0, 1].tolist() == [
        a.data_ptr(),
        5,
        0,
        4,
        first.data_ptr(),
        0,
        2,
        10,
        16,
        second.data_ptr(),
        2,
        3,
        0,
        0,
        0,
        0,
        0,
    ]


def test_rows_lie_adapter_by_adapter_in_tiles_of_one_adapter_each() -> None:
    tables = [torch.zeros(1, 1, FIELDS, dtype=torch.int64)] * 2

    segments = make_segments(tables, 8, [torch.arange(0, 20), torch.tensor([30])], 31, CPU)

    assert segments.rows.tolist() == [*range(20), 30]
    assert segments.tiles.tolist() == [[0, 0, SHORT_TILE], [0, 16, 4], [1, 20, 1]]
    assert segments.tables.shape == (2, 1, 1, FIELDS)


def test_an_adapter_alone_has_all_tokens_and_many_of_them_go_in_larger_tiles() -> None:
    segments = make_segments([torch.zeros(1, 1, FIELDS, dtype=torch.int64)], 8, [None], FEW_ROWS + 1, CPU)

    assert segments.tile_rows == LONG_TILE
    assert segments.rows.tolist() == list(range(FEW_ROWS + 1))
    assert segments.tiles.tolist() == [[0, 0, LONG_TILE], [0, LONG_TILE, LONG_TILE], [0, 2 * LONG_TILE, 1]]
