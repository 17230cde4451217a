"""Dense layers, fast or exact.

Exact means: a row's result is bit-identical whatever other rows are in the batch and however many there are. Matrix
libraries choose kernels, blockings and summation orders by shape, so the exact path always runs the same shape, tiles
of TILE_ROWS rows of which the last is padded with zeros. It relies on the library giving every row of that shape the
same summation order; the tests hold it to that.
"""

from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.quant.packed import Packed
from penstock.workers.compute.quant.quantized import Matrix, TorchQuantizedMatrix
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from penstock.workers.compute.triton.products.matrices import GpuMatrix

TILE_ROWS = 16


def linear(x: Tensor, weight: Matrix | GpuMatrix, bias: Tensor | None, exact: bool) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's dtype."""
    if not exact:
        return _product(x, weight, bias)
    num_rows = x.shape[0]
    out = x.new_empty(num_rows, weight.shape[0])
    for start in range(0, num_rows, TILE_ROWS):
        tile = _pad_tile(x[start : start + TILE_ROWS])
        out[start : start + TILE_ROWS] = _product(tile, weight, bias)[: num_rows - start]
    return out


def dense_rows(weight: Matrix | Packed | GpuMatrix, start: int, end: int) -> Tensor:
    """Rows of a matrix on the CPU as they are multiplied with: float32 [end - start, K]."""
    if isinstance(weight, Tensor):
        return weight[start:end].float()
    assert isinstance(weight, Packed | TorchQuantizedMatrix)
    return weight.dense_rows(start, end)


def _product(x: Tensor, weight: Matrix | GpuMatrix, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):
        return functional.linear(x, weight, bias)
    out = weight.multiply(x)
    return out if bias is None else out.add_(bias)


def _pad_tile(rows: Tensor) -> Tensor:
    """A fresh (hence aligned and contiguous) [TILE_ROWS, K] tensor that starts with `rows`."""
    tile = rows.new_zeros(TILE_ROWS, rows.shape[1])
    tile[: rows.shape[0]] = rows
    return tile


def linear_in_parts(x: Tensor, weight: Matrix | GpuMatrix, bias: Tensor | None) -> Tensor:
    """`linear`, not exact; or, where a kernel has cut the columns into parts, their products: float32 [P, T, N], whose
    sum in order it is."""
    if isinstance(weight, GroupedMatrix) and bias is None:
        return weight.multiply_in_parts(x)
    return _product(x, weight, bias)
