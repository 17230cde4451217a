"""Matrices in the kernels' own packed form: what a whole model on the CPU holds, once, for its fused steps and for
torch's."""

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.workers.compute.footprint import release_unused
from penstock.workers.compute.kernels.matmul import MatmulKernels, PackedMatrix, Rounding, is_group
from penstock.workers.compute.quant.quantized import QuantizedTensor

TRIMMED_BYTES = 16 << 20
"""Bytes of packed matrices after which memory that reading them left is given back, before it piles up."""


class Packed:
    """A packed [N, K] matrix as torch's layers see it, for activations of one dtype."""

    def __init__(
        self,
        matrix: PackedMatrix,
        matmul: MatmulKernels,
        dtype: torch.dtype,
        threads: int,
        rounding: Rounding = Rounding.TWO_TERMS,
    ) -> None:
        self.matrix = matrix
        self.shape = matrix.shape
        self.dtype = dtype
        self._matmul = matmul
        self._threads = threads
        self._rounding = rounding

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """x [T, K] times the transpose: [T, N] in x's dtype."""
        return self._matmul.multiply(x, self.matrix, self._rounding, self._threads).to(x.dtype)

    def dense_rows(self, start: int, end: int) -> Tensor:
        """Rows, dequantized: float32 [end - start, K]."""
        return self._matmul.read_rows(self.matrix, torch.arange(start, end))

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix, [R, K]. ids: their numbers, int64 [R]."""
        return self._matmul.read_rows(self.matrix, ids).to(self.dtype)


def pack_all(
    weights: Iterable[tuple[str, Tensor | QuantizedTensor]],
    matmul: MatmulKernels,
    dtype: torch.dtype,
    threads: int,
    rounding: Rounding = Rounding.TWO_TERMS,
) -> dict[str, Tensor | Packed]:
    """Packs each matrix as it comes; vectors stay. rounding: what torch's layers multiply with. Raises
    UnsupportedMatrix, having read no further."""
    packed: dict[str, Tensor | Packed] = {}
    fresh_bytes = 0
    for name, weight in weights:
        if isinstance(weight, Tensor) and weight.dim() == 1:
            packed[name] = weight
            continue
        matrix = pack_matrix(name, weight, matmul)
        packed[name] = Packed(matrix, matmul, dtype, threads, rounding)
        fresh_bytes += matrix.nbytes
        if fresh_bytes > TRIMMED_BYTES:
            fresh_bytes = 0
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
