from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.compute.triton.products.tiling import (
    BUCKETS,
    LEAST_COLUMNS,
    MOST_PARTS,
    ROOMY,
    SMALL_BUCKETS,
    TILED_ROWS,
    WIDE,
    Tile,
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
    st.sampled_from(BUCKETS),
    st.sampled_from((32, 64, 128, 256)),
    st.integers(1, 130_000),
    st.integers(1, 600),
)
def test_the_parts_of_a_row_are_all_of_it_and_none_is_shorter_than_it_should_be(
    capability: tuple[int, int], number_bytes: int, bucket: int, width: int, outputs: int, blocks: int
) -> None:
    for tile in tiles_of(capability, number_bytes, bucket):
        part_blocks = part_blocks_of(tile, bucket, outputs, blocks, width)
        num_parts = -(-blocks // part_blocks)

        assert 1 <= part_blocks <= blocks
        assert num_parts <= MOST_PARTS
        assert num_parts == 1 or part_blocks * width >= LEAST_COLUMNS
        if -(-bucket // tile.rows) * -(-outputs // tile.outputs) >= tile.programs:
            assert num_parts == 1


def test_a_matrix_with_few_outputs_is_divided_and_a_large_one_is_not() -> None:
    assert part_blocks_of(WIDE, 128, 4096, 32, 128) == 7
    assert part_blocks_of(WIDE, 256, 4096, 32, 128) == 11
    assert part_blocks_of(WIDE, 128, 28672, 32, 128) == 32


def test_one_program_takes_all_of_few_rows() -> None:
    for capability in CAPABILITIES:
        for bucket in SMALL_BUCKETS:
            assert {tile.rows for tile in tiles_of(capability, 2, bucket)} == {bucket}


def test_tiles_with_what_is_under_way_fit_a_blocks_shared_memory() -> None:
    for capability in CAPABILITIES:
        for number_bytes in (2, 4):
            for bucket in BUCKETS:
                for tile in tiles_of(capability, number_bytes, bucket):
                    room = ROOMY_SHARED if capability in ROOMY else NARROW_SHARED
                    assert shared_bytes(tile, number_bytes) <= room, (capability, tile)


def shared_bytes(tile: Tile, number_bytes: int) -> int:
    """Bytes of the activations and the integers of 8 bits that are under way."""
    return (
        tile.num_stages * tile.columns * tile.rows * number_bytes + (tile.num_stages - 1) * tile.columns * tile.outputs
    )
