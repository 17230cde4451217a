"""The matrix of small integers that a model's layers hold on a GPU: a `GroupedTensor`, and what layers ask of it.

Up to `tiling.TILED_ROWS` rows of activations are multiplied with the packed integers; for more the matrix is
dequantized, a slice at a time, and torch multiplies. Where kernels were measured, `use` says which take which rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.triton.products.grouped import TILE_ROWS, lay_out_groups
from penstock.workers.compute.triton.products.kernel_choice import MANY_ROWS, Kernel
from penstock.workers.compute.triton.products.tiling import INTERPRETED, Tile, bucket_of, tiles_of

SLICE_ELEMENTS = 1 << 26
"""Elements of a dequantized slice: 128 MiB in bfloat16."""


def capability_of(device: torch.device) -> tuple[int, int]:
    """The device's compute capability; of the CPU, that whose tables Triton's interpreter takes."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETED


class GroupedMatrix:
    """A quantized [N, K] matrix on a device, for products with activations of one dtype."""

    def __init__(self, quantized: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> None:
        """quantized: on any device; `grouped.is_covered` holds for it."""
        self.tensor = lay_out_groups(quantized, dtype, device)
        self.shape = self.tensor.shape
        self.dtype = dtype
        self.device = device
        self._capability = capability_of(device)
        self._kernels: Mapping[int, Kernel] = {}

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def tiles(self, bucket: int) -> tuple[Tile, ...]:
        """Tiles of the packed matrix for a bucket of rows, the one that is taken unmeasured first."""
        return tiles_of(self._capability, self.dtype.itemsize, bucket)

    def use(self, kernels: Mapping[int, Kernel]) -> None:
        """Kernels of buckets of rows, as `kernel_choice.choose` chose them; the tables' where there is none."""
        self._kernels = kernels

    def multiply(self, x: Tensor) -> Tensor:
        """x [T, K] times the transpose: [T, N] in x's dtype."""
        return self.multiply_by(self._kernel(len(x)), x)

    def multiply_in_parts(self, x: Tensor) -> Tensor:
        """The product, or float32 [P, T, N] that make it up when they are added in order."""
        return self.multiply_by(self._kernel(len(x)), x, keeps_parts=True)

    def _kernel(self, rows: int) -> Kernel:
        bucket = bucket_of(rows)
        kernel = self._kernels.get(bucket or MANY_ROWS)
        if kernel is not None:
            return kernel
        return "dense" if bucket is None else self.tiles(bucket)[0]

    def multiply_by(self, kernel: Kernel, x: Tensor, *, keeps_parts: bool = False) -> Tensor:
        """`multiply`, or `multiply_in_parts`, by a kernel that takes that many rows."""
        from penstock.workers.compute.triton.products.matmul import multiply  # noqa: PLC0415 (Triton may be absent)

        if isinstance(kernel, Tile):
            return multiply(x, self.tensor, kernel, keeps_parts=keeps_parts)
        assert kernel == "dense"
        return self._multiply_dense(x)

    def _multiply_dense(self, x: Tensor) -> Tensor:
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
        from penstock.workers.compute.triton.products.matmul import dequantize  # noqa: PLC0415 (Triton may be absent)

        return dequantize(self.tensor, start, end)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows by number, int64 [R]: [R, K]."""
        from penstock.workers.compute.triton.products.matmul import read_rows  # noqa: PLC0415 (Triton may be absent)

        return read_rows(self.tensor, ids)
