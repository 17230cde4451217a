"""Compiles the kernels to machine code for NVIDIA GPUs, which needs none: `python -m tests.gpu.compile_ahead` prints what each takes.

Not with TRITON_INTERPRET=1. Register spills and shared memory are printed because they are what a kernel that works can still be bad at.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.workers.triton import decode, store

VARIANTS = ((80, "float32", 128), (90, "float16", 64), (90, "bfloat16", 128))
"""Compute capability, type of queries and cache, size of a head; the first takes the most shared memory."""
WARP_THREADS = 32
POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
INT32 = "i32"


def sources(dtype: str, head_dim: int, group_lanes: int) -> Iterator[tuple[str, ASTSource]]:
    data, split = POINTERS[dtype], {"split_tokens": decode.SPLIT_TOKENS}
    precision = "ieee" if dtype == "float32" else "tf32"
    lanes = {"dim_lanes": head_dim}
    yield "store", _source(store._store, {"k": data, "v": data, "k_cache": data, "v_cache": data, "slots": "*i64"}, lanes)
    pointers = {"q": data, "k_cache": data, "v_cache": data, "tables": "*i32", "tokens": "*i32", "owners": "*i32", "visible": "*i32"}
    constants = lanes | split | {"group_lanes": group_lanes, "tile_tokens": decode.TILE_TOKENS, "precision": precision}
    yield "attend", _source(decode._attend_split, pointers | {"parts": "*fp32", "weights": "*fp32", "scale": "fp32"}, constants)
    pointers = {"parts": "*fp32", "weights": "*fp32", "tokens": "*i32", "visible": "*i32", "out": data}
    yield "reduce", _source(decode._reduce, pointers, lanes | split)


def _source(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> ASTSource:
    """Parameters that are named in neither are sizes and strides."""
    signature = {name: "constexpr" if name in constants else types.get(name, INT32) for name in kernel.arg_names}
    return ASTSource(kernel, signature, dict(constants))


def main() -> None:
    for capability, dtype, head_dim in VARIANTS:
        for name, source in sources(dtype, head_dim, group_lanes=16):
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, WARP_THREADS))
            size, shared = len(compiled.asm["cubin"]), compiled.metadata.shared
            sys.stdout.write(f"{name} sm_{capability} {dtype} {head_dim}: {size} bytes of machine code, {shared} bytes of shared memory\n")


if __name__ == "__main__":
    main()
