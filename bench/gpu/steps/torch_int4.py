"""The model's quantized matrices one by one, ours beside torch's int4 operator (`torch._weight_int4pack_mm`, from
torchao's tinygemm), for 1 to 256 rows of activations.

As shares of the copy bandwidth by the bytes of the packed matrix. A CUDA graph holds the launches, and several copies
of a matrix go round, so that neither launching nor the GPU's cache is measured.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.gpu.rows import Rows
from bench.gpu.steps.shapes import Bench, bench_for, copy_rate, median_s, random_groups
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from penstock.workers.compute.triton.products.int4_matrix import OperatorMatrix

ROWS = (1, 16, 64, 128, 256)
ROTATED_BYTES = 2**28
"""Bytes of all copies of a matrix together, at least: more than the GPU's cache."""
TOLERANCE = 0.03
"""Largest difference relative to the largest number: torch's operator keeps scales in bfloat16."""


def shapes(bench: Bench) -> list[tuple[str, int, int]]:
    """Name, outputs and inputs of a layer's matrices."""
    config = bench.config
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return [
        ("qkv", heads, config.hidden_size),
        ("o", config.hidden_size, config.num_heads * config.head_dim),
        ("gate_up", 2 * config.intermediate_size, config.hidden_size),
        ("down", config.hidden_size, config.intermediate_size),
    ]


def seconds_of(calls: Sequence[Callable[[], object]], bench: Bench) -> float:
    """Seconds of one call, where all of them run one after another."""

    def all_of_them() -> None:
        for call in calls:
            call()

    if bench.device.type == "cpu":
        return median_s(all_of_them, bench.repeats, bench.device) / len(calls)
    all_of_them()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    return median_s(graph.replay, bench.repeats, bench.device) / len(calls)


def run(rows: Rows, *, is_check: bool) -> bool:
    """A row for each matrix and number of rows. False where the two differ."""
    bench = bench_for(is_check=is_check)
    is_good = True
    with torch.inference_mode():
        rate = copy_rate(bench)
        for name, outputs, inputs in shapes(bench):
            groups = random_groups(bench, outputs, inputs, is_table=False)
            count = 1 if is_check else max(2, -(-ROTATED_BYTES // (outputs * inputs // 2)))
            ours = [GroupedMatrix(groups, torch.bfloat16, bench.device) for _ in range(count)]
            theirs = [OperatorMatrix(groups) for _ in range(count)]
            for num_rows in ROWS[: 1 if is_check else None]:
                x = torch.randn(num_rows, inputs, device=bench.device, dtype=torch.bfloat16)
                is_good &= _compare(rows, name, ours[0].multiply(x), theirs[0].multiply(x))
                own_s, their_s = (
                    seconds_of([partial(call, x) for call in calls], bench)
                    for calls in ([matrix.multiply for matrix in ours], [matrix.multiply for matrix in theirs])
                )
                label = f"int4 {name} [{outputs}, {inputs}], {num_rows} rows: share of copy bandwidth"
                rows.add(label, 100 * ours[0].nbytes / own_s / rate, 100 * ours[0].nbytes / their_s / rate, "%")
    return is_good


def _compare(rows: Rows, name: str, ours: Tensor, theirs: Tensor) -> bool:
    difference = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    if not difference <= TOLERANCE:
        rows.add(f"int4 {name}", note=f"ours and torch's differ by {difference:.3f} of the largest")
    return difference <= TOLERANCE
