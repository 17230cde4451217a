"""Writing keys and values of a step to the paged cache: one program for a token and head."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _store(
    k, v, k_cache, v_cache, slots, k_token_stride, k_head_stride, v_token_stride, v_head_stride, num_kv_heads, block_size, head_dim, dim_lanes: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    place = ((slot // block_size * num_kv_heads + head) * block_size + slot % block_size) * head_dim
    lanes = tl.arange(0, dim_lanes)
    is_real = lanes < head_dim
    key = tl.load(k + token * k_token_stride + head * k_head_stride + lanes, mask=is_real)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + lanes, mask=is_real)
    tl.store(k_cache + place + lanes, key.to(k_cache.dtype.element_ty), mask=is_real)
    tl.store(v_cache + place + lanes, value.to(v_cache.dtype.element_ty), mask=is_real)


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v [T, num_kv_heads, head_dim], of which the last dimension is contiguous, to their slots (int64 [T]) of contiguous caches
    [num_blocks, num_kv_heads, block_size, head_dim]."""
    num_tokens, num_kv_heads, head_dim = k.shape
    assert k.stride(2) == v.stride(2) == 1
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    if not num_tokens:
        return
    _store[(num_tokens, num_kv_heads)](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        num_kv_heads, k_cache.shape[2], head_dim, dim_lanes=triton.next_power_of_2(head_dim),
    )  # fmt: skip
