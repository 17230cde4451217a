"""Two ceilings of the machine, measured: what copying in the GPU's memory moves, and what a large product in bfloat16
computes."""

import torch

from bench.gpu.rows import Rows
from bench.gpu.steps.shapes import Bench, bench_for, copy_rate, median_s

SIDE = 8192
"""Rows and columns of the matrices that are multiplied."""


def peak_flops(bench: Bench) -> float:
    """Floating-point operations a second of a large product, whose operands are random: on zeros GPUs are faster."""
    side = SIDE if bench.device.type == "cuda" else 64
    a, b = (torch.randn(side, side, dtype=bench.dtype, device=bench.device) for _ in range(2))
    return 2 * side**3 / median_s(lambda: a @ b, bench.repeats, bench.device)


def run(rows: Rows, *, is_check: bool) -> bool:
    """One row for each ceiling."""
    bench = bench_for(is_check=is_check)
    rows.add("copying in the GPU's memory, read and written", copy_rate(bench) / 1e9, None, "GB/s")
    rows.add(f"a product of two matrices of {SIDE} x {SIDE}", peak_flops(bench) / 1e12, None, "TFLOP/s")
    return True
