"""Decode steps on an NVIDIA GPU: a model of Llama-3.1-8B's shape with random weights, bfloat16 and 4 bits in groups of
128 (tables in 8 bits).

    make bench-gpu [ARGS="--batch 1 8 64 256 --context 1024 8192"]

For each weights, batch and context: tokens a second of whole steps as the engine makes them (what a step is made of
goes to the GPU, a CUDA graph is replayed, the chosen ids come back), beside eager torch on the same weights and cache
(dequantize + linear, fused attention over the gathered context). It has no graph, so in small batches it waits for
launches, and the ratio flatters: the share of the copy bandwidth is what to look at. And the bytes that a step must
read, each matrix once and the context's keys and values, as a share of what copying in the GPU's memory moves in that
time.

Needs an NVIDIA GPU: status 2 without. Weights and cache are made on it. What does not fit in its memory is left out,
and said. `TRITON_INTERPRET=1 python -m bench.gpu --check` runs all of it, tiny, on the CPU and compares; its times mean
nothing and are not kept.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bench.support.report import Row, print_table, write_report
from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.llama import KvCache, Llama, gated, rms_norm, rotate
from penstock.workers.compute.models.replay import Replay
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.triton.grouped_matrix import GroupedMatrix
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
SPARE_BYTES = 12 * 2**30
"""Bytes left free for what torch's side gathers and dequantizes, and for the graphs' own memory."""
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
    batches: list[int]
    contexts: list[int]
    room_bytes: float
    """Bytes of the device's memory that everything together may take."""
    repeats: int
    rival_repeats: int


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
            found[name] = TorchMatrix(_random_groups(bench, shape[0], shape[1], is_table=name in TABLES), bench.dtype)
        else:
            found[name] = torch.randn(shape, dtype=bench.dtype, device=bench.device).mul_(shape[1] ** -0.5)
    return found


def _random_groups(bench: Bench, rows: int, columns: int, *, is_table: bool) -> QuantizedTensor:
    """Random quantized weights, about as large as the dense ones; tables in 8 bits and groups of 32, as the engine
    keeps them."""
    if is_table:
        q = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=bench.device)
        return QuantizedTensor(
            q, torch.full((rows, columns // 32), columns**-0.5 / 73, device=bench.device).half().float(), None, 32
        )
    q = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=bench.device)
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


class TorchStep:
    """A decode step in eager torch, over the same weights and the same cache, which it only reads: the token's own key
    and value are ours already."""

    def __init__(
        self, bench: Bench, weights: Mapping[str, Weight], cache: KvCache, batch: Batch, rope: tuple[Tensor, Tensor]
    ) -> None:
        self._bench, self._weights, self._cache = bench, weights, cache
        self._ids, self._tables = batch.token_ids.to(bench.device), batch.attention.block_tables.long().to(bench.device)
        self._context = int(batch.attention.context_len[0])
        self._cos, self._sin = (table[batch.positions.to(bench.device)] for table in rope)

    def logits(self) -> Tensor:
        """Logits of the step, float32 [batch, vocab_size]."""
        config = self._bench.config
        x = self._rows("embed", self._ids)
        for index in range(config.num_layers):
            x = x + self._attention(index, self._norm(x, f"layers.{index}.input_norm"))
            inner = gated(self._times(self._norm(x, f"layers.{index}.post_norm"), f"layers.{index}.gate_up"))
            x = x + self._times(inner, f"layers.{index}.down")
        return self._times(self._norm(x, "norm"), "lm_head").float()

    def best(self) -> Tensor:
        """Best token of each sequence, on the host."""
        return self.logits().argmax(1).cpu()

    def _attention(self, index: int, x: Tensor) -> Tensor:
        config = self._bench.config
        heads = self._times(x, f"layers.{index}.qkv").view(len(x), -1, config.head_dim)
        q = rotate(heads[:, : config.num_heads], self._cos, self._sin)
        keys, values = (self._gathered(index, which) for which in (0, 1))
        out = functional.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
        return self._times(out.flatten(1), f"layers.{index}.o")

    def _gathered(self, index: int, which: int) -> Tensor:
        """Keys or values of the context, gathered from their blocks: [batch, num_kv_heads, context, head_dim]."""
        cache, scales = self._cache.layers[index][which], self._cache.layouts[index].scales
        if scales is None:
            found = cache[self._tables].to(self._bench.dtype)
        else:
            found = cache.view(torch.uint8)[self._tables].view(cache.dtype).to(self._bench.dtype) * scales[which][
                self._tables
            ][..., None].to(self._bench.dtype)
        return found.transpose(1, 2).flatten(2, 3)[:, :, : self._context]

    def _times(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[name]
        return functional.linear(x, weight if isinstance(weight, Tensor) else weight.dense)

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        weight = self._weights[name]
        if isinstance(weight, Tensor):
            return weight[ids]
        return TorchMatrix(
            QuantizedTensor(weight.groups.q[ids], weight.groups.scale[ids], None, weight.groups.group_size),
            weight.dtype,
        ).dense

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[name]
        assert isinstance(weight, Tensor)
        return rms_norm(x, weight, self._bench.config.rms_norm_eps)


def median_s(step: Callable[[], object], repeats: int, device: torch.device) -> float:
    step()
    times: list[float] = []
    for _ in range(repeats):
        _wait(device)
        begun_s = time.perf_counter()
        step()
        _wait(device)
        times.append(time.perf_counter() - begun_s)
    return statistics.median(times)


def copy_rate(bench: Bench) -> float:
    """Bytes a second that copying within the device's memory reads and writes."""
    size = COPY_BYTES if bench.device.type == "cuda" else 2**16
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / median_s(lambda: target.copy_(source), bench.repeats, bench.device)


def variant_rows(bench: Bench, variant: Variant, rate: float, notes: list[str]) -> Iterator[Row]:
    """Rows for every batch and context that fits, the smallest first. Raises RuntimeError where ours and torch's logits
    differ."""
    weights = make_weights(bench, is_quantized=variant.is_quantized)
    ours = {name: packed(weight, bench) for name, weight in weights.items()}
    block_bytes = KvCache.block_bytes(bench.config, BLOCK_SIZE, variant.kv_dtype)
    held = sum(weight.nbytes for weight in ours.values()) + sum(
        w.groups.q.nbytes for w in weights.values() if isinstance(w, TorchMatrix)
    )
    most_blocks = int((bench.room_bytes - held) // block_bytes)
    points = sorted(itertools.product(bench.batches, bench.contexts), key=lambda point: point[0] * point[1])
    fitting = [point for point in points if point[0] * -(-point[1] // BLOCK_SIZE) <= most_blocks]
    notes += [
        f"{variant.name}: batch {batch} with a context of {context} does not fit"
        for batch, context in points
        if (batch, context) not in fitting
    ]
    cache = make_cache(
        bench, max((batch * -(-context // BLOCK_SIZE) for batch, context in fitting), default=1), variant.kv_dtype
    )
    model = Llama(bench.config, ours, max(bench.contexts), threads=1, exact=False)
    replay = Replay(model, cache, sorted({batch for batch, _ in fitting}), max(bench.contexts))
    for batch, context in fitting:
        step = decode_batch(batch, context, bench.config.vocab_size)
        rival = TorchStep(bench, weights, cache, step, model.rope)
        check(variant, replay.logits(step), rival.logits().cpu(), MOST_DIFFERENCE[bench.dtype])
        ours_s = median_s(partial(replay.greedy_tokens, step), bench.repeats, bench.device)
        rival_s = median_s(rival.best, bench.rival_repeats, bench.device)
        must_read = read_bytes(ours) + batch * context * block_bytes // BLOCK_SIZE
        name = f"{variant.name}, batch {batch}, context {context}"
        yield Row(f"{name}: decoding (ours), eager torch (rival)", batch / ours_s, batch / rival_s, "tokens/s")
        yield Row(
            f"{name}: share of copy bandwidth", 100 * must_read / ours_s / rate, 100 * must_read / rival_s / rate, "%"
        )


def check(variant: Variant, ours: Tensor, theirs: Tensor, most: float) -> None:
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if not difference <= most:
        raise RuntimeError(f"{variant.name}: logits differ from torch's by {difference:.3f} of the largest")


def all_rows(bench: Bench, variants: Iterable[Variant], notes: list[str]) -> list[Row]:
    with torch.inference_mode():
        rate = copy_rate(bench)
        rows = [Row("copying in the GPU's memory, read and written", rate / 1e9, None, "GB/s")]
        for variant in variants:
            rows += variant_rows(bench, variant, rate, notes)
    return rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gpu_bench(batches: list[int], contexts: list[int]) -> Bench:
    room = torch.cuda.mem_get_info()[0] - SPARE_BYTES
    return Bench(LLAMA_8B, torch.device("cuda"), torch.bfloat16, 128, batches, contexts, room, REPEATS, RIVAL_REPEATS)


def _gpu_notes() -> list[str]:
    capability = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return [
        f"GPU: {torch.cuda.get_device_name()}, {memory:.0f} GiB, compute capability {capability[0]}.{capability[1]}; "
        f"torch {torch.__version__}",
        "Llama-3.1-8B's shape, random weights; int4 has embedding and head in int8; medians of whole steps, greedy, "
        "one token for each sequence",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode steps on an NVIDIA GPU.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument(
        "--check", action="store_true", help="tiny, in Triton's interpreter; compares and keeps nothing"
    )
    options = parser.parse_args()
    notes: list[str] = []
    if options.check:
        if os.environ.get("TRITON_INTERPRET") != "1":
            parser.error("--check runs in Triton's interpreter: set TRITON_INTERPRET=1")
        bench = Bench(TINY, torch.device("cpu"), torch.float32, 32, [1, 3, 9999], [20], 2**20, 1, 1)
        print_table(
            "gpu",
            all_rows(bench, VARIANTS, notes),
            ["a check of the script on the CPU: these times mean nothing", *notes],
        )
        return 0
    if not torch.cuda.is_available():
        print(
            "This benchmark needs an NVIDIA GPU and torch made for CUDA, and torch finds no GPU here: nothing was "
            "measured.",
            file=sys.stderr,
        )
        return 2
    notes = _gpu_notes()
    write_report("gpu", all_rows(_gpu_bench(options.batch, options.context), VARIANTS, notes), notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
