"""GGUF's simple block formats: rows of blocks of 32 weights, each a scale in float16 (and an offset) before its
integers (ggml-common.h, ggml-quants.c).

| type | bytes | block | weight |
|---|---|---|---|
| Q4_0 | 18 | d, 16 bytes of nibbles | (q - 8) * d |
| Q4_1 | 20 | d, m, 16 bytes of nibbles | q * d + m |
| Q8_0 | 34 | d, 32 bytes, signed | q * d |

The low nibbles of a block are its first 16 weights, the high ones its last 16.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.workers.compute.quant.quantized import QuantizedTensor

BLOCK = 32


def unpack_q4_0(blocks: Tensor, out: QuantizedTensor) -> None:
    """Copy Q4_0 blocks into rows of the normal form. blocks: uint8 [N, G, 18]."""
    assert out.offset is not None
    out.scale.copy_(_halves(blocks, 0))
    torch.mul(out.scale, -8, out=out.offset)
    out.q.copy_(_nibbles(blocks[..., 2:]))


def unpack_q4_1(blocks: Tensor, out: QuantizedTensor) -> None:
    """Copy Q4_1 blocks into rows of the normal form. blocks: uint8 [N, G, 20]."""
    assert out.offset is not None
    out.scale.copy_(_halves(blocks, 0))
    out.offset.copy_(_halves(blocks, 2))
    out.q.copy_(_nibbles(blocks[..., 4:]))


def unpack_q8_0(blocks: Tensor, out: QuantizedTensor) -> None:
    """Copy Q8_0 blocks into rows of the normal form. blocks: uint8 [N, G, 34]."""
    out.scale.copy_(_halves(blocks, 0))
    out.q.copy_(blocks[..., 2:].contiguous().view(torch.int8).flatten(1))


UNPACK: dict[str, tuple[int, Callable[[Tensor, QuantizedTensor], None]]] = {
    "Q4_0": (4, unpack_q4_0),
    "Q4_1": (4, unpack_q4_1),
    "Q8_0": (8, unpack_q8_0),
}
"""Bits of each type, and how its blocks become rows of the normal form."""


def _halves(blocks: Tensor, start: int) -> Tensor:
    """float16 [N, G], the numbers that begin at byte `start` of each block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack 4-bit numbers: uint8 [N, G, 16] to [N, 32 * G], the low halves of a block before its high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).flatten(1)
