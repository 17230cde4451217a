"""A matrix of 4 bits as torch's int4 operator takes it (`torch._weight_int4pack_mm`, from tinygemm): (q - 8) * scale
+ zero, scales and zeros in bfloat16, activations too.

An alternative to `grouped_matrix`, where it was measured to be quicker. It loses what bfloat16 does not hold of scales
of float16: 1/256 of a weight at most.
"""

import torch
from torch import Tensor

from penstock.workers.compute.quant.quantized import QuantizedTensor

GROUP_SIZES = (32, 64, 128, 256)
INNER_TILES = 8
"""Tiles of 16 columns that the operator keeps together."""
_COLUMN_MULTIPLE = 16 * INNER_TILES
_OUTPUT_MULTIPLE = 64
"""Outputs that a matrix of the operator on the CPU, which tests take, has a multiple of; on a GPU it is 8."""
OPERATOR_CAPABILITY = (8, 0)


class OperatorMatrix:
    """A quantized [N, K] matrix on a device, for products with activations in bfloat16."""

    def __init__(self, quantized: QuantizedTensor) -> None:
        """quantized: on the device; `is_operable` holds for it."""
        assert quantized.offset is not None
        self.shape = quantized.q.shape
        self.dtype = torch.bfloat16
        self.device = quantized.q.device
        self._group_size = quantized.group_size
        zeros = quantized.offset + 8 * quantized.scale
        pairs = torch.stack((quantized.scale, zeros), dim=-1)
        self._pairs = pairs.transpose(0, 1).contiguous().to(torch.bfloat16)
        if self.device.type == "cpu":
            self._packed: Tensor = torch._convert_weight_to_int4pack_for_cpu(quantized.q.int(), 1)
        else:
            nibbles = quantized.q[:, ::2] << 4 | quantized.q[:, 1::2]
            self._packed = torch._convert_weight_to_int4pack(nibbles, INNER_TILES)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + self._pairs.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """x [T, K] times the transpose: [T, N]."""
        if not len(x):
            return x.new_empty(0, self.shape[0])
        operator = torch._weight_int4pack_mm_for_cpu if self.device.type == "cpu" else torch._weight_int4pack_mm
        return operator(x.contiguous(), self._packed, self._group_size, self._pairs)


def is_operable(shape: torch.Size, bits: int, group_size: int, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether the operator takes a matrix of this shape, for activations of this type."""
    outputs, columns = shape
    is_whole = not (outputs % _OUTPUT_MULTIPLE or columns % _COLUMN_MULTIPLE or columns % group_size)
    return (
        bits == 4
        and dtype == torch.bfloat16
        and group_size in GROUP_SIZES
        and is_whole
        and capability >= OPERATOR_CAPABILITY
    )
