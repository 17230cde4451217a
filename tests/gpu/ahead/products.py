"""Kernels of products: quantized matrices, rows scaled to 8 bits, adapters."""

from collections.abc import Iterator, Mapping
from itertools import product

import triton.language as tl

from penstock.workers.compute.triton import low_rank, segments
from penstock.workers.compute.triton.attention import store
from penstock.workers.compute.triton.products import grouped, matmul, scale_rows, tiling
from tests.gpu.ahead.source import CAPABILITIES, EVERY, FLOAT8_CAPABILITIES, POINTERS, Sources, source_of

MATRICES = (("float32", 4, 32), ("bfloat16", 4, 128), ("bfloat16", 8, 32))
"""Type of activations, bits, run."""
MULTIPLIED = ((4, 128, "zero"), (4, 32, "offset"), (8, 128, "none"), (8, 32, "none"))
"""Bits, run, and what is kept beside the scales, of matrices that are multiplied."""


def matmul_sources() -> Sources:
    yield from _product_sources()
    for capability, (dtype, bits, run) in product(EVERY, MATRICES):
        pointers = {"q": "*u8", "scale": "*fp16", "second": "*fp16", "out": POINTERS[dtype], "ids": "*i64"}
        constants = {
            "tile_rows": grouped.TILE_ROWS,
            "chunk_bytes": grouped.CHUNK_BYTES,
            "thread_bytes": grouped.THREAD_BYTES,
            "run": run,
            "width": 128,
            "bits": bits,
            "kind": _kind(bits),
        }
        for name, kernel in (("dequantize", matmul._dequantize), ("read_rows", matmul._read_rows)):
            own = {name: value for name, value in constants.items() if name in kernel.arg_names}
            yield (
                f"{name} sm_{capability} {dtype} {bits} bits {run}",
                capability,
                source_of(kernel, pointers, own, capability),
            )
    for capability in EVERY:
        source = source_of(
            matmul._sum_parts, {"parts": "*fp32", "out": "*bf16"}, {"lanes": matmul.SUM_LANES}, capability, ("columns",)
        )
        yield f"sum_parts sm_{capability}", capability, source


def _kind(bits: int) -> str:
    return "zero" if bits == 4 else "none"


ProductKind = tuple[tuple[int, int], tiling.Tile, str, int, int, str, bool]
"""Compute capability, tile, type of activations, bits, run, second kind, whether the columns are in parts."""


def product_list() -> Iterator[tuple[str, ProductKind]]:
    """Products that serving can meet, by what they are called."""
    for capability in CAPABILITIES:
        shapes = {
            tile._replace(programs=0): tile for rows in tiling.BUCKETS for tile in tiling.tiles_of(capability, 2, rows)
        }
        for tile in shapes:
            for bits, run, kind in MULTIPLIED:
                for is_part in (False, True) if run == 128 else (False,):
                    yield _named((capability, tile, "bfloat16", bits, run, kind, is_part))
        for rows in tiling.BUCKETS[:2]:
            for tile in tiling.tiles_of(capability, 4, rows):
                yield _named((capability, tile, "float32", 4, 128, "zero", True))


def _named(found: ProductKind) -> tuple[str, ProductKind]:
    (major, minor), tile, dtype, bits, run, kind, is_part = found
    how = f"{tile.outputs} by {tile.rows}, {tile.num_warps} warps, {tile.num_stages} stages"
    name = f"multiply sm_{major}{minor} {dtype} {bits} bits {run} {kind}, {how}"
    return name + (", in parts" if is_part else ""), found


def product_options() -> dict[str, Mapping[str, int]]:
    return {name: {"num_warps": kind[1].num_warps, "num_stages": kind[1].num_stages} for name, kind in product_list()}


def _product_sources() -> Sources:
    # sizes of models are multiples of 16, by which activations too are brought through shared memory
    whole = ("x_stride", "columns", "num_outputs", "out_columns")
    for name, ((major, minor), tile, dtype, bits, run, kind, is_part) in product_list():
        data = POINTERS[dtype]
        pointers = {"x": data, "q": "*u8", "scale": "*fp16", "second": "*fp16", "out": "*fp32" if is_part else data}
        constants = {
            "row_lanes": tile.rows,
            "output_lanes": tile.outputs,
            **matmul.CHUNK,
            "group_size": run,
            "width": min(tile.columns, matmul.MOST_RUNS * run),
            "is_whole": True,
            "run": run,
            "bits": bits,
            "kind": kind,
            "base": matmul.BASE if bits == 4 and dtype == "bfloat16" else 0,
            "operand": tl.float32 if dtype == "float32" else tl.bfloat16,
        }
        capability = 10 * major + minor
        yield name, capability, source_of(matmul._multiply, pointers, constants, capability, whole)


def float8_sources() -> Sources:
    constants = {"largest": store.LARGEST, "lanes": scale_rows.LANES}
    pointers = {"x": "*bf16", "out": "*u8", "scales": "*fp32"}
    for major, minor in FLOAT8_CAPABILITIES:
        capability = 10 * major + minor
        source = source_of(scale_rows._scale_row, pointers, constants, capability, ("columns",))
        yield f"scale row sm_{major}{minor}", capability, source


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
            source_of(low_rank._shrink, pointers, shrink | {"row_lanes": tile}, capability),
        )
        yield (
            f"expand sm_{capability} bfloat16 {tile}",
            capability,
            source_of(low_rank._expand, pointers, expand | {"row_lanes": tile}, capability),
        )
