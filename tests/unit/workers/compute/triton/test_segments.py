import gc
import random

import pytest
import torch

from penstock.workers.compute.triton.segments import (
    FEW_ROWS,
    FIELDS,
    LONG_TILE,
    SHORT_TILE,
    AdapterMatrices,
    AdapterTables,
    make_segments,
    most_tiles,
    table_of,
    tile_rows,
)

CPU = torch.device("cpu")


class Adapter:
    """One layer of one matrix, which adds nothing. number: stands in its table."""

    def __init__(self, number: int = 0, max_rank: int = 8) -> None:
        self.table = torch.full((1, 1, FIELDS), number)
        self.max_rank = max_rank


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
    segments = make_segments([Adapter(), Adapter()], [torch.arange(0, 20), torch.tensor([30])], 31)

    assert segments.rows.tolist() == [*range(20), 30]
    assert segments.tiles.tolist() == [[0, 0, SHORT_TILE], [0, 16, 4], [1, 20, 1]]
    assert segments.tables.shape == (2, 1, 1, FIELDS)


def test_an_adapter_alone_has_all_tokens_and_many_of_them_go_in_larger_tiles() -> None:
    segments = make_segments([Adapter()], [None], FEW_ROWS + 1)

    assert segments.tile_rows == LONG_TILE
    assert segments.rows.tolist() == list(range(FEW_ROWS + 1))
    assert segments.tiles.tolist() == [[0, 0, LONG_TILE], [0, LONG_TILE, LONG_TILE], [0, 2 * LONG_TILE, 1]]


def make_tables(num_slots: int) -> AdapterTables:
    return AdapterTables(num_slots, max_rank=4, num_layers=1, num_matrices=1, device=CPU)


def numbers(tables: AdapterTables, adapters: list[Adapter]) -> list[int]:
    """What stands in the slots of a step's adapters."""
    return [int(tables.table[slot, 0, 0, 0]) for slot in tables.place(adapters)]


def test_adapters_of_any_steps_are_in_slots_of_their_own_and_only_new_ones_are_written() -> None:
    draw, tables = random.Random(2), make_tables(3)
    adapters = [Adapter(number) for number in range(1, 7)]
    held: dict[int, int] = {}

    for _ in range(60):
        wanted = draw.sample(adapters, draw.randint(1, 3))
        tables.table[:, 0, 0, 1] = 0
        slots = tables.place(wanted)
        numbers_of = [int(adapter.table[0, 0, 0]) for adapter in wanted]

        assert len(set(slots)) == len(slots)
        assert [int(number) for number in tables.table[slots, 0, 0, 0]] == numbers_of
        for slot, number in zip(slots, numbers_of, strict=True):
            is_written = bool(tables.table[slot, 0, 0, 1])
            assert is_written == (held.get(slot) != number)
            held[slot] = number


def test_a_slot_of_an_adapter_that_is_gone_is_taken_first_and_mistaken_for_nobodys() -> None:
    tables, staying, going = make_tables(2), Adapter(1), Adapter(2)
    slots = tables.place([staying, going])
    del going
    gc.collect()

    for number in range(3, 9):
        passing = Adapter(number)
        assert tables.place([passing]) == [slots[1]]
        assert numbers(tables, [staying, passing]) == [1, number]
        del passing
        gc.collect()


@pytest.mark.parametrize(("count", "max_rank", "expected"), [(2, 12, True), (3, 12, False), (1, 13, False)])
def test_tables_hold_as_many_adapters_as_slots_of_ranks_that_fit(count: int, max_rank: int, expected: bool) -> None:
    adapters = [Adapter(number, max_rank) for number in range(count)]

    assert make_tables(2).hold(adapters) == expected


def test_adapters_beyond_the_slots_bring_their_tables() -> None:
    tables, adapters = make_tables(1), [Adapter(3), Adapter(4)]

    segments = make_segments(adapters, [torch.tensor([1]), torch.tensor([0])], 2, tables)

    assert segments.tables[:, 0, 0, 0].tolist() == [3, 4]
    assert segments.tiles.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_no_step_has_more_tiles_than_it_is_said_to_have_at_most() -> None:
    draw = random.Random(3)
    for _ in range(300):
        num_tokens, num_adapters = draw.randint(1, 200), draw.randint(1, 4)
        owners = torch.tensor([draw.randrange(num_adapters) for _ in range(num_tokens)])
        rows = [(owners == adapter).nonzero().flatten() for adapter in range(num_adapters)]
        adapters = [Adapter(number) for number in range(num_adapters)]

        assert len(make_segments(adapters, list(rows), num_tokens).tiles) <= most_tiles(num_tokens, num_adapters)
    assert most_tiles(SHORT_TILE, 1) == 2
    assert tile_rows(FEW_ROWS) < tile_rows(FEW_ROWS + 1)
