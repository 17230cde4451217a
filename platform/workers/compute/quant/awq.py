"""AutoAWQ's GEMM layout (quant_method `awq`, version `gemm`): 4-bit columns packed eight to an int32, zero points
likewise.

Of a linear layer with K inputs and N outputs a checkpoint keeps `qweight` int32 [K, N / 8], `qzeros` int32 [K / g, N /
8] and `scales` float16 [K / g, N]; nibble i of an int32, from the lowest, holds column ORDER[i] of its eight. Where g
does not divide K the last group is short: that goes beyond AutoAWQ, whose own kernels then refuse the checkpoint.
"""

import torch
from torch import Tensor

from penstock.workers.compute.quant.quantized import QuantizedTensor

BITS = 4
PER_INT = 32 // BITS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(packed: Tensor) -> Tensor:
    """int32 [rows, N / 8] to uint8 [rows, N]."""
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=packed.device)
    nibbles = (packed[..., None] >> shifts).bitwise_and(15).to(torch.uint8)
    columns = torch.empty_like(nibbles)
    columns[..., list(ORDER)] = nibbles
    return columns.view(packed.shape[0], -1)


def pack(columns: Tensor) -> Tensor:
    """uint8 [rows, N], 0 to 15, N a multiple of 8, to int32 [rows, N / 8]."""
    ordered = columns.view(columns.shape[0], -1, PER_INT)[..., list(ORDER)].to(torch.int64)
    shifts = torch.arange(0, 32, BITS, dtype=torch.int64)
    words = (ordered << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def copy_groups(qweight: Tensor, qzeros: Tensor, scales: Tensor, out: QuantizedTensor) -> None:
    """Copy a layer's tensors, as stored, into rows of the normal form."""
    assert out.offset is not None
    out.q.copy_(unpack(qweight).t())
    out.scale.copy_(scales.t())
    out.offset.copy_(unpack(qzeros).t()).mul_(out.scale).neg_()


def tensors_of(quantized: QuantizedTensor) -> dict[str, Tensor]:
    """What a checkpoint keeps of a layer; its zero points must be integers, 0 to 15."""
    return {
        "qweight": pack(quantized.q.t().contiguous()),
        "qzeros": pack(quantized.zero.round().to(torch.uint8).t().contiguous()),
        "scales": quantized.scale.t().contiguous().half(),
    }
