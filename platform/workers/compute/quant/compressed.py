"""compressed-tensors' `pack-quantized` layout, of llm-compressor's W4A16 and W8A16 checkpoints: integers of 4 or 8
bits, packed along the input.

Of a linear layer with K inputs and N outputs a checkpoint keeps `weight_packed` int32 [N, ceil(K * bits / 32)], the
lowest bits of an int32 first; `weight_scale` [N, G]; `weight_shape` [2], which is N and K; and, where groups are
asymmetric, `weight_zero_point` int32 [ceil(N * bits / 32), G], packed along the output. Every integer is kept plus 2 **
(bits - 1), so that none is negative.
"""

import torch
from torch import Tensor

from penstock.workers.compute.quant.quantized import QuantizedTensor


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """int32 [rows, ceil(columns * bits / 32)] to uint8 [rows, columns], as kept: 0 to 2 ** bits - 1."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    values = (packed[..., None] >> shifts).bitwise_and(2**bits - 1).to(torch.uint8)
    return values.view(len(packed), -1)[:, :columns]


def copy_groups(packed: Tensor, scale: Tensor, zero: Tensor | None, out: QuantizedTensor) -> None:
    """Copy a layer's tensors, as stored, into rows of the normal form. zero: packed zero points of 4 bits, or None if
    the quantization is symmetric."""
    rows, columns = out.q.shape
    values = unpack(packed, out.bits, columns)
    out.scale.copy_(scale)
    if out.offset is None:
        out.q.copy_(values.to(torch.int16) - 128)
        return
    out.q.copy_(values)
    zeros = torch.full_like(out.scale, 8) if zero is None else unpack(zero.t().contiguous(), out.bits, rows).t()
    out.offset.copy_(zeros).mul_(out.scale).neg_()
