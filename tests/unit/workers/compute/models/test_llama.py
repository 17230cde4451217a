"""The decoder against transformers: every family, any chunking, any batch, scattered blocks, NaN wherever nobody
wrote."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from penstock.text.source import ModelSource
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import build_batch
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.model_step import step_of
from penstock.workers.compute.weights import load_weights
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.tiny_models import KINDS, saved, tiny_model, written_as_gguf

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK_SIZE, NUM_BLOCKS = 4, 64


class Harness:
    """A model over a poisoned cache, its sequences in blocks drawn at random."""

    def __init__(self, source: ModelSource, *, dtype: torch.dtype = torch.float32, exact: bool = False) -> None:
        config = read_config(source)
        self.model = Llama(config, load_weights(source, config, dtype), max_model_len=200, threads=1, exact=exact)
        self.cache = KvCache(config, NUM_BLOCKS, BLOCK_SIZE, dtype)
        self.cache.poison(torch.arange(NUM_BLOCKS))
        self.free = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)

    def sequence(self, token_ids: list[int]) -> Sequence:
        seq = Sequence("r", token_ids, SamplingParams(max_tokens=1), len(token_ids), [], b"", 0.0)
        seq.block_table = [self.free.pop() for _ in range(-(-len(token_ids) // BLOCK_SIZE))]
        return seq

    def run(self, *parts: tuple[Sequence, int]) -> list[Tensor]:
        """Compute so many more tokens of each sequence in one step; logits [count, vocab] of all of them."""
        step = Step([Chunk(seq, seq.num_computed_tokens, count) for seq, count in parts], [])
        with torch.inference_mode():
            batch = build_batch(step, BLOCK_SIZE)
            logits = self.model.logits(step_of(batch, rows=torch.arange(step.num_tokens)), self.cache)
        for chunk in step.chunks:
            chunk.seq.num_computed_tokens = chunk.end
        return list(torch.split(logits, [count for _, count in parts]))


def expected(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


def tokens(count: int, seed: int = 1) -> list[int]:
    return [random.Random(seed + 100 * i).randrange(96) for i in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    harness = Harness(saved(model, tmp_path))
    prompt = tokens(90)

    logits = harness.run((harness.sequence(prompt), len(prompt)))[0]

    torch.testing.assert_close(logits, expected(model, prompt), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama3-rope", "qwen3"])
def test_chunks_and_neighbours_in_a_step_change_nothing(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    harness = Harness(saved(model, tmp_path))
    first, second = tokens(31), tokens(19, seed=2)
    a, b = harness.sequence(first), harness.sequence(second)

    steps = [
        harness.run((a, 5)),
        harness.run((a, 13), (b, 1)),
        harness.run((b, 17), (a, 1)),
        harness.run((a, 12), (b, 1)),
    ]

    of_a = torch.cat([steps[0][0], steps[1][0], steps[2][1], steps[3][0]])
    of_b = torch.cat([steps[1][1], steps[2][0], steps[3][1]])
    torch.testing.assert_close(of_a, expected(model, first), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(of_b, expected(model, second), atol=2e-5, rtol=1e-4)


def test_llama3_scaling_moves_the_logits(tmp_path: Path) -> None:
    """Guards the comparison above: with plain RoPE it would fail."""
    prompt = tokens(90)
    plain, scaled = (expected(tiny_model(kind), prompt) for kind in ("llama", "llama3-rope"))

    assert (plain - scaled).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quantized", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_gguf_file_gives_the_logits_that_transformers_reads_out_of_it(
    kind: str, quantized: str, tmp_path: Path
) -> None:
    source = written_as_gguf(tiny_model(kind), tmp_path / "tiny.gguf", GGMLQuantizationType[quantized])
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    harness = Harness(source)
    prompt = tokens(40)

    logits = harness.run((harness.sequence(prompt), len(prompt)))[0]

    torch.testing.assert_close(logits, expected(oracle, prompt), atol=2e-5, rtol=1e-4)


def test_rope_factors_of_a_gguf_file_are_llama3_scaling(tmp_path: Path) -> None:
    """llama.cpp's converter writes the scaling as divisors of the frequencies."""
    model = tiny_model("llama3-rope")
    unscaled = 1.0 / 500000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    factors = (unscaled / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    source = written_as_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType.F32, {"rope_freqs.weight": factors})
    harness = Harness(source)
    prompt = tokens(90)

    logits = harness.run((harness.sequence(prompt), len(prompt)))[0]

    torch.testing.assert_close(logits, expected(model, prompt), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16_stays_near_float32(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    harness = Harness(saved(model, tmp_path), dtype=torch.bfloat16)
    prompt = tokens(40)
    reference = expected(model, prompt)
    theirs = (expected(model.to(torch.bfloat16), prompt) - reference).abs().mean()

    ours = (harness.run((harness.sequence(prompt), len(prompt)))[0] - reference).abs().mean()

    assert ours < 1.2 * theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama-biased", "qwen3"])
def test_exact_logits_are_the_same_bits_in_any_batch_and_chunking(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = saved(tiny_model(kind), tmp_path)
    prompt, other = tokens(37), tokens(50, seed=2)
    alone, crowded = Harness(source, dtype=dtype, exact=True), Harness(source, dtype=dtype, exact=True)
    whole = alone.run((alone.sequence(prompt), len(prompt)))[0]
    a, b = crowded.sequence(prompt), crowded.sequence(other)

    steps = [
        crowded.run((b, 30), (a, 18)),
        crowded.run((b, 1), (a, 1)),
        crowded.run((a, 17), (b, 19)),
        crowded.run((a, 1)),
    ]

    assert torch.equal(whole, torch.cat([steps[0][1], steps[1][1], steps[2][0], steps[3][0]]))


@pytest.fixture
def three_threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("three_threads")
def test_exact_logits_do_not_depend_on_how_threads_share_a_step(tmp_path: Path) -> None:
    """torch splits an operation of 32,768 elements or more among its threads, in the middle of a row, where vector code
    ends early."""
    source = saved(tiny_model("llama", intermediate_size=1000), tmp_path)
    prompt = tokens(100)
    at_once, in_parts = Harness(source, exact=True), Harness(source, exact=True)
    whole = at_once.run((at_once.sequence(prompt), 100))[0]
    seq = in_parts.sequence(prompt)

    parts = torch.cat([in_parts.run((seq, 10))[0] for _ in range(10)])

    assert torch.equal(whole, parts)
