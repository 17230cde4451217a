import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.compute.triton.products.kernel_choice import (
    MANY_ROWS,
    MARGIN,
    ROW_COUNTS,
    SHARES,
    Choice,
    Kernel,
    candidates,
    choose,
    decode,
    encode,
)
from penstock.workers.compute.triton.products.tiling import BUCKETS, FEW, MIDDLE, TALL, WIDE, tiles_of

SECOND = FEW[16][1]


def kernels_of(rows: int, *, has_int4: bool = True) -> tuple[Kernel, ...]:
    return candidates(rows, tiles_of((9, 0), 2, rows) if rows in BUCKETS else (), has_int4=has_int4)


KERNELS = {rows: kernels_of(rows) for rows in ROW_COUNTS}
TIMES = st.fixed_dictionaries(
    {rows: st.tuples(*(st.floats(1e-6, 1e-2) for _ in kernels)) for rows, kernels in KERNELS.items()}
).map(lambda found: {rows: dict(zip(KERNELS[rows], found[rows], strict=True)) for rows in ROW_COUNTS})


def made_up(rows: int, *, has_int4: bool = True, **seconds: float) -> dict[Kernel, float]:
    """Times of one bucket: a second for every kernel but those named."""
    names: dict[str, Kernel] = {"middle": MIDDLE, "wide": WIDE, "second": SECOND, "dense": "dense", "int4": "int4"}
    changed = {names[name]: value for name, value in seconds.items()}
    return {kernel: changed.get(kernel, 1.0) for kernel in kernels_of(rows, has_int4=has_int4)}


def test_each_bucket_has_the_kernel_that_was_quickest() -> None:
    times = {rows: made_up(rows, has_int4=False) for rows in ROW_COUNTS}
    times[16] = made_up(16, has_int4=False, second=0.5)
    times[256] = made_up(256, has_int4=False, wide=0.8, dense=0.7)

    choice = choose(times)

    assert not choice.is_int4
    assert choice.kernels[16] == SECOND
    assert choice.kernels[256] == "dense"
    assert (choice.kernels[64], choice.kernels[128], choice.kernels[MANY_ROWS]) == (FEW[64][0], MIDDLE, "dense")


@pytest.mark.parametrize(("seconds", "wanted"), [(1 - MARGIN / 2, TALL), (1 - 2 * MARGIN, WIDE)])
def test_a_kernel_that_is_hardly_quicker_than_the_tables_is_not_taken(seconds: float, wanted: Kernel) -> None:
    assert choose({512: made_up(512, wide=seconds)}).kernels == {512: wanted}


def test_rows_that_nobody_measured_are_left_to_the_tables() -> None:
    assert choose({16: made_up(16, second=0.5), 32: {}}) == Choice(is_int4=False, kernels={16: SECOND})


def test_torchs_operator_is_taken_where_it_is_quicker_over_all_rows_together() -> None:
    few = {rows: made_up(rows, int4=0.5 if rows <= 64 else 1.2) for rows in ROW_COUNTS}
    slow_prompts = {rows: made_up(rows, int4=0.5 if rows <= 64 else 9.0) for rows in ROW_COUNTS}

    assert choose(few) == Choice(is_int4=True, kernels={})
    assert not choose(slow_prompts).is_int4


def test_torchs_operator_is_not_taken_where_it_is_not_known_for_all_rows() -> None:
    times = {rows: made_up(rows, int4=0.1) for rows in ROW_COUNTS}
    del times[512]["int4"]

    assert not choose(times).is_int4
    assert not choose({16: made_up(16, int4=0.1)}).is_int4


@given(TIMES)
def test_no_choice_is_slower_than_the_tables_over_all_rows(times: dict[int, dict[Kernel, float]]) -> None:
    choice = choose(times)

    def total(kernels: dict[int, Kernel]) -> float:
        return sum(SHARES[rows] * times[rows][kernel] for rows, kernel in kernels.items())

    chosen = dict.fromkeys(ROW_COUNTS, "int4") if choice.is_int4 else dict(choice.kernels)
    assert total(chosen) <= total({rows: next(iter(found)) for rows, found in times.items()})


@given(TIMES)
def test_a_choice_survives_its_way_through_a_file(times: dict[int, dict[Kernel, float]]) -> None:
    choice = choose(times)

    assert decode(json.loads(json.dumps(encode(choice)))) == choice


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"is_int4": False},
        {"is_int4": 1, "kernels": {}},
        {"is_int4": False, "kernels": {"16": "sparse"}},
        {"is_int4": False, "kernels": {"17": "dense"}},
        {"is_int4": False, "kernels": {"16": ["Tile", 1, 2]}},
        {"is_int4": False, "kernels": {"16": ["Tile", 64, 16, 4, 4, 528, "256"]}},
        {"is_int4": False, "kernels": {"16": ["Small", 1, 1, 1]}},
    ],
)
def test_anything_else_in_a_file_is_no_choice(value: object) -> None:
    assert decode(value) is None


def test_shares_are_of_all_steps() -> None:
    assert set(SHARES) == set(ROW_COUNTS)
    assert sum(SHARES.values()) == pytest.approx(1)
