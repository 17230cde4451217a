"""Compiles the kernels to machine code for NVIDIA GPUs, which needs none: `python -m tests.gpu.compile_ahead` prints
what each takes.

Not with TRITON_INTERPRET=1. Register spills and shared memory are printed because they are what a kernel that works can
still be bad at.
"""

import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.workers.compute.triton import (
    adjust,
    cut,
    decode,
    grouped,
    low_rank,
    matmul,
    sample,
    segments,
    store,
)
from penstock.workers.compute.truncation import MOST_TOKENS

VARIANTS = ((80, "float32", 128), (90, "float16", 64), (90, "bfloat16", 128))
"""Compute capability, type of queries and cache, size of a head; the first takes the most shared memory."""
MATRICES = (
    (80, "float32", 4, 32, 16),
    (90, "bfloat16", 4, 128, 16),
    (90, "bfloat16", 4, 128, 64),
    (80, "bfloat16", 8, 32, 16),
)
"""Compute capability, type of activations, bits, run, lanes for rows."""
OPTIONS: dict[str, dict[str, Any]] = {
    "multiply": {"num_stages": matmul.STAGES},
    "sample": {"enable_fp_fusion": False},
}
"""Options of the kernels that are launched with any."""
MOST_TILES = triton.next_power_of_2(triton.cdiv(MOST_TOKENS, cut.TILE_TOKENS))
"""Tiles of the largest vocabulary whose tokens are weighed."""
WARP_THREADS = 32
POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
INT32 = "i32"
SHARED_BYTES = 99 * 2**10
"""Shared memory of a block where compute capability is 8.6 or 8.9; others have more."""

Sources = Iterator[tuple[str, int, ASTSource]]
"""What is compiled, for which compute capability."""


def attention_sources() -> Sources:
    for capability, dtype, head_dim in VARIANTS:
        for name, source in _attention(
            POINTERS[dtype], POINTERS[dtype], head_dim, "ieee" if dtype == "float32" else "tf32", is_scaled=False
        ):
            yield f"{name} sm_{capability} {dtype} {head_dim}", capability, source
    for name, source in _attention("*bf16", "*u8", 128, "tf32", is_scaled=True):
        yield f"{name} sm_90 bfloat16 over float8 128", 90, source


def _attention(
    data: str, cache: str, head_dim: int, precision: str, *, is_scaled: bool
) -> Iterator[tuple[str, ASTSource]]:
    lanes = {"dim_lanes": head_dim}
    split = {"split_tokens": decode.SPLIT_TOKENS, "max_splits": decode.MAX_SPLITS, "tile_tokens": decode.TILE_TOKENS}
    caches = {"k_cache": cache, "v_cache": cache, "k_scales": "*fp32", "v_scales": "*fp32"}
    yield (
        "store",
        _source(
            store._store,
            caches | {"k": data, "v": data, "slots": "*i64"},
            lanes | {"largest": store.LARGEST, "is_scaled": is_scaled},
        ),
    )
    pointers = caches | {
        "q": data,
        "tables": "*i32",
        "tokens": "*i32",
        "owners": "*i32",
        "visible": "*i32",
        "parts": "*fp32",
        "weights": "*fp32",
    }
    constants = lanes | split | {"group_lanes": 16, "precision": precision, "is_scaled": is_scaled}
    yield "attend", _source(decode._attend_split, pointers | {"scale": "fp32"}, constants)
    pointers = {"parts": "*fp32", "weights": "*fp32", "tokens": "*i32", "visible": "*i32", "out": data}
    yield "reduce", _source(decode._reduce, pointers, lanes | split)


def matmul_sources() -> Sources:
    for capability, dtype, bits, run, lanes in MATRICES:
        data = POINTERS[dtype]
        pointers = {
            "x": data,
            "q": "*u8",
            "scale": "*fp16",
            "second": "*fp16",
            "out": "*fp32",
            "ids": "*i64",
            "parts": "*fp32",
        }
        constants = {"tile_rows": grouped.TILE_ROWS, "run": run, "bits": bits, "kind": "zero" if bits == 4 else "none"}
        operand = {"row_lanes": lanes, "operand": tl.float32 if dtype == "float32" else tl.bfloat16}
        yield (
            f"multiply sm_{capability} {dtype} {bits} bits {run} {lanes}",
            capability,
            _source(matmul._multiply, pointers, constants | operand),
        )
        if lanes > matmul.LEAST_LANES:
            continue
        for name, kernel in (("dequantize", matmul._dequantize), ("read_rows", matmul._read_rows)):
            yield (
                f"{name} sm_{capability} {dtype} {bits} bits {run}",
                capability,
                _source(kernel, pointers | {"out": data}, constants),
            )
    yield (
        "sum_parts sm_90",
        90,
        _source(matmul._sum_parts, {"parts": "*fp32", "out": "*bf16"}, {"lanes": matmul.SUM_LANES}),
    )


def low_rank_sources() -> Sources:
    data, element = (
        POINTERS["bfloat16"],
        {"element": tl.bfloat16, "operand": tl.bfloat16, "fields": segments.FIELDS, "rank_lanes": low_rank.RANK_LANES},
    )
    pointers = {"x": data, "out": data, "rows": "*i64", "tiles": "*i32", "tables": "*i64", "inner": "*fp32"}
    shrink = element | {"tile_columns": low_rank.TILE_COLUMNS, "split_columns": low_rank.SPLIT_COLUMNS}
    expand = element | {"tile_outputs": low_rank.TILE_OUTPUTS, "parts": segments.PARTS}
    for capability, tile in ((80, segments.SHORT_TILE), (90, segments.LONG_TILE)):
        yield (
            f"shrink sm_{capability} bfloat16 {tile}",
            capability,
            _source(low_rank._shrink, pointers, shrink | {"row_lanes": tile}),
        )
        yield (
            f"expand sm_{capability} bfloat16 {tile}",
            capability,
            _source(low_rank._expand, pointers, expand | {"row_lanes": tile}),
        )


def sample_sources() -> Sources:
    scores = {
        "logits": "*fp32",
        "changed": "*fp32",
        "sources": "*i32",
        "tops": "*fp32",
        "temperatures": "*fp32",
        "keys": "*i32",
        "last_ids": "*i32",
    }
    best = scores | {"streams": "*i64", "least_keys": "*i32", "scores": "*fp64", "chosen": "*i64"}
    yield "sample sm_90", 90, _source(sample._best_of_tile, best, {"lanes": sample.TILE_TOKENS})
    weights = {"logits": "*fp32", "rows": "*i64", "tops": "*fp32", "sums": "*i64"}
    yield "sample weights sm_90", 90, _source(sample._add_weights, weights, {"lanes": sample.TILE_TOKENS})
    for capability, is_count in ((80, True), (90, False)):
        shares = "*i64" if is_count else "*fp64"
        pointers = scores | {"shares": shares, "sums": "*i64", "states": "*i64", "tile_sums": "*i64"}
        constants = {"is_count": is_count, "lanes": cut.TILE_TOKENS}
        for is_first in (True, False):
            yield (
                f"sample add up sm_{capability} {is_count} {is_first}",
                capability,
                _source(cut._add_up, pointers, constants | {"is_first": is_first}),
            )
        yield (
            f"sample end sm_{capability} {is_count}",
            capability,
            _source(cut._end, pointers, constants | {"tiles": MOST_TILES}),
        )
    lists = {"rows": "*fp32", "places": "*i64", "values": "*fp32", "produced": "*fp32", "penalties": "*fp32"}
    for kernel in (adjust._add, adjust._penalize, adjust._ban):
        yield f"sample {kernel.__name__} sm_90", 90, _source(kernel, lists, {"lanes": adjust.LANES})
    masks = {"rows": "*fp32", "mask_rows": "*i32", "words": "*i32"}
    yield "sample mask sm_90", 90, _source(adjust._mask, masks, {"lanes": adjust.TILE_TOKENS})


def _source(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> ASTSource:
    """Parameters that are named in neither are sizes and strides. Pointers are aligned, as torch's are."""
    signature = {name: "constexpr" if name in constants else types.get(name, INT32) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    return ASTSource(kernel, signature, dict(constants), aligned)


def main() -> None:
    for name, capability, source in chain(attention_sources(), matmul_sources(), low_rank_sources(), sample_sources()):
        options = next((found for kernel, found in OPTIONS.items() if name.startswith(kernel)), {})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, WARP_THREADS), options=options)
        if "sample" in name and "fma.rn.f" in compiled.asm["ptx"]:
            sys.exit(
                "noise, weights or penalties would be rounded otherwise than on the host: "
                "multiplications and additions are fused"
            )
        size, shared = len(compiled.asm["cubin"]), compiled.metadata.shared
        sys.stdout.write(f"{name}: {size} bytes of machine code, {shared} bytes of shared memory\n")


if __name__ == "__main__":
    main()
