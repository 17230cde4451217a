"""Matrices of float8 e4m3 (Micikevicius et al. 2022, arXiv 2209.05433) with a scale for each row: w[n, k] = q[n, k] *
scale[n]. compressed-tensors' `float-quantized` layout, of llm-compressor's FP8 and FP8_DYNAMIC checkpoints.

Of a linear layer with K inputs and N outputs such a checkpoint keeps `weight` float8_e4m3fn [N, K] and `weight_scale`,
[N, 1] for a scale a row (channel) or [1], or no dimension, for one of the whole matrix (tensor).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.workers.compute.quant.quantized import CHUNK_ELEMENTS

LARGEST = 448.0
"""Largest number of the format."""


@dataclass(frozen=True, slots=True)
class Float8Tensor:
    """A matrix as it is kept. Views of its rows are not copies."""

    q: Tensor
    """float8_e4m3fn [N, K]."""
    scale: Tensor
    """float32 [N]."""

    @staticmethod
    def empty(rows: int, columns: int, device: torch.device | None = None) -> "Float8Tensor":
        """A matrix of zeros."""
        q = torch.zeros(rows, columns, dtype=torch.uint8, device=device)
        return Float8Tensor(q.view(torch.float8_e4m3fn), torch.zeros(rows, device=device))

    def rows(self, start: int, end: int) -> "Float8Tensor":
        """Rows [start, end), as a view."""
        return Float8Tensor(self.q[start:end], self.scale[start:end])

    def copy_(self, weight: Tensor, scale: Tensor) -> None:
        """Copy a layer's tensors, as stored, into this one."""
        self.q.view(torch.uint8).copy_(weight.view(torch.uint8))
        self.scale.copy_(scale.flatten().expand(len(self.scale)) if scale.numel() == 1 else scale.flatten())

    def dequantize_in(self, dtype: torch.dtype) -> Tensor:
        """[N, K], some rows at a time, rounded once."""
        rows, columns = self.q.shape
        out = torch.empty(rows, columns, dtype=dtype, device=self.q.device)
        step = max(1, CHUNK_ELEMENTS // columns)
        for start in range(0, rows, step):
            part = self.rows(start, start + step)
            out[start : start + step] = part.q.float() * part.scale[:, None]
        return out
