"""How a layer of the KV cache is kept, beyond its two tensors [num_blocks, num_kv_heads, block_size, head_dim];
`attention.hpp` has the orders."""

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 16
"""Positions that a tiled cache keeps together."""
_LANES = 32
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_TILED_CODES = {torch.bfloat16: 3, torch.int8: 4}


class CacheLayout(NamedTuple):
    """The order of the two tensors of a layer in memory, and the scales that belong to them."""

    scales: tuple[Tensor, Tensor] | None = None
    """Scales of 8-bit keys and of 8-bit values, each float32 [num_blocks, num_kv_heads, block_size]; None: not 8
    bits."""
    is_tiled: bool = False
    """Each head of a block lies in the order in which the kernels multiply it; nothing else can read it."""


PLAIN = CacheLayout()


def can_tile(block_size: int, head_dim: int, dtype: torch.dtype) -> bool:
    return dtype in _TILED_CODES and block_size % TILE == 0 and head_dim % _LANES == 0


def cache_code(cache: Tensor, layout: CacheLayout) -> int:
    """`DType` of vectors.hpp."""
    assert (layout.scales is not None) == (cache.dtype == torch.int8)
    if not layout.is_tiled:
        return _CODES[cache.dtype]
    assert can_tile(cache.shape[2], cache.shape[3], cache.dtype)
    return _TILED_CODES[cache.dtype]
