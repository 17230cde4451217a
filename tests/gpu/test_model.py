"""The decoder on the GPU against itself on the CPU: chunked prefill, decoding, drafts, in one cache with NaN wherever
nobody wrote."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import build_batch
from penstock.workers.compute.device import place_weights
from penstock.workers.compute.linear import linear
from penstock.workers.compute.lora import FUSED, AdapterRows, LowRank, Part, StepAdapters, build_segments, make_adapter
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models import llama
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.models.peers import Peers
from penstock.workers.compute.quant.quantized import QuantizedTensor, quantize, quantize_int8
from penstock.workers.compute.triton.products import tiling
from penstock.workers.compute.weights import TABLES, layout, parameter_shapes
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.gpu.cases import DEVICE, planned

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    family="llama", vocab_size=96, hidden_size=64, intermediate_size=160, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, has_rope_factors=False,
    max_position_embeddings=256, sliding_window=None, is_tied=False, has_qkv_bias=False, has_o_bias=False,
    has_mlp_bias=False, has_qk_norm=False, eos_token_ids=frozenset({2}),
)  # fmt: skip
ODD = replace(CONFIG, num_heads=3, num_kv_heads=1, has_qkv_bias=True, has_o_bias=True, has_qk_norm=True)
BLOCK_SIZE, NUM_BLOCKS = 16, 32
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}


def drawn(dtype: torch.dtype, config: ModelConfig) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shapes = parameter_shapes(layout(config))
    return [
        (name, (torch.randn(shape, generator=generator) * 0.15 + (len(shape) == 1)).to(dtype))
        for name, shape in shapes.items()
    ]


def rounded(name: str, weight: Tensor) -> Tensor | QuantizedTensor:
    if weight.dim() == 1:
        return weight
    return quantize_int8(weight, 32) if name in TABLES else quantize(weight, 32)


def dequantized(
    weights: Iterable[tuple[str, Tensor | QuantizedTensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        yield name, weight if isinstance(weight, Tensor) else weight.dequantize_in(dtype)


class Harness:
    """A tiny model on a device, two sequences, a script of steps."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        is_planned: bool,
        *,
        is_quantized: bool = False,
        kv_dtype: torch.dtype | None = None,
        config: ModelConfig = CONFIG,
        peers: Peers | None = None,
    ) -> None:
        """is_quantized: the weights are rounded to 4 bits, the table to 8; on the host then dequantized."""
        weights = [(name, rounded(name, weight) if is_quantized else weight) for name, weight in drawn(dtype, config)]
        on_device = place_weights(weights, dtype, device) if is_planned else dict(dequantized(weights, dtype))
        self.model = Llama(config, on_device, max_model_len=200, threads=1, exact=False, peers=peers)
        self.cache = KvCache(config, NUM_BLOCKS, BLOCK_SIZE, kv_dtype or dtype, device)
        self.cache.poison(torch.arange(NUM_BLOCKS))
        self.is_planned = is_planned
        self.seqs = [self.sequence(index, length) for index, length in enumerate((50, 25))]

    def sequence(self, index: int, length: int) -> Sequence:
        token_ids = [(7 * place + index) % 90 for place in range(length)]
        seq = Sequence("r", token_ids, SamplingParams(max_tokens=1), length, [], b"", 0.0)
        seq.block_table = list(range(NUM_BLOCKS - 1 - index, 0, -2))[: -(-length // BLOCK_SIZE)]
        return seq

    def step(self, *counts: int, adapter_rows: StepAdapters = ()) -> Tensor:
        """Compute so many more tokens of each sequence; returns the logits of all of them."""
        chunks = [
            Chunk(seq, seq.num_computed_tokens, count) for seq, count in zip(self.seqs, counts, strict=True) if count
        ]
        step = Step(chunks, [])
        with torch.inference_mode():
            batch = build_batch(step, BLOCK_SIZE)
            attention = planned(batch.attention, BLOCK_SIZE) if self.is_planned and DEVICE == CPU else batch.attention
            rows = torch.arange(step.num_tokens)
            logits = self.model.logits(
                ModelStep(batch.token_ids, batch.positions, attention, rows, adapter_rows), self.cache
            )
        for chunk in chunks:
            chunk.seq.num_computed_tokens = chunk.end
        return logits


SCRIPT = ((30, 0), (10, 17), (1, 1), (1, 4), (8, 3))


@pytest.mark.parametrize(
    ("dtype", "config"),
    [(torch.float32, CONFIG), (torch.bfloat16, CONFIG), (torch.float32, ODD)],
    ids=["float32", "bfloat16", "odd"],
)
def test_logits_are_those_of_the_cpu(dtype: torch.dtype, config: ModelConfig) -> None:
    """Also with norms of queries and keys, biases and an odd number of heads."""
    ours = Harness(dtype, DEVICE, is_planned=True, config=config)
    theirs = Harness(dtype, CPU, is_planned=False, config=config)

    for counts in SCRIPT:
        got, expected = ours.step(*counts), theirs.step(*counts)
        assert got.device == CPU
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


class Shifted:
    """Two ranks, of which the other's part of each sum is this one's, shifted by a channel."""

    token_ids = range(CONFIG.vocab_size)

    def add(self, x: Tensor) -> Tensor:
        return x + x.roll(1, dims=-1)

    def join(self, logits: Tensor) -> Tensor:
        return logits

    def merge(self, best: Tensor) -> Tensor:
        return best


def test_sums_of_ranks_come_between_a_product_and_the_norm_behind_it() -> None:
    ours = Harness(torch.float32, DEVICE, is_planned=True, peers=Shifted())
    theirs = Harness(torch.float32, CPU, is_planned=False, peers=Shifted())
    alone = Harness(torch.float32, CPU, is_planned=False)

    for counts in SCRIPT[:3]:
        expected = theirs.step(*counts)
        torch.testing.assert_close(ours.step(*counts), expected, atol=1e-3, rtol=1e-3)
        assert not torch.allclose(alone.step(*counts), expected, atol=0.1)


def adapter_layers(device: torch.device) -> list[dict[str, LowRank]]:
    """An adapter of rank 3 for every matrix."""
    generator = torch.Generator().manual_seed(11)
    shapes = parameter_shapes(layout(CONFIG))

    def matrix(name: str, index: int) -> LowRank:
        rows, columns = shapes[f"layers.{index}.{name}"]
        b = torch.randn(rows, 3, generator=generator).to(device)
        return LowRank(0.1 * torch.randn(3, columns, generator=generator).to(device), [Part(0, rows, b)])

    return [{name: matrix(name, index) for name in FUSED} for index in range(CONFIG.num_layers)]


def test_adapters_add_to_products_before_anything_is_made_of_them() -> None:
    ours = Harness(torch.float32, DEVICE, is_planned=True)
    theirs, base = (Harness(torch.float32, CPU, is_planned=False) for _ in range(2))
    adapters = [make_adapter("a", adapter_layers(where), 0, where) for where in (DEVICE, CPU)]

    for counts in SCRIPT[1:3]:
        first = torch.arange(counts[0])
        rows = [[AdapterRows(adapter, first)] for adapter in adapters]
        segments = build_segments(rows[0], sum(counts))
        expected = theirs.step(*counts, adapter_rows=rows[1])
        torch.testing.assert_close(ours.step(*counts, adapter_rows=segments), expected, atol=2e-3, rtol=2e-3)
        assert not torch.allclose(base.step(*counts)[: counts[0]], expected[: counts[0]], atol=0.1)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(None, 1e-3), (torch.float8_e4m3fn, 0.5)])
def test_logits_of_quantized_weights_are_those_of_the_same_weights_dequantized(
    kv_dtype: torch.dtype | None, tolerance: float
) -> None:
    ours = Harness(torch.float32, DEVICE, is_planned=True, is_quantized=True, kv_dtype=kv_dtype)
    theirs = Harness(torch.float32, CPU, is_planned=False, is_quantized=True)

    for counts in SCRIPT:
        torch.testing.assert_close(ours.step(*counts), theirs.step(*counts), atol=tolerance, rtol=1e-3)


def test_parts_of_products_are_added_up_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit the same as added up by themselves, which they are where an adapter adds to them."""
    monkeypatch.setattr(tiling, "LEAST_COLUMNS", 1)
    wide = replace(CONFIG, hidden_size=256)
    ours, theirs = (Harness(torch.float32, DEVICE, is_planned=True, is_quantized=True, config=wide) for _ in range(2))
    launched: list[str] = []

    def count(kernel: Any, grid: Any) -> Any:
        launched.append(kernel.__name__)
        return original(kernel, grid)

    original = KernelInterface.__getitem__
    monkeypatch.setattr(KernelInterface, "__getitem__", count)
    fused = [ours.step(*counts) for counts in SCRIPT[2:4]]
    num_sums = launched.count("_sum_parts")
    monkeypatch.setattr(llama, "linear_in_parts", lambda x, weight, bias: linear(x, weight, bias, exact=False))
    whole = [theirs.step(*counts) for counts in SCRIPT[2:4]]

    assert all(torch.equal(one, other) for one, other in zip(fused, whole, strict=True))
    assert launched.count("_sum_parts") - num_sums > num_sums


def test_a_step_that_chooses_nothing_returns_no_rows_and_fills_the_cache() -> None:
    harness = Harness(torch.float32, DEVICE, is_planned=True)
    chunk = Chunk(harness.seqs[0], 0, 40)
    batch = build_batch(Step([chunk], []), BLOCK_SIZE)
    with torch.inference_mode():
        attention = planned(batch.attention, BLOCK_SIZE) if DEVICE == CPU else batch.attention
        step = ModelStep(batch.token_ids, batch.positions, attention, batch.rows)
        logits = harness.model.logits(step, harness.cache)

    assert logits.shape == (0, harness.model.config.vocab_size)
    assert not any(
        math.isnan(cache[harness.seqs[0].block_table[0]].sum().item())
        for pair in harness.cache.layers
        for cache in pair
    )
