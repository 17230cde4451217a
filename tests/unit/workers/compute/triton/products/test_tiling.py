from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.compute.triton.products.tiling import (
    BUCKETS,
    LEAST_BLOCKS,
    PROGRAMS,
    ROOMY,
    SMALL_BUCKETS,
    TILED_BUCKETS,
    TILED_ROWS,
    WIDE,
    bucket_of,
    part_blocks_of,
    tiles_of,
)

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
NARROW_SHARED, ROOMY_SHARED = 99 << 10, 163 << 10


@given(st.integers(1, 2 * TILED_ROWS))
def test_rows_are_of_the_least_bucket_that_holds_them(rows: int) -> None:
    bucket = bucket_of(rows)

    assert bucket == min((size for size in BUCKETS if size >= rows), default=None)


def test_buckets_of_few_rows_are_lanes_that_a_matrix_product_takes() -> None:
    assert all(size >= 16 and size & (size - 1) == 0 for size in SMALL_BUCKETS)


@given(
    st.sampled_from(CAPABILITIES),
    st.sampled_from((2, 4)),
    st.sampled_from(TILED_BUCKETS),
    st.integers(1, 130_000),
    st.integers(1, 600),
)
def test_the_parts_of_a_row_are_all_of_it_and_none_is_shorter_than_it_should_be(
    capability: tuple[int, int], number_bytes: int, bucket: int, outputs: int, blocks: int
) -> None:
    for tile in tiles_of(capability, number_bytes):
        part_blocks = part_blocks_of(tile, bucket, outputs, blocks)
        num_parts = -(-blocks // part_blocks)

        assert 1 <= part_blocks <= blocks
        assert num_parts == 1 or part_blocks >= LEAST_BLOCKS
        if -(-bucket // tile.rows) * -(-outputs // tile.outputs) >= PROGRAMS:
            assert num_parts == 1


def test_a_matrix_with_few_outputs_is_divided_and_a_large_one_is_not() -> None:
    assert part_blocks_of(WIDE, 128, 4096, 16) == 4
    assert part_blocks_of(WIDE, 256, 4096, 16) == 8
    assert part_blocks_of(WIDE, 128, 28672, 16) == 16


def test_tiles_with_what_is_under_way_fit_a_blocks_shared_memory() -> None:
    for capability in CAPABILITIES:
        for number_bytes in (2, 4):
            for tile in tiles_of(capability, number_bytes):
                activations = 2 * tile.rows * 128 * number_bytes
                taken = tile.num_stages * activations + tile.outputs * 128
                assert taken <= (ROOMY_SHARED if capability in ROOMY else NARROW_SHARED)
