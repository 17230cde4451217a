"""The form in which Triton takes a kernel to be compiled without a GPU."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from triton.compiler import ASTSource

from penstock.workers.compute.triton.early import early_on

CAPABILITIES = ((8, 0), (8, 6), (9, 0), (10, 0))
"""Compute capabilities for which the kernels are compiled that choose tiles by the card: attention and products with
packed integers."""
EVERY = (80, 90, 100)
"""Compute capabilities for which all kernels are compiled."""
FLOAT8 = torch.float8_e4m3fn
FLOAT8_CAPABILITIES = ((8, 9), (9, 0), (10, 0))
"""Compute capabilities that read caches of 8 bits (`penstock.workers.compute.device`)."""
POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
INT32 = "i32"
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", FLOAT8: "*u8"}

Sources = Iterator[tuple[str, int, ASTSource]]
"""What is compiled, for which compute capability."""


def source_of(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int, whole: Sequence[str] = ()
) -> ASTSource:
    """The kernel for a compute capability, such as 90. Parameters that are named in neither are sizes and strides;
    whole: those that are multiples of 16. Pointers are aligned, as torch's are, but for those of which the kernel must
    not make use of it."""
    if "is_early" in kernel.arg_names:
        major, minor = divmod(capability, 10)
        constants = {**constants, "is_early": early_on((major, minor))["is_early"]}
    signature = {name: "constexpr" if name in constants else types.get(name, INT32) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name in whole
        or (signature[name].startswith("*") and not kernel.params[index].do_not_specialize_on_alignment)
    }
    return ASTSource(kernel, signature, dict(constants), aligned)
