"""Kernels of attention, and those that write keys and values: every variant that a served model can need."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from penstock.workers.compute.triton import glue
from penstock.workers.compute.triton.attention import decode, prefill, store
from tests.gpu.ahead.source import CAPABILITIES, FLOAT8, FLOAT8_CAPABILITIES, TYPES, Sources, source_of

HEAD_DIMS = (64, 96, 128)
"""Numbers of a head: of these 96 is no power of 2. Larger ones work too; no model that is served has them."""
GROUPS = (1, 2, 4)
"""Query heads of a key/value head: runs of 16, 32 and 64 rows. More heads are more programs of 64."""
BLOCK_SIZE = 16


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
        yield (
            _name(capability, kernel),
            10 * major + minor,
            source_of(kernel.kernel, types, kernel.constants, 10 * major + minor),
        )


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
