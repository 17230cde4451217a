"""The matrix of small integers that a model's layers hold on a GPU: a `GroupedTensor`, and what layers ask of it.

Few rows of activations are multiplied with the packed integers; for many of them the matrix is dequantized, a slice at
a time, and torch multiplies.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.triton.grouped import TILE_ROWS, lay_out_groups

SMALL_ROWS = 64
"""Rows of activations that are multiplied with the packed matrix, at most."""
SLICE_ELEMENTS = 1 << 26
"""Elements of a dequantized slice: 128 MiB in bfloat16."""


class GroupedMatrix:
    """A quantized [N, K] matrix on a device, for products with activations of one dtype."""

    def __init__(self, quantized: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> None:
        """quantized: on any device; `grouped.is_covered` holds for it."""
        self.tensor = lay_out_groups(quantized, dtype, device)
        self.shape = self.tensor.shape
        self.dtype = dtype
        self.device = device

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """x [T, K] times the transpose: [T, N] in x's dtype."""
        from penstock.workers.compute.triton.matmul import multiply  # noqa: PLC0415 (Triton may be absent)

        if x.shape[0] <= SMALL_ROWS:
            return multiply(x, self.tensor)
        step = max(1, SLICE_ELEMENTS // (TILE_ROWS * self.shape[1])) * TILE_ROWS
        if step >= self.shape[0]:
            return functional.linear(x, self.dense(0, self.shape[0]))
        out = x.new_empty(x.shape[0], self.shape[0])
        for start in range(0, self.shape[0], step):
            end = min(start + step, self.shape[0])
            out[:, start:end] = functional.linear(x, self.dense(start, end))
        return out

    def dense(self, start: int, end: int) -> Tensor:
        """Rows [start, end), of which the first begins a tile: [end - start, K] in the matrix's dtype."""
        from penstock.workers.compute.triton.matmul import dequantize  # noqa: PLC0415 (Triton may be absent)

        return dequantize(self.tensor, start, end)

    def multiply_in_parts(self, x: Tensor) -> Tensor:
        """The product, or float32 [P, T, N] that make it up when they are added in order."""
        from penstock.workers.compute.triton.matmul import multiply  # noqa: PLC0415 (Triton may be absent)

        if x.shape[0] <= SMALL_ROWS:
            return multiply(x, self.tensor, keeps_parts=True)
        return self.multiply(x)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows by number, int64 [R]: [R, K]."""
        from penstock.workers.compute.triton.matmul import read_rows  # noqa: PLC0415 (Triton may be absent)

        return read_rows(self.tensor, ids)
