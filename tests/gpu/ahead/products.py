"""Kernels of products: quantized matrices by rows and by tiles, rows scaled to 8 bits, adapters."""

from collections.abc import Iterator, Mapping
from itertools import product

import triton.language as tl

from penstock.workers.compute.triton import low_rank, segments
from penstock.workers.compute.triton.attention import store
from penstock.workers.compute.triton.products import grouped, matmul, scale_rows, tiled, tiling
from tests.gpu.ahead.source import CAPABILITIES, EVERY, FLOAT8_CAPABILITIES, POINTERS, Sources, source_of

MATRICES = (("float32", 4, 32), ("bfloat16", 4, 128), ("bfloat16", 8, 32))
"""Type of activations, bits, run."""
FIRST, MORE, WIDER = tiling.SMALLS
SMALLS = (
    ("float32", 4, 32, 16, FIRST),
    ("float32", 4, 128, 64, FIRST),
    ("bfloat16", 4, 128, 16, FIRST),
    ("bfloat16", 4, 128, 64, FIRST),
    ("bfloat16", 4, 128, 64, MORE),
    ("bfloat16", 4, 128, 64, WIDER),
    ("bfloat16", 8, 128, 64, FIRST),
    ("bfloat16", 8, 32, 16, FIRST),
)
"""Type of activations, bits, run, lanes for rows, how the matrix is read: those that take most shared memory are among
them."""
TILED = ((4, 128, "zero"), (4, 32, "offset"), (8, 128, "none"), (8, 32, "none"))
"""Bits, run, and what is kept beside the scales, of matrices that are multiplied by tiles."""


def matmul_sources() -> Sources:
    yield from _small_sources()
    for capability, (dtype, bits, run) in product(EVERY, MATRICES):
        pointers = {"q": "*u8", "scale": "*fp16", "second": "*fp16", "out": POINTERS[dtype], "ids": "*i64"}
        constants = {"tile_rows": grouped.TILE_ROWS, "run": run, "bits": bits, "kind": _kind(bits)}
        for name, kernel in (("dequantize", matmul._dequantize), ("read_rows", matmul._read_rows)):
            source = source_of(kernel, pointers, constants)
            yield f"{name} sm_{capability} {dtype} {bits} bits {run}", capability, source
    for capability in EVERY:
        source = source_of(
            matmul._sum_parts, {"parts": "*fp32", "out": "*bf16"}, {"lanes": matmul.SUM_LANES}, ("columns",)
        )
        yield f"sum_parts sm_{capability}", capability, source


def _kind(bits: int) -> str:
    return "zero" if bits == 4 else "none"


SmallKind = tuple[tuple[int, int], str, int, int, int, tiling.Small]
"""Compute capability, type of activations, bits, run, lanes for rows, how the matrix is read."""


def small_list() -> Iterator[tuple[str, SmallKind]]:
    """Products of few rows, by what they are called."""
    for (major, minor), (dtype, bits, run, lanes, small) in product(CAPABILITIES, SMALLS):
        how = f"{small.programs} {small.num_warps} {small.num_stages}"
        name = f"multiply sm_{major}{minor} {dtype} {bits} bits {run} {lanes}, {how}"
        yield name, ((major, minor), dtype, bits, run, lanes, small)


def small_options() -> dict[str, Mapping[str, int]]:
    return {
        name: {
            "num_warps": small.num_warps,
            "num_stages": tiling.stages_of(
                small, lanes, matmul.block_columns(run, bits), 4 if dtype == "float32" else 2, capability
            ),
        }
        for name, (capability, dtype, bits, run, lanes, small) in small_list()
    }


def _small_sources() -> Sources:
    # sizes of models are multiples of 16, by which activations too are brought through shared memory
    whole = ("x_stride", "columns", "num_outputs", "group_size", "out_columns")
    for name, ((major, minor), dtype, bits, run, lanes, _) in small_list():
        pointers = {"x": POINTERS[dtype], "q": "*u8", "scale": "*fp16", "second": "*fp16", "out": "*fp32"}
        constants = {
            "tile_rows": grouped.TILE_ROWS,
            "run": run,
            "bits": bits,
            "kind": _kind(bits),
            "row_lanes": lanes,
            "base": matmul.BASE if bits == 4 and dtype == "bfloat16" else 0,
            "operand": tl.float32 if dtype == "float32" else tl.bfloat16,
        }
        yield name, 10 * major + minor, source_of(matmul._multiply, pointers, constants, whole)


TiledKind = tuple[tuple[int, int], tiling.Tile, str, int, int, str, bool]
"""Compute capability, tile, type of activations, bits, run, second kind, whether the columns are in parts."""


def tiled_list() -> Iterator[tuple[str, TiledKind]]:
    """Products by tiles that serving can meet, by what they are called."""
    for capability in CAPABILITIES:
        for tile in tiling.tiles_of(capability, 2):
            for bits, run, kind in TILED:
                for is_part in (False, True) if run == 128 else (False,):
                    yield _tiled_kind((capability, tile, "bfloat16", bits, run, kind, is_part))
        for tile in tiling.tiles_of(capability, 4):
            yield _tiled_kind((capability, tile, "float32", 4, 128, "zero", True))


def _tiled_kind(found: TiledKind) -> tuple[str, TiledKind]:
    (major, minor), tile, dtype, bits, run, kind, is_part = found
    name = f"tiled sm_{major}{minor} {dtype} {bits} bits {run} {kind}, {tile.outputs} by {tile.rows}"
    return name + (", in parts" if is_part else ""), found


def tiled_options() -> dict[str, Mapping[str, int]]:
    return {name: {"num_warps": kind[1].num_warps, "num_stages": kind[1].num_stages} for name, kind in tiled_list()}


def tiled_sources() -> Sources:
    whole = ("x_stride", "columns", "group_size", "num_outputs", "out_columns")
    for name, ((major, minor), tile, dtype, bits, run, kind, is_part) in tiled_list():
        data = POINTERS[dtype]
        pointers = {"x": data, "q": "*u8", "scale": "*fp16", "second": "*fp16", "out": "*fp32" if is_part else data}
        constants = {
            "row_lanes": tile.rows,
            "output_lanes": tile.outputs,
            "tile_rows": grouped.TILE_ROWS,
            "run": run,
            "bits": bits,
            "kind": kind,
            "base": matmul.BASE if bits == 4 and dtype == "bfloat16" else 0,
            "operand": tl.float32 if dtype == "float32" else tl.bfloat16,
        }
        yield name, 10 * major + minor, source_of(tiled._multiply_tiles, pointers, constants, whole)


def float8_sources() -> Sources:
    constants = {"largest": store.LARGEST, "lanes": scale_rows.LANES}
    pointers = {"x": "*bf16", "out": "*u8", "scales": "*fp32"}
    for major, minor in FLOAT8_CAPABILITIES:
        source = source_of(scale_rows._scale_row, pointers, constants, ("columns",))
        yield f"scale row sm_{major}{minor}", 10 * major + minor, source


def low_rank_sources() -> Sources:
    data, element = (
        POINTERS["bfloat16"],
        {"element": tl.bfloat16, "operand": tl.bfloat16, "fields": segments.FIELDS, "rank_lanes": low_rank.RANK_LANES},
    )
    pointers = {"x": data, "out": data, "rows": "*i64", "tiles": "*i32", "tables": "*i64", "inner": "*fp32"}
    shrink = element | {"tile_columns": low_rank.TILE_COLUMNS, "split_columns": low_rank.SPLIT_COLUMNS}
    expand = element | {"tile_outputs": low_rank.TILE_OUTPUTS, "parts": segments.PARTS}
    for capability, tile in product(EVERY, (segments.SHORT_TILE, segments.LONG_TILE)):
        yield (
            f"shrink sm_{capability} bfloat16 {tile}",
            capability,
            source_of(low_rank._shrink, pointers, shrink | {"row_lanes": tile}),
        )
        yield (
            f"expand sm_{capability} bfloat16 {tile}",
            capability,
            source_of(low_rank._expand, pointers, expand | {"row_lanes": tile}),
        )
