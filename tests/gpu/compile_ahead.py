"""Compiles the kernels to machine code for NVIDIA GPUs, which needs none: `python -m tests.gpu.compile_ahead` prints
what each takes, and fails where one needs more shared memory than a block of that GPU has. With words, only kernels
whose names have all of them.

Not with TRITON_INTERPRET=1. Register spills and shared memory are printed because they are what a kernel that works can
still be bad at.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.workers.compute.triton import glue, low_rank, segments
from penstock.workers.compute.triton.attention import decode, prefill, store
from penstock.workers.compute.triton.products import grouped, matmul, scale_rows, tiled, tiling
from penstock.workers.compute.triton.sampling import adjust, cut, sample
from penstock.workers.compute.truncation import MOST_TOKENS

CAPABILITIES = ((8, 0), (8, 6), (9, 0), (10, 0))
FLOAT8_CAPABILITIES = ((8, 9), (9, 0), (10, 0))
"""Compute capabilities that read caches of 8 bits (`penstock.workers.compute.device`)."""
HEAD_DIMS = (64, 96, 128)
"""Numbers of a head: of these 96 is no power of 2. Larger ones work too; no model that is served has them."""
GROUPS = (1, 2, 4)
"""Query heads of a key/value head: runs of 16, 32 and 64 rows. More heads are more programs of 64."""
BLOCK_SIZE = 16
FLOAT8 = torch.float8_e4m3fn
SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227}
"""Shared memory of a block, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
LAYERS = {"bfloat16": (576, 2048, 3072, 4096, 5120, 8192), "float16": (576, 4096), "float32": (576, 4096)}
"""Sizes of layers, by the type of their numbers: of every number of warps that `glue.norm_constants` chooses for sizes
from 513 to 8192, and some that are no power of 2."""
LAYER_CAPABILITIES = (80, 90, 100)
MATRICES = (
    (80, "float32", 4, 32, 16),
    (90, "bfloat16", 4, 128, 16),
    (90, "bfloat16", 4, 128, 64),
    (80, "bfloat16", 8, 32, 16),
)
"""Compute capability, type of activations, bits, run, lanes for rows."""
TILED = ((4, 128, "zero"), (4, 32, "offset"), (8, 128, "none"), (8, 32, "none"))
"""Bits, run, and what is kept beside the scales, of matrices that are multiplied by tiles."""
OPTIONS: dict[str, dict[str, Any]] = {
    "multiply": {"num_warps": tiling.DEFAULT_SMALL.num_warps, "num_stages": tiling.DEFAULT_SMALL.num_stages},
    "sample": {"enable_fp_fusion": False},
}
"""Options of the kernels that are launched with any, but for attention's and tiles'."""
MOST_TILES = triton.next_power_of_2(triton.cdiv(MOST_TOKENS, cut.TILE_TOKENS))
"""Tiles of the largest vocabulary whose tokens are weighed."""
VARYING = (
    (matmul._multiply, ("num_rows",)),
    (matmul._sum_parts, ("num_rows", "num_parts")),
    (matmul._dequantize, ("first_tile", "num_rows")),
    (tiled._multiply_tiles, ("num_rows",)),
    (low_rank._shrink, ("place", "num_rows", "max_rank")),
    (low_rank._expand, ("place", "num_rows", "max_rank")),
)
"""Arguments of kernels that differ from step to step."""
WARP_THREADS = 32
POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
INT32 = "i32"
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", FLOAT8: "*u8"}

Sources = Iterator[tuple[str, int, ASTSource]]
"""What is compiled, for which compute capability."""


class Kind(NamedTuple):
    """What decides how an attention kernel is compiled, beside the GPU."""

    dtype: torch.dtype
    """Type of queries."""
    cache_dtype: torch.dtype
    head_dim: int
    group: int
    block_size: int


class Kernel(NamedTuple):
    """A kernel of attention as it is launched."""

    name: str
    kernel: Any
    kind: Kind
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def specialization(self) -> tuple[object, ...]:
        """What tells the machine code from that of others: types, constants, options. Group, block size and the very
        size of a head are left out: they change numbers in an address, and nothing that code is made of."""
        constants = dict(self.constants)
        is_padded = constants.pop("head_dim") != constants["dim_lanes"]
        for name in ("group", "block_size"):
            constants.pop(name, None)
        named = sorted((name, str(value)) for name, value in constants.items())
        return self.name, TYPES[self.kind.dtype], TYPES[self.kind.cache_dtype], is_padded, *named, *self.options.items()


def attention_kernels(kind: Kind, capability: tuple[int, int]) -> Iterator[Kernel]:
    """All that a step of a model of this kind may launch, made by the functions that launch it."""
    is_scaled = kind.cache_dtype == FLOAT8
    constants = store.store_constants(kind.head_dim, kind.block_size, is_scaled=is_scaled)
    yield Kernel("store", store._store, kind, constants, {"num_warps": store.NUM_WARPS})
    for is_normed, is_in_parts in product((False, True), repeat=2):
        constants, options = glue.head_constants(
            kind.head_dim, kind.block_size, is_normed=is_normed, is_scaled=is_scaled, is_in_parts=is_in_parts
        )
        name = f"heads{' normed' if is_normed else ''}{' in parts' if is_in_parts else ''}"
        yield Kernel(name, glue._rotate_and_store, kind, constants, options)
    for is_single in (True, False):
        constants, options = decode.split_constants(*kind, is_single=is_single)
        name = "rows" if is_single else "runs"
        yield Kernel(name, decode._attend_split, kind, constants, options)
        yield Kernel(f"reduce {name}", decode._reduce, kind, decode.reduce_constants(constants), {})
    constants, options = prefill.piece_constants(*kind, capability)
    yield Kernel("pieces", prefill._attend_piece, kind, constants, options)


def attention_list() -> Iterator[tuple[tuple[int, int], Kernel]]:
    """Every specialization once for each compute capability."""
    seen = set()
    for head_dim, dtype, group in product(HEAD_DIMS, TYPES, GROUPS):
        if dtype == FLOAT8:
            continue
        for cache_dtype, capabilities in ((dtype, CAPABILITIES), (FLOAT8, FLOAT8_CAPABILITIES)):
            for capability in capabilities:
                kind = Kind(dtype, cache_dtype, head_dim, group, BLOCK_SIZE)
                for kernel in attention_kernels(kind, capability):
                    key = (capability, kernel.specialization)
                    if key not in seen:
                        seen.add(key)
                        yield capability, kernel


def attention_options() -> dict[str, Mapping[str, Any]]:
    """Options of attention's kernels, by what they are called."""
    return {_name(capability, kernel): kernel.options for capability, kernel in attention_list()}


def attention_sources() -> Sources:
    for capability, kernel in attention_list():
        data, cache = TYPES[kernel.kind.dtype], TYPES[kernel.kind.cache_dtype]
        pointers = dict.fromkeys(("q", "k", "v", "out", "qkv", "q_norm", "k_norm"), data)
        pointers |= dict.fromkeys(("k_cache", "v_cache"), cache) | dict.fromkeys(("cos", "sin"), "*fp32")
        pointers |= dict.fromkeys(("tables", "tokens", "owners", "visible", "counts", "places"), "*i32")
        if kernel.constants.get("is_in_parts"):
            pointers["qkv"] = "*fp32"
        scales = "*fp32" if kernel.kind.cache_dtype == FLOAT8 else cache
        pointers |= dict.fromkeys(("k_scales", "v_scales"), scales) | dict.fromkeys(("parts", "weights"), "*fp32")
        types = pointers | {"slots": "*i64", "positions": "*i64", "scale": "fp32", "eps": "fp32"}
        major, minor = capability
        yield _name(capability, kernel), 10 * major + minor, _source(kernel.kernel, types, kernel.constants)


def _name(capability: tuple[int, int], kernel: Kernel) -> str:
    dtype, cache_dtype, head_dim, group, _ = kernel.kind
    major, minor = capability
    cache = " over float8" if cache_dtype == FLOAT8 else ""
    dtype_name = str(dtype).removeprefix("torch.")
    return f"attention: {kernel.name} sm_{major}{minor} {dtype_name}{cache}, {head_dim} numbers, groups of {group}"


def missing(kinds: Sequence[Kind]) -> list[str]:
    """Kernels that models of these kinds launch and `attention_sources` lacks."""
    compiled = {(capability, kernel.specialization) for capability, kernel in attention_list()}
    return [
        _name(capability, kernel)
        for kind in kinds
        for capability in (FLOAT8_CAPABILITIES if kind.cache_dtype == FLOAT8 else CAPABILITIES)
        for kernel in attention_kernels(kind, capability)
        if (capability, kernel.specialization) not in compiled
    ]


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


def served_kinds() -> list[Kind]:
    """What serving can meet: types, heads of 64 to 128 numbers, groups and block sizes."""
    dtypes = [dtype for dtype in TYPES if dtype != FLOAT8]
    return [
        Kind(dtype, cache_dtype, head_dim, group, block_size)
        for dtype, head_dim, group, block_size in product(
            dtypes, (64, 80, 96, 112, 120, 128), range(1, 17), (8, 16, 32, 64, 128)
        )
        for cache_dtype in (dtype, FLOAT8)
    ]


def layer_list() -> Iterator[tuple[str, int, Any, Mapping[str, Any], Mapping[str, Any]]]:
    """Kernels between products with their compute capability, constants and options, as they are launched."""
    for capability, (dtype, sizes) in product(LAYER_CAPABILITIES, LAYERS.items()):
        for columns, (is_added, is_in_parts) in product(sizes, ((False, False), (True, False), (True, True))):
            constants, options = glue.norm_constants(columns, is_added=is_added, is_in_parts=is_in_parts)
            added = f"add{' parts' if is_in_parts else ''} and " if is_added else ""
            name = f"layer: {added}norm sm_{capability} {dtype} {columns}"
            yield name, capability, glue._add_norm, constants, options
        yield f"layer: gate sm_{capability} {dtype}", capability, glue._gate, glue.gate_constants(14336), glue.UNFUSED


def layer_options() -> dict[str, Mapping[str, Any]]:
    return {name: options for name, _, _, _, options in layer_list()}


def layer_sources() -> Sources:
    for name, capability, kernel, constants, _ in layer_list():
        data = next(POINTERS[dtype] for dtype in LAYERS if dtype in name)
        types = dict.fromkeys(("x", "added", "weight", "out", "gate_up"), data) | {"eps": "fp32"}
        if constants.get("is_in_parts"):
            types["added"] = "*fp32"
        yield name, capability, _source(kernel, types, constants)


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
        operand = {
            "row_lanes": lanes,
            "base": matmul.BASE if bits == 4 and dtype == "bfloat16" else 0,
            "operand": tl.float32 if dtype == "float32" else tl.bfloat16,
        }
        yield (
            f"multiply sm_{capability} {dtype} {bits} bits {run} {lanes}",
            capability,
            _source(matmul._multiply, pointers, constants | operand),
        )
        if lanes > tiling.SMALL_BUCKETS[0]:
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
        _source(matmul._sum_parts, {"parts": "*fp32", "out": "*bf16"}, {"lanes": matmul.SUM_LANES}, ("columns",)),
    )


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
        yield name, 10 * major + minor, _source(tiled._multiply_tiles, pointers, constants, whole)


def float8_sources() -> Sources:
    constants = {"largest": store.LARGEST, "lanes": scale_rows.LANES}
    pointers = {"x": "*bf16", "out": "*u8", "scales": "*fp32"}
    for major, minor in FLOAT8_CAPABILITIES:
        source = _source(scale_rows._scale_row, pointers, constants, ("columns",))
        yield f"scale row sm_{major}{minor}", 10 * major + minor, source


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
    lists = dict.fromkeys(("rows", "values", "own_produced", "penalties"), "*fp32")
    lists |= dict.fromkeys(("penalized", "list_sizes", "own_starts", "last_rows"), "*i32")
    lists |= dict.fromkeys(("places", "targets", "entries", "lists", "own_ids", "before", "needed"), "*i64")
    for kernel in (adjust._add, adjust._write_lists, adjust._ban):
        yield f"sample {kernel.__name__} sm_90", 90, _source(kernel, lists, {"lanes": adjust.LANES})
    for capability in LAYER_CAPABILITIES:
        source = _source(adjust._penalize, lists, {"lanes": adjust.LIST_LANES})
        yield f"sample {adjust._penalize.__name__} sm_{capability}", capability, source
    masks = {"rows": "*fp32", "mask_rows": "*i32", "words": "*i32"}
    yield "sample mask sm_90", 90, _source(adjust._mask, masks, {"lanes": adjust.TILE_TOKENS})


def _source(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], whole: Sequence[str] = ()
) -> ASTSource:
    """Parameters that are named in neither are sizes and strides; whole: those that are multiples of 16. Pointers are
    aligned, as torch's are, but for those of which the kernel must not make use of it."""
    signature = {name: "constexpr" if name in constants else types.get(name, INT32) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name in whole
        or (signature[name].startswith("*") and not kernel.params[index].do_not_specialize_on_alignment)
    }
    return ASTSource(kernel, signature, dict(constants), aligned)


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
    chosen = parser.parse_args()
    if chosen.coverage:
        lacking = missing(served_kinds()) + varying_arguments()
        sys.exit("\n".join(lacking) or 0)
    known = attention_options() | layer_options() | tiled_options()
    sources = (attention_sources(), layer_sources(), matmul_sources(), tiled_sources(), float8_sources())
    for name, capability, source in chain(*sources, low_rank_sources(), sample_sources()):
        if not all(word in name for word in chosen.words):
            continue
        if any(word in name for word in chosen.without):
            continue
        options = next((found for kernel, found in OPTIONS.items() if name.startswith(kernel)), {})
        sys.stdout.write(_compile(name, capability, source, known.get(name, options)))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
