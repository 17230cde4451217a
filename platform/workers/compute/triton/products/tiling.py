"""How products with the matrices of `grouped` are cut into programs, by rows of activations, shape and GPU: tables and
arithmetic, without Triton.

Rows come in buckets. A step of any number of rows is launched as its bucket is, so that what Triton compiles does not
depend on the number, and a warm-up that meets every bucket once meets everything.
"""

from typing import NamedTuple

SMALL_ROWS = 64
"""Rows of activations that one program takes all of, at most (`matmul.multiply`)."""
TILED_ROWS = 1024
"""Rows that are multiplied with the packed matrix, at most; beyond, dequantizing it takes little beside the product."""
SMALL_BUCKETS = (16, 32, SMALL_ROWS)
TILED_BUCKETS = (128, 256, 512, TILED_ROWS)
BUCKETS = (*SMALL_BUCKETS, *TILED_BUCKETS)
"""Largest number of rows of each bucket; those beyond the last are one more."""

ROOMY = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)}
"""Compute capabilities of which a block has 163 KiB of shared memory or more; others have 99 (CUDA C++ Programming
Guide, technical specifications)."""
ROOM_BYTES, LEAST_ROOM_BYTES = 160 << 10, 98 << 10
"""Shared memory of a block that programs may count with, on roomy cards and on others."""
PACKED_BYTES = 8 << 10
"""Bytes of a tile's packed integers in a block of its columns, at most."""
OPERAND_BYTES = 32 << 10
"""Bytes of a run's unpacked numbers that products take from shared memory."""
INTERPRETED = (9, 0)
"""Compute capability whose tiles Triton's interpreter takes."""
PROGRAMS = 120
"""Programs of a tiled product that are worth the cutting of its sums, at least: about as many as there are
multiprocessors."""
LEAST_BLOCKS = 2
"""Blocks of a row that a program of a tiled product sums up, at least."""
MOST_PARTS = 8


class Tile(NamedTuple):
    """What a program of a tiled product computes."""

    outputs: int
    """Rows of the matrix: 64, or a multiple."""
    rows: int
    """Rows of activations: a power of 2."""
    num_warps: int
    num_stages: int
    """Blocks that are under way from memory, the one in use included."""


MIDDLE = Tile(128, 64, 8, 2)
"""Fits in the shared memory of every card and, but for 24 bytes a thread on 8.0 and 8.6, in its registers."""
WIDE = Tile(128, 128, 8, 2)
"""Reads a row of the matrix half as often as MIDDLE. Compiled for 8.0 it keeps 600 bytes a thread in memory, for 9.0
and 10.0 none: only measuring takes it."""
NARROW = Tile(64, 64, 4, 2)
"""Has twice the programs of MIDDLE."""
FLOAT32 = Tile(64, 32, 4, 2)
"""The tile of float32 activations, whose products are no tensor core's."""
TILES = {True: (MIDDLE, WIDE), False: (MIDDLE, NARROW)}
"""Tiles of 2-byte activations by whether shared memory is roomy, the one that is taken unmeasured first."""


class Small(NamedTuple):
    """How a matrix is read for few rows."""

    programs: int
    """Programs over which a matrix of few outputs is divided, about."""
    num_warps: int
    num_stages: int
    """Blocks that are under way from memory where there is room for them; see `stages_of`."""


DEFAULT_SMALL = Small(384, 4, 4)
SMALLS = (DEFAULT_SMALL, Small(768, 4, 3), Small(384, 8, 4))
"""What is taken unmeasured first. 384 programs keep a GPU of about 130 multiprocessors busy."""


def stages_of(small: Small, rows: int, columns: int, number_bytes: int, capability: tuple[int, int]) -> int:
    """Blocks that are under way from memory at once: as many as `small` says, or as shared memory holds. rows: of
    activations, of a program. columns: of a block. number_bytes: of an activation."""
    # before 9.0 tensor cores take operands from registers
    beside = OPERAND_BYTES if capability >= (9, 0) or number_bytes == 4 else 0
    room = ROOM_BYTES if capability in ROOMY else LEAST_ROOM_BYTES
    return max(1, min(small.num_stages, 1 + (room - beside) // (rows * columns * number_bytes + PACKED_BYTES)))


def bucket_of(rows: int) -> int | None:
    """The bucket's largest number of rows; None beyond the last."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)


def tiles_of(capability: tuple[int, int], number_bytes: int) -> tuple[Tile, ...]:
    """Tiles for activations whose numbers have so many bytes, the one that is taken unmeasured first."""
    return (FLOAT32,) if number_bytes == 4 else TILES[capability in ROOMY]


def part_blocks_of(tile: Tile, bucket: int, outputs: int, blocks: int) -> int:
    """Blocks of a row that one program of a tiled product sums up: all of them where there are programs enough, else
    1/2, 1/4 or 1/8. The same for all numbers of rows of a bucket."""
    programs = -(-bucket // tile.rows) * -(-outputs // tile.outputs)
    parts = 1
    while parts < MOST_PARTS and programs * parts < PROGRAMS and blocks >= 2 * parts * LEAST_BLOCKS:
        parts *= 2
    return -(-blocks // parts)


def small_part_blocks(small: Small, least: int, tiles: int, blocks: int) -> int:
    """Blocks of a row that one program takes for few rows: `least`, or the row's, at least."""
    wanted = -(-small.programs // tiles)
    return min(blocks, max(least, -(-blocks // wanted)))
