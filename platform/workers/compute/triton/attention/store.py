"""Writing keys and values of a step to the paged cache: one program for a token and head.

A cache of 8 bits is in float8 e4m3 (Micikevicius et al. 2022, arXiv 2209.05433), each token's head in units of which
its largest number is 448, the format's largest. Numbers are rounded to nearest, ties to even, by their bits: so every
GPU rounds alike, those without the format's instructions too.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.attention.tile import heads_of_a_token

LARGEST = 448.0
NUM_WARPS = 1
"""A head has two or four numbers for each thread of one warp, which finds the largest of them by itself."""


@triton.jit
def encoded(x):
    """The bits of numbers of at most 448, as e4m3 has them: a sign, 4 bits of exponent, 3 of mantissa."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6 in steps of 2**-9, which are the last place's of float32 at 2**14
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0.015625, small, normal), 0x7F)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _put(
    x, token, head, token_heads, cache, scales, place, head_dim: tl.constexpr, dim_lanes: tl.constexpr,
    largest: tl.constexpr, is_scaled: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, dim_lanes)
    is_real = lanes < head_dim
    row = tl.load(x + (token * token_heads + head) * head_dim + lanes, mask=is_real, other=0.0)
    target = cache + place * head_dim + lanes
    if is_scaled:
        row = row.to(tl.float32)
        unit = tl.max(tl.abs(row), 0) * (1.0 / largest)
        tl.store(scales + place, unit)
        tl.store(target, encoded(tl.div_rn(row, tl.where(unit > 0, unit, 1.0))), mask=is_real)
    else:
        tl.store(target, row.to(cache.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["k_heads", "v_heads", "num_kv_heads"], do_not_specialize_on_alignment=["slots"])
def _store(
    k, v, k_cache, v_cache, k_scales, v_scales, slots, k_heads, v_heads, num_kv_heads, block_size: tl.constexpr,
    head_dim: tl.constexpr, dim_lanes: tl.constexpr, largest: tl.constexpr, is_scaled: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    place = (slot // block_size * num_kv_heads + head) * block_size + slot % block_size
    _put(k, token, head, k_heads, k_cache, k_scales, place, head_dim, dim_lanes, largest, is_scaled)
    _put(v, token, head, v_heads, v_cache, v_scales, place, head_dim, dim_lanes, largest, is_scaled)


def store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write k and v [T, num_kv_heads, head_dim], whose heads of a token lie side by side, to their slots (int64 [T];
    less than 0: nowhere) of contiguous caches [num_blocks, num_kv_heads, block_size, head_dim]. scales: of caches in
    float8 e4m3, float32 [num_blocks, num_kv_heads, block_size]."""
    num_tokens, num_kv_heads, head_dim = k.shape
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    if not num_tokens:
        return
    k_cache, v_cache, k_scales, v_scales = in_bytes(k_cache, v_cache, scales)
    _store[(num_tokens, num_kv_heads)](
        k, v, k_cache, v_cache, k_scales, v_scales, slot_mapping, heads_of_a_token(k), heads_of_a_token(v),
        num_kv_heads, **store_constants(head_dim, k_cache.shape[2], is_scaled=scales is not None), num_warps=NUM_WARPS,
    )  # fmt: skip


def store_constants(head_dim: int, block_size: int, *, is_scaled: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "block_size": block_size,
        "head_dim": head_dim,
        "dim_lanes": triton.next_power_of_2(head_dim),
        "largest": LARGEST,
        "is_scaled": is_scaled,
    }


def in_bytes(
    k_cache: Tensor, v_cache: Tensor, scales: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Caches and scales as kernels take them: 8-bit caches as bytes; where there are no scales, the caches stand in
    their place, and nothing reads them."""
    if scales is None:
        return k_cache, v_cache, k_cache, v_cache
    return k_cache.view(dtype=torch.uint8), v_cache.view(dtype=torch.uint8), *scales
