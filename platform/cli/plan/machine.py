"""Rates of this machine, by a short probe: bandwidth by reading memory, FLOP/s by products and attention of the model's
own sizes in the engine's kernels.

Not a benchmark of the engine, whose steps are not run: what it finds goes into the roofline. Products of each number of
rows are measured over copies that no cache holds, so that their rate at few rows is that of memory too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.base.cores import available_cores
from penstock.base.errors import ConfigError
from penstock.cli.plan.make import Machine
from penstock.perf.planning.formats import TABLE_GROUP, Head, WeightFormat, table_bits
from penstock.perf.planning.roofline import Rates, Speed
from penstock.perf.planning.shape import ModelShape
from penstock.workers.compute.footprint import usable_here
from penstock.workers.compute.kernels.build import load_kernels
from penstock.workers.compute.kernels.cache_layout import can_tile
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import OUTLIER_ROWS, MatmulKernels, PackedMatrix, Rounding
from penstock.workers.compute.model_config import ModelConfig, from_hf
from penstock.workers.compute.models.llama import KvCache

Clock = Callable[[], float]
ROWS = (1, 4, 8, 32, 128, 512)
"""Rows whose products are measured."""
CACHED_BYTES = 96 << 20
"""Copies of a layer's matrices take so much together, more than caches do."""
READ_BYTES = 256 << 20
REPEATS = 3
"""Times that each is measured; the quickest counts."""
CONTEXT = 1024
BLOCK = 16


def measure_machine(
    shape: ModelShape,
    forms: Sequence[WeightFormat],
    head: Head = "auto",
    threads: int | None = None,
    clock: Clock = time.perf_counter,
) -> Machine:
    """Measure this machine for products of a model's sizes. clock: wall time, or CPU time where others compute beside
    one thread. Raises ConfigError where there are no kernels, or a layer is more than the machine holds."""
    refuse_oversized(shape, usable_here())
    kernels = load_kernels()
    if kernels is None:
        raise ConfigError("this machine has no kernels to measure: the log of penstock up says why")
    threads = threads or available_cores()
    bandwidth = read_bandwidth(threads, clock)
    attention = measure_attention(kernels, shape, threads, clock)
    rates: dict[str, Rates] = {}
    for form in forms:
        products = Speed(ROWS, tuple(measure_mixture(kernels.matmul, shape, form, threads, clock)))
        bits = table_bits(form, head)
        table = Speed(ROWS[:-2], tuple(measure_table(kernels.matmul, shape, bits, threads, clock)))
        rates[form.name] = Rates(bandwidth, products, table if shape.vocab_size else products, *attention)
    fastest = max(rate.products.flops[-1] for rate in rates.values())
    note = f"{threads} threads read {bandwidth / 1e9:.1f} GB/s and multiply {fastest / 1e9:.0f} GFLOP/s"
    return Machine(usable_here(), threads, rates, note)


def refuse_oversized(shape: ModelShape, memory_bytes: int) -> None:
    """Raises ConfigError where the numbers of a layer, or of the head, can't be made up to be measured: in float32, and
    as often again while they are packed."""
    layer = sum(outputs * inputs for outputs, inputs in shape.matrices)
    wanted = 8 * max(layer, shape.head_params) + KvLayers.layer_bytes(shape)
    if wanted > memory_bytes:
        raise ConfigError(
            f"a layer of {shape.name} takes {wanted / 1e9:.3g} GB to be measured, and this machine has "
            f"{memory_bytes / 1e9:.3g} GB"
        )


def read_bandwidth(threads: int, clock: Clock) -> float:
    """Bytes a second that `threads` threads read together."""
    parts = [np.ones(READ_BYTES // 8 // threads, np.int64) for _ in range(threads)]
    if threads == 1:
        return parts[0].nbytes / _quickest(lambda: parts[0].max(), clock)
    with ThreadPoolExecutor(threads) as pool:
        return sum(part.nbytes for part in parts) / _quickest(lambda: list(pool.map(np.max, parts)), clock)


def _quickest(run: Callable[[], object], clock: Clock) -> float:
    run()
    found = []
    for _ in range(REPEATS):
        begun_s = clock()
        run()
        found.append(clock() - begun_s)
    return max(min(found), 1e-9)


def measure_mixture(
    matmul: MatmulKernels, shape: ModelShape, form: WeightFormat, threads: int, clock: Clock
) -> list[float]:
    """FLOP/s of a layer's matrices, where they may be in several formats: by the times that their shares take."""
    parts = form.parts or ((form, 1.0),)
    found = [(share, list(measure_products(matmul, shape, part, threads, clock))) for part, share in parts]
    return [1 / sum(share / flops[index] for share, flops in found) for index in range(len(ROWS))]


def measure_products(
    matmul: MatmulKernels, shape: ModelShape, form: WeightFormat, threads: int, clock: Clock
) -> Iterator[float]:
    """FLOP/s of a layer's matrices, stacked as the engine stacks them, for each of ROWS."""
    sizes = _stacked(shape)
    layer = [_random_matrix(matmul, *size, form.bits, form.group or size[1]) for size in sizes]
    layer_bytes = sum(matrix.nbytes for matrix in layer)
    copies = [layer]
    for _ in range(min(shape.num_layers, -(-CACHED_BYTES // layer_bytes)) - 1):
        copies.append([_random_matrix(matmul, *size, form.bits, form.group or size[1]) for size in sizes])
    flops = 2 * sum(outputs * inputs for outputs, inputs in sizes)
    for rows in ROWS:
        xs = [torch.randn(rows, inputs) for _, inputs in sizes]
        used = copies if rows <= 32 else copies[:1]
        seconds = _quickest(partial(_multiply_all, matmul, used, xs, _rounding(rows), threads), clock)
        yield flops * rows * len(used) / seconds


def _multiply_all(
    matmul: MatmulKernels, copies: list[list[PackedMatrix]], xs: list[Tensor], rounding: Rounding, threads: int
) -> None:
    for layer in copies:
        for matrix, x in zip(layer, xs, strict=True):
            matmul.multiply(x, matrix, rounding, threads)


def measure_table(matmul: MatmulKernels, shape: ModelShape, bits: float, threads: int, clock: Clock) -> Iterator[float]:
    """FLOP/s of the head, for each of ROWS that a step may choose tokens for."""
    if not shape.vocab_size:
        return
    matrix = _random_matrix(matmul, shape.vocab_size, shape.hidden_size, round(bits // 4 * 4), TABLE_GROUP)
    for rows in ROWS[:-2]:
        x = torch.randn(rows, shape.hidden_size)
        seconds = _quickest(partial(matmul.multiply, x, matrix, _rounding(rows), threads), clock)
        yield 2 * shape.head_params * rows / seconds


def _rounding(rows: int) -> Rounding:
    """What `activations: auto` takes for products of decoding rows."""
    return Rounding.OUTLIERS if rows <= OUTLIER_ROWS else Rounding.ONE_TERM


def _stacked(shape: ModelShape) -> list[tuple[int, int]]:
    """Matrices as they are multiplied: queries, keys and values in one, gate and up in one."""
    if shape.intermediate_size is None:
        return list(shape.matrices)
    query, key, value, output, gate, up, down = shape.matrices
    return [(query[0] + key[0] + value[0], query[1]), output, (gate[0] + up[0], gate[1]), down]


def _random_matrix(matmul: MatmulKernels, outputs: int, inputs: int, bits: float, group: int) -> PackedMatrix:
    if bits >= 16:
        return matmul.pack_bf16(torch.randn(outputs, inputs, dtype=torch.bfloat16))
    groups = -(-inputs // group)
    scale = torch.full((outputs, groups), 0.01)
    if bits == 8:
        return matmul.pack_int8(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), scale, group)
    q = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    return matmul.pack_int4(q, scale, -8 * scale, group)


def measure_attention(kernels: Library, shape: ModelShape, threads: int, clock: Clock) -> tuple[float, float]:
    """FLOP/s of attention over a prompt of CONTEXT tokens, and of rows that decode behind so many."""
    layers = KvLayers(shape)
    prompt = layers.attend(kernels, rows=1, queries=CONTEXT // 2, context=CONTEXT // 2, threads=threads)
    pairs = (CONTEXT // 2) ** 2 / 2
    pair_flops = 4 * shape.num_heads * shape.head_dim
    rows = layers.attend(kernels, rows=KvLayers.ROWS, queries=1, context=CONTEXT, threads=threads)
    decode_s = _quickest(rows, clock) / layers.count
    return (
        pair_flops * pairs * layers.count / _quickest(prompt, clock),
        pair_flops * KvLayers.ROWS * CONTEXT / decode_s,
    )


class KvLayers:
    """Keys and values of as many layers as no cache holds."""

    ROWS = 8

    def __init__(self, shape: ModelShape) -> None:
        count = max(1, min(shape.num_layers, -(-CACHED_BYTES // self.layer_bytes(shape))))
        tiled = can_tile(BLOCK, shape.head_dim, torch.bfloat16)
        cache = KvCache(
            _config(shape, count), self.ROWS * CONTEXT // BLOCK, BLOCK, torch.bfloat16, by_block=True, is_tiled=tiled
        )
        for keys, values in cache.layers:
            keys.fill_(0.01)  # what was never written is all one page
            values.fill_(0.01)
        self._shape, self._cache = shape, cache
        self.count = count

    @classmethod
    def layer_bytes(cls, shape: ModelShape) -> int:
        return 2 * cls.ROWS * CONTEXT * shape.num_kv_heads * shape.head_dim * 2

    def attend(self, kernels: Library, *, rows: int, queries: int, context: int, threads: int) -> Callable[[], None]:
        """Attention of `rows` sequences, whose last `queries` tokens attend to a context that ends with them, in each
        layer."""
        shape = self._shape
        q = torch.randn(rows * queries, shape.num_heads, shape.head_dim)
        starts = torch.arange(rows + 1, dtype=torch.int32) * queries
        lengths = torch.full((rows,), context, dtype=torch.int32)
        blocks = context // BLOCK
        tables = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)

        def run() -> None:
            for (keys, values), layout in zip(self._cache.layers, self._cache.layouts, strict=True):
                kernels.attend(q, keys, values, starts, lengths, tables, shape.head_dim**-0.5, threads, layout)

        return run


def _config(shape: ModelShape, num_layers: int) -> ModelConfig:
    """A configuration with the shape's heads."""
    return from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": max(1, shape.vocab_size),
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size or shape.hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": CONTEXT,
        },
        {},
    )
