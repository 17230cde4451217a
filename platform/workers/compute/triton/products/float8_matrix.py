"""The matrix of 8-bit floats that a model's layers hold on a GPU: products by `torch._scaled_mm`, with activations
rounded to 8 bits row by row.

Where a GPU's torch has no such product, or the matrix's sizes are no multiples of 16, there is none of these: the
weights are dequantized when they are loaded (`can_multiply`).
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.workers.compute.quant.float8 import Float8Tensor

MULTIPLE = 16
"""Outputs and columns are multiples of it (`torch._scaled_mm`)."""
CAPABILITY = (8, 9)
"""Compute capability from which on tensor cores multiply 8-bit floats."""

Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`multiply_scaled`, or what stands for it."""

_log = logging.getLogger("penstock.kernels")


def multiply_scaled(x: Tensor, x_scale: Tensor, q: Tensor, q_scale: Tensor) -> Tensor:
    """(x * x_scale) times the transpose of (q * q_scale), in bfloat16, sums in float32. x, q: float8_e4m3fn [T, K] and
    [N, K]; x_scale, q_scale: float32 [T, 1] and [1, N]."""
    return torch._scaled_mm(x, q.t(), scale_a=x_scale, scale_b=q_scale, out_dtype=torch.bfloat16)


class Float8Matrix:
    """An [N, K] matrix on a device, for products with activations in bfloat16."""

    def __init__(self, weight: Float8Tensor, device: torch.device, product: Product = multiply_scaled) -> None:
        """weight: on any device; `has_sizes` holds for it, and `can_multiply` for the device."""
        self.shape = weight.q.shape
        self.dtype = torch.bfloat16
        self.device = device
        self._product = product
        self._q = weight.q.view(torch.uint8).to(device).contiguous().view(torch.float8_e4m3fn)
        self._scale = weight.scale.to(device)[None, :].contiguous()

    @property
    def nbytes(self) -> int:
        return self._q.nbytes + self._scale.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """x [T, K] times the transpose: [T, N] in bfloat16."""
        from penstock.workers.compute.triton.products.scale_rows import scale_rows  # noqa: PLC0415 (Triton may be absent)

        if not len(x):
            return x.new_empty(0, self.shape[0])
        return self._product(*scale_rows(x), self._q, self._scale)


def has_sizes(shape: torch.Size) -> bool:
    return not (shape[0] % MULTIPLE or shape[1] % MULTIPLE)


def can_multiply(device: torch.device) -> bool:
    """Whether products with a scale for each row work on the device: tried, because which cards torch has them for
    changes with its version."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    ones = torch.ones(MULTIPLE, MULTIPLE, device=device).to(torch.float8_e4m3fn)
    units = torch.full((MULTIPLE, 1), 0.5, device=device)
    try:
        product = multiply_scaled(ones, units, ones, units.t().contiguous())
    except (RuntimeError, NotImplementedError, ValueError) as error:
        _log.info("torch multiplies no 8-bit floats here, so they are dequantized: %s", error)
        return False
    return bool((product == MULTIPLE / 4).all())
