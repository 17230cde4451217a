"""The matrices that a model's layers hold on a GPU instead of dense ones: each has a shape, a dtype, a size and
`multiply`."""

from penstock.workers.compute.triton.products.float8_matrix import Float8Matrix
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from penstock.workers.compute.triton.products.int4_matrix import OperatorMatrix

GpuMatrix = GroupedMatrix | OperatorMatrix | Float8Matrix
"""[N, K], quantized, on a GPU."""
