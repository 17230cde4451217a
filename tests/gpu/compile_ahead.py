"""Compiles the kernels to machine code for NVIDIA GPUs, which needs none: `python -m tests.gpu.compile_ahead` prints
what each takes, and fails where one needs more shared memory than a block of that GPU has. With words, only kernels
whose names have all of them.

Not with TRITON_INTERPRET=1. Register spills and shared memory are printed because they are what a kernel that works can
still be bad at.
"""

import argparse
import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.workers.compute.triton import glue, low_rank
from penstock.workers.compute.triton.attention import decode, prefill, store
from penstock.workers.compute.triton.products import matmul
from tests.gpu.ahead.attention import attention_options, attention_sources, missing, served_kinds
from tests.gpu.ahead.layers import layer_options, layer_sources
from tests.gpu.ahead.products import (
    float8_sources,
    low_rank_sources,
    matmul_sources,
    product_options,
)
from tests.gpu.ahead.sampling import sample_sources

SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227}
"""Shared memory of a block, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
OPTIONS: dict[str, dict[str, Any]] = {
    "sample": {"enable_fp_fusion": False},
}
"""Options of the kernels that are launched with any, but for attention's and products'."""
VARYING = (
    (matmul._multiply, ("num_rows",)),
    (matmul._sum_parts, ("num_rows", "num_parts")),
    (matmul._dequantize, ("first_tile", "num_rows")),
    (low_rank._shrink, ("place", "num_rows", "max_rank")),
    (low_rank._expand, ("place", "num_rows", "max_rank")),
)
"""Arguments of kernels that differ from step to step."""
WARP_THREADS = 32


def varying_arguments() -> list[str]:
    """Arguments by whose values Triton would compile a kernel anew while serving: none should. Of attention and of what
    lies between products all but pointers may vary, of the others those of VARYING; a model has the rest for good."""
    kernels = (store._store, decode._attend_split, decode._reduce, prefill._attend_piece)
    kernels += (glue._rotate_and_store, glue._add_norm, glue._gate)
    pointers = {"q", "k", "v", "k_cache", "v_cache", "k_scales", "v_scales", "tables", "tokens", "owners", "visible"}
    pointers |= {"counts", "places", "parts", "weights", "out", "slots", "qkv", "q_norm", "k_norm", "cos", "sin"}
    pointers |= {"positions", "x", "added", "weight", "gate_up", "scale", "eps"}
    every = [
        (kernel, [param.name for param in kernel.params if not (param.is_constexpr or param.name in pointers)])
        for kernel in kernels
    ]
    return [
        f"{kernel.__name__}: {param.name} is specialised by its value"
        for kernel, names in (*every, *VARYING)
        for param in kernel.params
        if param.name in names and not param.do_not_specialize
    ]


def _compile(name: str, capability: int, source: ASTSource, options: Mapping[str, Any]) -> str:
    """A line of what it takes. Exits where it is not what a GPU of this capability can run as it should."""
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, WARP_THREADS), options=dict(options))
    if any(word in name for word in ("sample", "layer", "heads")) and "fma.rn.f" in compiled.asm["ptx"]:
        sys.exit(f"{name} would round otherwise than the host: multiplications and additions are fused")
    if "sample" in name and any(word in compiled.asm["ptx"] for word in (".ftz", ".approx", "div.full")):
        sys.exit(f"{name} would round otherwise than the host: operations are not IEEE's")
    size, shared = len(compiled.asm["cubin"]), compiled.metadata.shared
    most = 2**10 * SHARED_KIB[divmod(capability, 10)]
    if shared > most:
        sys.exit(f"{name} needs {shared} bytes of shared memory, and a block has {most}")
    return f"{name}: {size} bytes of machine code, {shared} bytes of shared memory of {most}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the kernels to machine code for NVIDIA GPUs.")
    parser.add_argument("words", nargs="*", help="parts of names: only kernels that have all of them")
    parser.add_argument("--without", default=[], nargs="+", help="parts of names: no kernels that have one of them")
    parser.add_argument(
        "--coverage", action="store_true", help="compile nothing; name what serving can meet that is not compiled"
    )
    parser.add_argument("--list", action="store_true", help="compile nothing; print the names")
    chosen = parser.parse_args()
    if chosen.coverage:
        lacking = missing(served_kinds()) + varying_arguments()
        sys.exit("\n".join(lacking) or 0)
    known = attention_options() | layer_options() | product_options()
    sources = (attention_sources(), layer_sources(), matmul_sources(), float8_sources())
    for name, capability, source in chain(*sources, low_rank_sources(), sample_sources()):
        if not all(word in name for word in chosen.words):
            continue
        if any(word in name for word in chosen.without):
            continue
        if chosen.list:
            sys.stdout.write(f"{name}\n")
            continue
        options = next((found for kernel, found in OPTIONS.items() if name.startswith(kernel)), {})
        sys.stdout.write(_compile(name, capability, source, known.get(name, options)))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
