"""How products with the matrices of `grouped` are cut into programs, by rows of activations, shape and GPU: tables and
arithmetic, without Triton.

Rows come in buckets. A step of any number of rows is launched as its bucket is, so that what Triton compiles does not
depend on the number, and a warm-up that meets every bucket once meets everything.
"""

from typing import NamedTuple

SMALL_ROWS = 64
"""Rows of activations that one program takes all of, at most."""
TILED_ROWS = 1024
"""Rows that are multiplied with the packed matrix, at most; beyond, dequantizing it takes little beside the product."""
SMALL_BUCKETS = (16, 32, SMALL_ROWS)
TILED_BUCKETS = (128, 256, 512, TILED_ROWS)
BUCKETS = (*SMALL_BUCKETS, *TILED_BUCKETS)
"""Largest number of rows of each bucket; those beyond the last are one more."""

ROOMY = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)}
"""Compute capabilities of which a block has 163 KiB of shared memory or more; others have 99 (CUDA C++ Programming
Guide, technical specifications)."""
INTERPRETED = (9, 0)
"""Compute capability whose tiles Triton's interpreter takes."""
LEAST_COLUMNS = 512
"""Columns of a row that a program takes, at least, where the row has as many."""
MOST_PARTS = 16


class Tile(NamedTuple):
    """What a program of a product computes."""

    outputs: int
    """Rows of the matrix: 64, or a multiple."""
    rows: int
    """Rows of activations: a power of 2."""
    num_warps: int
    num_stages: int
    """Blocks that are under way from memory, the one in use included."""
    programs: int
    """Programs over which a matrix of few outputs is divided, about."""
    columns: int = 128
    """Columns that are taken at a time, where groups and columns are multiples of it."""


FEW = {
    16: (Tile(64, 16, 4, 4, 528, 256), Tile(64, 16, 4, 3, 1056), Tile(128, 16, 4, 3, 528)),
    32: (Tile(64, 32, 4, 3, 1056), Tile(64, 32, 4, 3, 528, 256), Tile(128, 32, 8, 4, 264)),
    64: (Tile(64, 64, 4, 3, 528), Tile(128, 64, 8, 3, 264), Tile(128, 64, 8, 4, 132)),
}
"""Tiles by the bucket of rows, the one that is taken unmeasured first: the quickest over the matrices of an 8B on an
H100 (BENCHMARKS.md). Cards with little shared memory are not offered the last."""
MIDDLE = Tile(128, 64, 8, 3, 264)
TALL = Tile(128, 64, 4, 3, 264)
WIDE = Tile(128, 128, 8, 3, 132)
MANY = {rows: (MIDDLE, TALL, WIDE) if rows <= 256 else (TALL, MIDDLE, WIDE) for rows in TILED_BUCKETS}
"""Tiles of more rows on cards whose tensor cores take operands from shared memory (9.0 on), chosen likewise."""
NARROW = Tile(64, 64, 4, 2, 132)
MANY_BEFORE = {
    True: (MIDDLE._replace(num_stages=2), WIDE._replace(num_stages=2)),
    False: (MIDDLE._replace(num_stages=2), NARROW),
}
"""Tiles of more rows on cards before, by whether shared memory is roomy. Compiled for 8.0 the second keeps hundreds of
bytes a thread in memory: only measuring takes it."""
FLOAT32 = Tile(64, 32, 4, 2, 384)
"""The tile of float32 activations, whose products are no tensor core's."""


def bucket_of(rows: int) -> int | None:
    """The bucket's largest number of rows; None beyond the last."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)


def tiles_of(capability: tuple[int, int], number_bytes: int, bucket: int) -> tuple[Tile, ...]:
    """Tiles for a bucket of activations whose numbers have so many bytes, the one that is taken unmeasured first."""
    if number_bytes == 4:
        return (FLOAT32._replace(rows=min(bucket, FLOAT32.rows)),)
    if bucket in FEW:
        return FEW[bucket] if capability in ROOMY else FEW[bucket][:2]
    return MANY[bucket] if capability in ROOMY and capability >= (9, 0) else MANY_BEFORE[capability in ROOMY]


def part_blocks_of(tile: Tile, bucket: int, outputs: int, blocks: int, width: int) -> int:
    """Blocks of a row, of `width` columns, that one program sums up: all of them where there are programs enough. The
    same for all numbers of rows of a bucket."""
    programs = -(-bucket // tile.rows) * -(-outputs // tile.outputs)
    wanted = min(MOST_PARTS, -(-tile.programs // programs))
    return min(blocks, max(-(-LEAST_COLUMNS // width), -(-blocks // wanted)))
