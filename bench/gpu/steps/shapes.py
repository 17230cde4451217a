"""A model of Llama-3.1-8B's shape with random weights, its cache and its decode steps, made on the GPU; and the same,
tiny, for a check on the CPU."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.llama import KvCache
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from penstock.workers.compute.weights import TABLES, layout, parameter_shapes

LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=None, has_rope_factors=False,
    max_position_embeddings=131072, sliding_window=None, is_tied=False, has_qkv_bias=False, has_o_bias=False,
    has_mlp_bias=False, has_qk_norm=False, eos_token_ids=frozenset({2}),
)  # fmt: skip
TINY = ModelConfig(
    family="llama", vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4,
    num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, has_rope_factors=False,
    max_position_embeddings=256, sliding_window=None, is_tied=False, has_qkv_bias=False, has_o_bias=False,
    has_mlp_bias=False, has_qk_norm=False, eos_token_ids=frozenset({2}),
)  # fmt: skip
BLOCK_SIZE = 16
REPEATS, RIVAL_REPEATS = 20, 5
COPY_BYTES = 4 * 2**30
SPARE_BYTES = 4 * 2**30
"""Bytes left free for activations, what torch's side dequantizes, and the graphs' own memory."""
MOST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference allowed between our and torch's logits, relative to the largest logit. In bfloat16 both sides
round after each operation."""


class Variant(NamedTuple):
    name: str
    is_quantized: bool
    kv_dtype: torch.dtype


VARIANTS = (
    Variant("bf16", False, torch.bfloat16),
    Variant("int4-g128", True, torch.bfloat16),
    Variant("int4-g128, fp8 KV", True, torch.float8_e4m3fn),
)


class Bench(NamedTuple):
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    group_size: int
    room_bytes: float
    """Bytes of the device's memory that everything together may take."""
    repeats: int
    rival_repeats: int


def bench_for(*, is_check: bool) -> Bench:
    """Llama-3.1-8B's shape on the GPU or, for a check, a tiny one on the CPU."""
    if is_check:
        return Bench(TINY, torch.device("cpu"), torch.float32, 32, 2**20, 1, 1)
    room = torch.cuda.mem_get_info()[0] - SPARE_BYTES
    return Bench(LLAMA_8B, torch.device("cuda"), torch.bfloat16, 128, room, REPEATS, RIVAL_REPEATS)


class TorchMatrix(NamedTuple):
    """A quantized matrix that torch's side dequantizes for each product."""

    groups: QuantizedTensor
    dtype: torch.dtype

    @property
    def dense(self) -> Tensor:
        rows, columns = self.groups.q.shape
        parts = self.groups.q.view(rows, -1, self.groups.group_size).to(self.dtype) * self.groups.scale[..., None].to(
            self.dtype
        )
        if self.groups.offset is not None:
            parts += self.groups.offset[..., None].to(self.dtype)
        return parts.view(rows, columns)


Weight = Tensor | TorchMatrix


def make_weights(bench: Bench, *, is_quantized: bool) -> dict[str, Weight]:
    """Random weights of the model by name, on the device."""
    torch.manual_seed(1)
    found: dict[str, Weight] = {}
    for name, shape in parameter_shapes(layout(bench.config)).items():
        if len(shape) == 1:
            found[name] = torch.ones(shape, dtype=bench.dtype, device=bench.device)
        elif is_quantized:
            found[name] = TorchMatrix(random_groups(bench, shape[0], shape[1], is_table=name in TABLES), bench.dtype)
        else:
            found[name] = torch.randn(shape, dtype=bench.dtype, device=bench.device).mul_(shape[1] ** -0.5)
    return found


def random_groups(bench: Bench, rows: int, columns: int, *, is_table: bool) -> QuantizedTensor:
    """Random quantized weights, about as large as the dense ones; tables in 8 bits and groups of 32, as the engine
    keeps them."""
    if is_table:
        q = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=bench.device)
        return QuantizedTensor(
            q, torch.full((rows, columns // 32), columns**-0.5 / 73, device=bench.device).half().float(), None, 32
        )
    # of 0 too, the mean weight would be no zero point's: all answers would go along one direction, one way or the other
    q = torch.randint(1, 16, (rows, columns), dtype=torch.uint8, device=bench.device)
    scale = (
        torch.rand(rows, columns // bench.group_size, device=bench.device)
        .add_(0.5)
        .mul_(columns**-0.5 / 4.6)
        .half()
        .float()
    )
    return QuantizedTensor(q, scale, -8 * scale, bench.group_size)


def packed(weight: Weight, bench: Bench) -> Tensor | GroupedMatrix:
    return weight if isinstance(weight, Tensor) else GroupedMatrix(weight.groups, bench.dtype, bench.device)


def read_bytes(weights: Mapping[str, Tensor | GroupedMatrix]) -> int:
    """Bytes of weights that every step reads: all but the embedding table, of which it reads a few rows."""
    return sum(weight.nbytes for name, weight in weights.items() if name != "embed")


def make_cache(bench: Bench, num_blocks: int, dtype: torch.dtype) -> KvCache:
    cache = KvCache(bench.config, num_blocks, BLOCK_SIZE, dtype, bench.device)
    for pair, cache_layout in zip(cache.layers, cache.layouts, strict=True):
        for part in pair:
            if cache_layout.scales is None:
                part.normal_()
            else:
                signs = torch.randint(0, 2, part.shape, dtype=torch.uint8, device=bench.device) << 7
                part.view(torch.uint8).copy_(
                    signs.bitwise_or_(torch.randint(0, 120, part.shape, dtype=torch.uint8, device=bench.device))
                )  # up to 240
        for scale in cache_layout.scales or ():
            scale.fill_(1 / 80)
    return cache


def decode_batch(batch: int, context: int, vocab_size: int) -> Batch:
    """A step of one more token for each of `batch` sequences, whose blocks lie scattered; on the host."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(batch * blocks).view(batch, blocks).int()
    place = context - 1
    slots = tables[:, place // BLOCK_SIZE].long() * BLOCK_SIZE + place % BLOCK_SIZE
    attention = AttentionBatch(torch.arange(batch + 1).int(), torch.full((batch,), context).int(), tables, slots)
    return Batch(
        torch.randint(vocab_size, (batch,)),
        torch.full((batch,), place),
        attention,
        torch.arange(batch),
        list(range(batch)),
    )


def median_s(step: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of a step, median of `repeats`, after one that does not count. Waits for the device each time."""
    step()
    times: list[float] = []
    for _ in range(repeats):
        wait(device)
        begun_s = time.perf_counter()
        step()
        wait(device)
        times.append(time.perf_counter() - begun_s)
    return statistics.median(times)


def copy_rate(bench: Bench) -> float:
    """Bytes a second that copying within the device's memory reads and writes."""
    size = min(COPY_BYTES, int(bench.room_bytes) // 4) if bench.device.type == "cuda" else 2**16
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / median_s(lambda: target.copy_(source), bench.repeats, bench.device)


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
