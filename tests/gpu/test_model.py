"""The decoder on the GPU against itself on the CPU: chunked prefill, decoding, drafts, in one cache with NaN wherever nobody wrote."""

import math

import pytest
import torch
from torch import Tensor

from penstock.wire.frames import SamplingParams
from penstock.workers.batch import build_batch
from penstock.workers.device import placed
from penstock.workers.models.config import ModelConfig
from penstock.workers.models.llama import KvCache, Llama
from penstock.workers.sequence import Chunk, Sequence, Step
from penstock.workers.weights import layout, parameter_shapes
from tests.gpu.cases import DEVICE, planned

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    family="llama", vocab_size=96, hidden_size=64, intermediate_size=160, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5,
    rope_theta=10000.0, rope_scaling=None, has_rope_factors=False, max_position_embeddings=256, sliding_window=None, is_tied=False, has_qkv_bias=False,
    has_o_bias=False, has_mlp_bias=False, has_qk_norm=False, eos_token_ids=frozenset({2}),
)  # fmt: skip
BLOCK_SIZE, NUM_BLOCKS = 16, 32
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}


class Harness:
    """A tiny model on a device, two sequences, a script of steps."""

    def __init__(self, dtype: torch.dtype, device: torch.device, is_planned: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        shapes = parameter_shapes(layout(CONFIG))
        drawn = {name: (torch.randn(shape, generator=generator) * 0.15 + (len(shape) == 1)).to(dtype) for name, shape in shapes.items()}
        self.model = Llama(CONFIG, placed(drawn, device), max_model_len=200, threads=1, exact=False)
        self.cache = KvCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, dtype, device)
        self.cache.poison(torch.arange(NUM_BLOCKS))
        self.is_planned = is_planned
        self.seqs = [self.sequence(index, length) for index, length in enumerate((50, 25))]

    def sequence(self, index: int, length: int) -> Sequence:
        token_ids = [(7 * place + index) % 90 for place in range(length)]
        seq = Sequence("r", token_ids, SamplingParams(max_tokens=1), length, [], b"", 0.0)
        seq.block_table = list(range(NUM_BLOCKS - 1 - index, 0, -2))[: -(-length // BLOCK_SIZE)]
        return seq

    def step(self, *counts: int) -> Tensor:
        """So many more tokens of each sequence; logits of all of them."""
        chunks = [Chunk(seq, seq.num_computed_tokens, count) for seq, count in zip(self.seqs, counts, strict=True) if count]
        step = Step(chunks, [])
        with torch.inference_mode():
            batch = build_batch(step, BLOCK_SIZE)
            attention = planned(batch.attention, BLOCK_SIZE) if self.is_planned else batch.attention
            logits = self.model.logits(batch.token_ids, batch.positions, self.cache, attention, torch.arange(step.num_tokens))
        for chunk in chunks:
            chunk.seq.num_computed_tokens = chunk.end
        return logits


SCRIPT = ((30, 0), (10, 17), (1, 1), (1, 4), (8, 3))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logits_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    ours = Harness(dtype, DEVICE, is_planned=DEVICE == CPU)
    theirs = Harness(dtype, CPU, is_planned=False)

    for counts in SCRIPT:
        got, expected = ours.step(*counts), theirs.step(*counts)
        assert got.device == CPU
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_step_that_chooses_nothing_returns_no_rows_and_fills_the_cache() -> None:
    harness = Harness(torch.float32, DEVICE, is_planned=DEVICE == CPU)
    chunk = Chunk(harness.seqs[0], 0, 40)
    batch = build_batch(Step([chunk], []), BLOCK_SIZE)
    with torch.inference_mode():
        attention = planned(batch.attention, BLOCK_SIZE) if harness.is_planned else batch.attention
        logits = harness.model.logits(batch.token_ids, batch.positions, harness.cache, attention, batch.rows)

    assert logits.shape == (0, harness.model.config.vocab_size)
    assert not any(math.isnan(cache[harness.seqs[0].block_table[0]].sum().item()) for pair in harness.cache.layers for cache in pair)
