"""The matrices that a model's layers hold on a GPU instead of dense ones: each has a shape, a dtype, a size and
`multiply`."""

from penstock.workers.compute.triton.float8_matrix import Float8Matrix
from penstock.workers.compute.triton.grouped_matrix import GroupedMatrix
from penstock.workers.compute.triton.int4_matrix import OperatorMatrix

GpuMatrix = GroupedMatrix | OperatorMatrix | Float8Matrix
"""[N, K], quantized, on a GPU."""
