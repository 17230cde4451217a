"""Kernels between the products of a layer."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from penstock.workers.compute.triton import glue
from tests.gpu.ahead.source import EVERY, POINTERS, Sources, source_of

LAYERS = {"bfloat16": (576, 2048, 3072, 4096, 5120, 8192), "float16": (576, 4096), "float32": (576, 4096)}
"""Sizes of layers, by the type of their numbers: of every number of warps that `glue.norm_constants` chooses for sizes
from 513 to 8192, and some that are no power of 2."""


def layer_list() -> Iterator[tuple[str, int, Any, Mapping[str, Any], Mapping[str, Any]]]:
    """Kernels between products with their compute capability, constants and options, as they are launched."""
    for capability, (dtype, sizes) in product(EVERY, LAYERS.items()):
        for columns, (is_added, is_in_parts) in product(sizes, ((False, False), (True, False), (True, True))):
            constants, options = glue.norm_constants(columns, is_added=is_added, is_in_parts=is_in_parts)
            added = f"add{' parts' if is_in_parts else ''} and " if is_added else ""
            name = f"layer: {added}norm sm_{capability} {dtype} {columns}"
            yield name, capability, glue._add_norm, constants, options
        for is_in_parts in (False, True):
            constants = glue.gate_constants(14336, is_in_parts=is_in_parts)
            name = f"layer: gate{' parts' if is_in_parts else ''} sm_{capability} {dtype}"
            yield name, capability, glue._gate, constants, glue.UNFUSED


def layer_options() -> dict[str, Mapping[str, Any]]:
    return {name: options for name, _, _, _, options in layer_list()}


def layer_sources() -> Sources:
    for name, capability, kernel, constants, _ in layer_list():
        data = next(POINTERS[dtype] for dtype in LAYERS if dtype in name)
        types = dict.fromkeys(("x", "added", "weight", "out", "gate_up"), data) | {"eps": "fp32"}
        if constants.get("is_in_parts"):
            types["added"] = types["gate_up"] = "*fp32"
        yield name, capability, source_of(kernel, types, constants, capability)
