"""Launches that begin early: a kernel's programs are placed on the GPU while those of the kernel before it end, and
wait there for its results (programmatic dependent launch, CUDA C++ Programming Guide; `griddepcontrol`, PTX ISA), from
compute capability 9.0 on.

A kernel that is launched so calls `begin_early`, or `wait`, before it reads or writes anything that another kernel
writes or reads; then one that has waited knows that all before it have ended.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

CAPABILITY = (9, 0)
LINE_BYTES = 128
"""What `prefetch` fetches at an address."""


@triton.jit
def begin_early(is_early: tl.constexpr):
    """Let the next kernel begin, and wait for the end of those before."""
    if is_early:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def let_next_begin(is_early: tl.constexpr):
    if is_early:
        cuda.gdc_launch_dependents()


@triton.jit
def wait(is_early: tl.constexpr):
    """Wait for the end of the kernels before. Only what no kernel writes may be read before."""
    if is_early:
        cuda.gdc_wait()


@triton.jit
def prefetch(places):
    """Fetch lines of memory to the GPU's cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.uint64, bitcast=True)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


def early(x: Tensor) -> dict[str, bool]:
    """Constant and option of a launch on x's device."""
    return early_on(torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0))


@lru_cache
def early_on(capability: tuple[int, int]) -> dict[str, bool]:
    """Constant and option of a launch on a GPU of this compute capability."""
    is_early = capability >= CAPABILITY
    return {"is_early": is_early} | ({"launch_pdl": True} if is_early else {})
