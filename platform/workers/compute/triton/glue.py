"""What a decoder layer computes between its matrix products: add and norm, norms and rotation of heads with the storing
of keys and values, the gate of the MLP. Each is one launch.

Numbers are rounded to their tensors' type where torch's operators of `penstock.workers.compute.models.operators` round
them, which is where transformers does, and computed in float32 between; divisions and roots are IEEE's, and no
multiplication is fused with an addition. So results are those operators', but for the order in which squares are added
and for the exponential's last place.

Invariants: a program reads one token's numbers, so a token's result does not depend on the others of a step. How
kernels are compiled depends on the model and its cache alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.attention.store import LARGEST, encoded, in_bytes
from penstock.workers.compute.triton.early import begin_early, early

THREAD_NUMBERS = 8
"""Numbers that a thread takes at a time: 16 bytes of a 16-bit type, the longest load there is."""
WARP_NUMBERS = 32 * THREAD_NUMBERS
MOST_WARPS = 16
GATE_LANES = 1024
TILE_NUMBERS = 1024
"""Numbers of the heads that one program takes, about."""
MOST_TILE_HEADS = 16
PARTS_AT_ONCE = tl.constexpr(8)
"""Parts of a product that are read at once, so that one does not wait for the other."""
HEAD_WARPS = 2
UNFUSED = {"enable_fp_fusion": False}
"""Option of every launch: see the module's docstring."""

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """The float32 numbers x in dtype: to nearest, ties to even. Triton's interpreter cuts bfloat16 off instead, so
    there it is done by their bits."""
    if _IS_INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, upper, bits).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _sum_of_parts(parts, places, is_real, num_parts, stride, dtype: tl.constexpr):
    """The sum of float32 parts, which begin a stride apart, in order and rounded to dtype, as `matmul.multiply` has it;
    in float32."""
    total = tl.zeros(places.shape, tl.float32)
    for first in range(0, num_parts, PARTS_AT_ONCE):
        for step in tl.static_range(PARTS_AT_ONCE):
            part = first + step
            total += tl.load(parts + part * stride + places, mask=is_real & (part < num_parts), other=0.0)
    return _rounded(total, dtype).to(tl.float32)


@triton.jit
def _root(squares, count: tl.constexpr, eps):
    """The factor by which a norm multiplies numbers with this sum of squares."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, count * 1.0) + eps))


@triton.jit
def _normed(x, root, weight, dtype: tl.constexpr):
    """The float32 numbers x times root and weight, rounded to dtype after each; in float32."""
    return _rounded(_rounded(x * root, dtype).to(tl.float32) * weight, dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_parts"])
def _add_norm(
    x, added, weight, out, num_parts, eps, columns: tl.constexpr, lanes: tl.constexpr, is_added: tl.constexpr,
    is_in_parts: tl.constexpr, is_early: tl.constexpr,
):  # fmt: skip
    begin_early(is_early)
    start = tl.program_id(0).to(tl.int64) * columns
    places = tl.arange(0, lanes)
    is_real = places < columns
    numbers = tl.load(x + start + places, mask=is_real, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    if is_added:
        if is_in_parts:
            stride = tl.num_programs(0).to(tl.int64) * columns
            numbers += _sum_of_parts(added, start + places, is_real, num_parts, stride, dtype)
        else:
            numbers += tl.load(added + start + places, mask=is_real, other=0.0).to(tl.float32)
        numbers = _rounded(numbers, dtype).to(tl.float32)
        tl.store(x + start + places, numbers.to(dtype), mask=is_real)
    root = _root(tl.sum(numbers * numbers, 0), columns, eps)
    weights = tl.load(weight + places, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out + start + places, _normed(numbers, root, weights, dtype).to(dtype), mask=is_real)


@triton.jit(do_not_specialize=["num_parts"])
def _gate(
    gate_up, out, num_parts, columns: tl.constexpr, lanes: tl.constexpr, is_in_parts: tl.constexpr,
    is_early: tl.constexpr,
):  # fmt: skip
    begin_early(is_early)
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * lanes + tl.arange(0, lanes)
    is_real = places < columns
    source = token * (2 * columns) + places
    dtype = out.dtype.element_ty
    if is_in_parts:
        stride = tl.num_programs(0).to(tl.int64) * (2 * columns)
        gate = _sum_of_parts(gate_up, source, is_real, num_parts, stride, dtype)
        up = _sum_of_parts(gate_up, source + columns, is_real, num_parts, stride, dtype)
    else:
        gate = tl.load(gate_up + source, mask=is_real, other=0.0).to(tl.float32)
        up = tl.load(gate_up + source + columns, mask=is_real, other=0.0).to(tl.float32)
    opened = _rounded(tl.div_rn(gate, 1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    tl.store(out + token * columns + places, _rounded(opened * up, dtype), mask=is_real)


@triton.jit
def _put(
    low, high, heads, is_own, slot, num_kv_heads, cache, scales, block_size: tl.constexpr, head_dim: tl.constexpr,
    dim_lanes: tl.constexpr, largest: tl.constexpr, is_scaled: tl.constexpr,
):  # fmt: skip
    """Store the halves of those heads that are a key's or a value's, by their numbers, in one slot of a cache."""
    lanes = tl.arange(0, dim_lanes // 2)
    places = (slot // block_size * num_kv_heads + heads) * block_size + slot % block_size
    target = cache + places[:, None] * head_dim + lanes[None, :]
    is_real = is_own[:, None] & (lanes < head_dim // 2)[None, :]
    if is_scaled:
        unit = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)) * (1.0 / largest)
        tl.store(scales + places, unit, mask=is_own)
        divisor = tl.where(unit > 0, unit, 1.0)[:, None]
        tl.store(target, encoded(tl.div_rn(low, divisor)), mask=is_real)
        tl.store(target + head_dim // 2, encoded(tl.div_rn(high, divisor)), mask=is_real)
    else:
        tl.store(target, _rounded(low, cache.dtype.element_ty), mask=is_real)
        tl.store(target + head_dim // 2, _rounded(high, cache.dtype.element_ty), mask=is_real)


@triton.jit(
    do_not_specialize=["num_parts", "num_heads", "num_kv_heads"],
    do_not_specialize_on_alignment=["positions", "slots"],
)
def _rotate_and_store(
    qkv, q_norm, k_norm, cos, sin, positions, slots, q, k_cache, v_cache, k_scales, v_scales, num_parts, num_heads,
    num_kv_heads, eps, block_size: tl.constexpr, head_dim: tl.constexpr, dim_lanes: tl.constexpr,
    tile_heads: tl.constexpr, largest: tl.constexpr, is_normed: tl.constexpr, is_scaled: tl.constexpr,
    is_in_parts: tl.constexpr, is_early: tl.constexpr,
):  # fmt: skip
    begin_early(is_early)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * tile_heads
    heads = first + tl.arange(0, tile_heads)
    lanes = tl.arange(0, dim_lanes // 2)
    num_rotated = num_heads + num_kv_heads
    num_all = num_rotated + num_kv_heads
    is_lane = lanes < head_dim // 2
    is_query = heads < num_heads
    is_value = (heads >= num_rotated)[:, None]
    source = (token * num_all + heads)[:, None] * head_dim + lanes[None, :]
    is_real = (heads < num_all)[:, None] & is_lane[None, :]
    dtype = q.dtype.element_ty
    if is_in_parts:
        stride = tl.num_programs(0).to(tl.int64) * num_all * head_dim
        low = _sum_of_parts(qkv, source, is_real, num_parts, stride, dtype)
        high = _sum_of_parts(qkv, source + head_dim // 2, is_real, num_parts, stride, dtype)
    else:
        low = tl.load(qkv + source, mask=is_real, other=0.0).to(tl.float32)
        high = tl.load(qkv + source + head_dim // 2, mask=is_real, other=0.0).to(tl.float32)

    if is_normed:
        root = _root(tl.sum(low * low, 1) + tl.sum(high * high, 1), head_dim, eps)[:, None]
        q_low = tl.load(q_norm + lanes, mask=is_lane, other=0.0).to(tl.float32)[None, :]
        k_low = tl.load(k_norm + lanes, mask=is_lane, other=0.0).to(tl.float32)[None, :]
        q_high = tl.load(q_norm + head_dim // 2 + lanes, mask=is_lane, other=0.0).to(tl.float32)[None, :]
        k_high = tl.load(k_norm + head_dim // 2 + lanes, mask=is_lane, other=0.0).to(tl.float32)[None, :]
        normed_low = _normed(low, root, tl.where(is_query[:, None], q_low, k_low), dtype)
        normed_high = _normed(high, root, tl.where(is_query[:, None], q_high, k_high), dtype)
        low = tl.where(is_value, low, normed_low)
        high = tl.where(is_value, high, normed_high)

    # cosines of both halves are the same, sines differ in their sign only
    row = tl.load(positions + token) * head_dim + lanes
    cosines = tl.load(cos + row, mask=is_lane, other=0.0)[None, :]
    sines = tl.load(sin + row + head_dim // 2, mask=is_lane, other=0.0)[None, :]
    turned_low = _rounded(low * cosines - high * sines, dtype).to(tl.float32)
    turned_high = _rounded(high * cosines + low * sines, dtype).to(tl.float32)
    low = tl.where(is_value, low, turned_low)
    high = tl.where(is_value, high, turned_high)

    target = q + (token * num_heads + heads)[:, None] * head_dim + lanes[None, :]
    tl.store(target, low.to(dtype), mask=is_query[:, None] & is_lane[None, :])
    tl.store(target + head_dim // 2, high.to(dtype), mask=is_query[:, None] & is_lane[None, :])
    slot = tl.load(slots + token)
    if (slot < 0) | (first + tile_heads <= num_heads):
        return
    _put(
        low, high, heads - num_heads, (heads >= num_heads) & (heads < num_rotated), slot, num_kv_heads, k_cache,
        k_scales, block_size, head_dim, dim_lanes, largest, is_scaled,
    )  # fmt: skip
    _put(
        low, high, heads - num_rotated, (heads >= num_rotated) & (heads < num_all), slot, num_kv_heads, v_cache,
        v_scales, block_size, head_dim, dim_lanes, largest, is_scaled,
    )  # fmt: skip


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of x [T, N], contiguous, as `models.operators.rms_norm`."""
    return _launch_add_norm(x, None, weight, eps)


def add_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `added` to x, in place, both contiguous [T, N] of one type; the norm of the sum. Or `added` is in parts:
    float32 [P, T, N], whose sum in order is rounded to x's type."""
    assert added.is_contiguous()
    assert added.shape[-2:] == x.shape
    assert added.dtype == (x.dtype if added.dim() == 2 else torch.float32)
    return _launch_add_norm(x, added, weight, eps)


def _launch_add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    assert x.is_contiguous()
    out = torch.empty_like(x)
    if len(x):
        is_in_parts = added is not None and added.dim() == 3
        constants, options = norm_constants(x.shape[1], is_added=added is not None, is_in_parts=is_in_parts)
        num_parts = added.shape[0] if added is not None and is_in_parts else 1
        _add_norm[(len(x),)](
            x, x if added is None else added, weight, out, num_parts, eps, **constants, **options, **early(x)
        )
    return out


def norm_constants(columns: int, *, is_added: bool, is_in_parts: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the kernel is compiled for, and with which options. No number is read by threads of two warps, so none is
    read after it was written over."""
    lanes = triton.next_power_of_2(columns)
    num_warps = max(1, min(MOST_WARPS, lanes // WARP_NUMBERS))
    constants = {"columns": columns, "lanes": lanes, "is_added": is_added, "is_in_parts": is_in_parts}
    return constants, {"num_warps": num_warps, **UNFUSED}


def gate(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, N] of contiguous [T, 2 N], both of this type: silu of the first half times the second, as
    `models.operators.gated`. Or gate_up is in parts: float32 [P, T, 2 N], whose sum in order is rounded."""
    assert gate_up.is_contiguous()
    is_in_parts = gate_up.dim() == 3
    assert gate_up.dtype == (torch.float32 if is_in_parts else dtype)
    num_tokens, columns = gate_up.shape[-2], gate_up.shape[-1] // 2
    out = torch.empty(num_tokens, columns, dtype=dtype, device=gate_up.device)
    if num_tokens:
        _gate[(num_tokens, triton.cdiv(columns, GATE_LANES))](
            gate_up, out, len(gate_up) if is_in_parts else 1, **gate_constants(columns, is_in_parts=is_in_parts),
            **UNFUSED, **early(out),
        )  # fmt: skip
    return out


def gate_constants(columns: int, *, is_in_parts: bool = False) -> dict[str, int]:
    """What the kernel is compiled for."""
    return {"columns": columns, "lanes": GATE_LANES, "is_in_parts": is_in_parts}


def rotate_and_store(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rope: tuple[Tensor, Tensor],
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    dtype: torch.dtype,
    scales: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Queries [T, num_heads, head_dim] of contiguous qkv [T, heads, head_dim], normed where there are norms of queries
    and keys [head_dim], and rotated; keys, likewise, and values are stored in their slots. Or qkv is in parts: float32
    [P, T, heads, head_dim], whose sum in order is rounded.

    rope: contiguous tables as of `models.rope.rope_tables`. positions: int64 [T]. slot_mapping, caches and scales: as
    of `store`; the caches have the number of key/value heads, the rest of qkv's heads are queries. dtype: of queries.
    out: memory for the queries, of their shape and type, contiguous; None: new memory.
    """
    num_tokens, num_all, head_dim = qkv.shape[-3:]
    is_in_parts = qkv.dim() == 4
    num_kv_heads, block_size = k_cache.shape[1:3]
    num_heads = num_all - 2 * num_kv_heads
    assert qkv.is_contiguous()
    assert qkv.dtype == (torch.float32 if is_in_parts else dtype)
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype, device=qkv.device) if out is None else out
    assert q.is_contiguous()
    assert q.shape == (num_tokens, num_heads, head_dim)
    assert q.dtype == dtype
    if not num_tokens:
        return q
    constants, options = head_constants(
        head_dim, block_size, is_normed=norms is not None, is_scaled=scales is not None, is_in_parts=is_in_parts
    )
    k_cache, v_cache, k_scales, v_scales = in_bytes(k_cache, v_cache, scales)
    # where there are no norms, what is written stands in their place, and nothing reads it
    q_norm, k_norm = norms or (q, q)
    _rotate_and_store[(num_tokens, triton.cdiv(num_all, constants["tile_heads"]))](
        qkv, q_norm, k_norm, *rope, positions, slot_mapping, q, k_cache, v_cache, k_scales, v_scales,
        len(qkv) if is_in_parts else 1, num_heads, num_kv_heads, eps, **constants, **options, **early(q),
    )  # fmt: skip
    return q


def head_constants(
    head_dim: int, block_size: int, *, is_normed: bool, is_scaled: bool, is_in_parts: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the kernel is compiled for, and with which options. head_dim is even."""
    assert head_dim % 2 == 0
    dim_lanes = triton.next_power_of_2(head_dim)
    return {
        "block_size": block_size,
        "head_dim": head_dim,
        "dim_lanes": dim_lanes,
        "tile_heads": min(MOST_TILE_HEADS, max(1, TILE_NUMBERS // dim_lanes)),
        "largest": LARGEST,
        "is_normed": is_normed,
        "is_scaled": is_scaled,
        "is_in_parts": is_in_parts,
    }, {"num_warps": HEAD_WARPS, **UNFUSED}
