"""Activations rounded to float8 e4m3, each row in units of its own: what a product of 8-bit floats takes.

The unit is a row's largest number divided by 448, the format's largest, as compressed-tensors' dynamic per-token
quantization has it; rounding is `store`'s, to nearest by the bits, so that every GPU rounds alike.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.attention.store import LARGEST, encoded

LANES = 1024
NUM_WARPS = 4


@triton.jit
def _scale_row(x, out, scales, x_stride, columns, largest: tl.constexpr, lanes: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * columns
    sizes = tl.zeros((lanes,), tl.float32)
    for start in range(0, columns, lanes):
        places = start + tl.arange(0, lanes)
        sizes = tl.maximum(sizes, tl.abs(tl.load(x + places, mask=places < columns, other=0.0).to(tl.float32)))
    unit = tl.max(sizes, 0) * (1.0 / largest)
    tl.store(scales + row, unit)
    divisor = tl.where(unit > 0, unit, 1.0)
    for start in range(0, columns, lanes):
        places = start + tl.arange(0, lanes)
        values = tl.load(x + places, mask=places < columns, other=0.0).to(tl.float32)
        tl.store(out + places, encoded(tl.div_rn(values, divisor)), mask=places < columns)


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] as float8_e4m3fn [T, K] and units float32 [T, 1]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    if len(x):
        _scale_row[(len(x),)](
            x, out, scales, x.stride(0), x.shape[1], largest=LARGEST, lanes=LANES, num_warps=NUM_WARPS
        )
    return out.view(torch.float8_e4m3fn), scales
