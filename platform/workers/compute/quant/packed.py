"""Matrices in the kernels' own packed form: what a whole model on the CPU holds for its fused steps."""

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.base.unused_pages import release_unused
from penstock.workers.compute.kernels.matmul import MatmulKernels, PackedMatrix, is_group
from penstock.workers.compute.quant.quantized import QuantizedTensor

TRIMMED_BYTES = 16 << 20
"""Bytes of packed matrices after which memory that reading them left is given back, before it piles up."""


class Packed:
    """A packed [N, K] matrix, which is multiplied in the kernels alone. dtype: that of the model."""

    def __init__(self, matrix: PackedMatrix, matmul: MatmulKernels, dtype: torch.dtype) -> None:
        self.matrix = matrix
        self.shape = matrix.shape
        self.dtype = dtype
        self._matmul = matmul

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def dense_rows(self, start: int, end: int) -> Tensor:
        """Rows, dequantized: float32 [end - start, K]."""
        return self._matmul.read_rows(self.matrix, torch.arange(start, end))


def pack_all(
    weights: Iterable[tuple[str, Tensor | QuantizedTensor]],
    matmul: MatmulKernels,
    dtype: torch.dtype,
) -> dict[str, Tensor | Packed]:
    """Packs each matrix as it comes; vectors stay. Raises UnsupportedMatrix, having read no further."""
    packed: dict[str, Tensor | Packed] = {}
    fresh_bytes = 0
    for name, weight in weights:
        if isinstance(weight, Tensor) and weight.dim() == 1:
            packed[name] = weight
            continue
        matrix = pack_matrix(name, weight, matmul)
        packed[name] = Packed(matrix, matmul, dtype)
        fresh_bytes += matrix.nbytes
        if fresh_bytes > TRIMMED_BYTES:
            fresh_bytes = 0
            release_unused()
    release_unused()
    return packed


class UnsupportedMatrix(Exception):
    """The kernels have no packed form for a matrix."""


def pack_matrix(name: str, weight: Tensor | QuantizedTensor, matmul: MatmulKernels) -> PackedMatrix:
    """Pack one matrix. Raises UnsupportedMatrix."""
    if isinstance(weight, Tensor):
        if weight.dtype != torch.bfloat16:
            raise UnsupportedMatrix(f"{name} is dense in {weight.dtype}")
        return matmul.pack_bf16(weight)
    if not is_group(weight.group_size, weight.q.shape[1]):
        raise UnsupportedMatrix(f"{name} is quantized in groups of {weight.group_size}")
    if weight.offset is None:
        return matmul.pack_int8(weight.q, weight.scale, weight.group_size)
    return matmul.pack_int4(weight.q, weight.scale, weight.offset, weight.group_size)
