"""What is warmed before readiness against what a drawn load of every feature needs: nothing is missing. In the
interpreter by the keys under which Triton would compile what is launched, on a GPU by what it does compile."""

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu.steps.engines import Answers
from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import SamplingParams, StepCosts, pack_token_ids
from penstock.workers.compute.device import place_weights
from penstock.workers.compute.device_choice import DeviceChoice
from penstock.workers.compute.lora import FUSED, LoraAdapter, LowRank, Part, make_adapter
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.models.replay import Replay, recorded_steps
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation.draft_model import DraftModel
from penstock.workers.compute.speculation.ngram import NgramDrafter
from penstock.workers.compute.speculation.prediction import PredictionDrafter
from penstock.workers.compute.step_model import GpuStepModel
from penstock.workers.compute.warm_up import GREEDY, WarmChunk, run_step, warm_up
from penstock.workers.compute.weights import layout, parameter_shapes
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.runner import Runner
from penstock.workers.engine.sequence import Sequence
from tests.gpu.cases import DEVICE, planned
from tests.gpu.launches import Launches
from tests.gpu.test_model import CONFIG as TWO_LAYERS
from tests.gpu.test_model import rounded

CONFIG = replace(TWO_LAYERS, num_layers=1)
VOCAB, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = CONFIG.vocab_size, 16, 96, 192
COSTS = StepCosts(base_s=0.01, row_s=0.001, prefill_token_s=0.0001)
NUM_REQUESTS = 12
TIMEOUT_S = {"cpu": 240.0, "cuda": 40.0}
"""Longest time for a load, seconds, by device: the interpreter's are long, on a GPU all of them fit into the step's
limit (`bench.gpu.plan`)."""
DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 5, "logprobs": 3},
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "logit_bias": ((7, 4.0),), "min_tokens": 2, "logprobs": 0},
    {"temperature": 1.0, "allowed_token_ids": pack_token_ids(range(5, 90, 3)), "bad_words": ((8,), (11, 5))},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.5, "presence_penalty": 1.0, "prompt_logprobs": 0, "logprobs": 1},
)
KINDS = (("none", True, torch.float32), ("ngram", False, torch.float8_e4m3fn), ("draft", True, torch.float32))
"""Kind of drafter, whether weights are quantized, type of keys and values."""
PROMPTS = (1, 2, 9, 16, 17, 33, 60, 131)


class PlannedLlama(Llama):
    """A model whose steps are planned as for a GPU, even where DEVICE is the CPU."""

    def normed(self, step: ModelStep, cache: KvCache) -> Tensor:
        if step.attention.plan is None:
            step = step._replace(attention=planned(step.attention, cache.block_size))
        return super().normed(step, cache)


def make_model(*, is_quantized: bool) -> PlannedLlama:
    generator = torch.Generator().manual_seed(3)
    drawn = [
        (name, torch.randn(shape, generator=generator) * 0.15 + (len(shape) == 1))
        for name, shape in parameter_shapes(layout(CONFIG)).items()
    ]
    weights = [(name, rounded(name, weight) if is_quantized else weight) for name, weight in drawn]
    return PlannedLlama(CONFIG, place_weights(weights, torch.float32, DEVICE), MAX_MODEL_LEN, threads=1, exact=False)


def make_runner(config: EngineConfig, *, is_quantized: bool, kv_dtype: torch.dtype) -> TorchRunner:
    model, sampler = make_model(is_quantized=is_quantized), Sampler(VOCAB, CONFIG.eos_token_ids)
    cache, others = (KvCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, kv_dtype, DEVICE) for _ in range(2))
    other: DraftModel | NgramDrafter = NgramDrafter()
    if config.speculation.method == "draft":
        other = DraftModel(model, others, sampler, MAX_MODEL_LEN, on_device=DeviceChoice(sampler))
    steps = GpuStepModel(Replay(model, cache, recorded_steps(config), MAX_MODEL_LEN))
    return TorchRunner(steps, sampler, MAX_MODEL_LEN, PredictionDrafter(other))


def make_lora(draw: random.Random) -> LoraAdapter:
    """An adapter that lacks a matrix, its ranks drawn."""
    heads, kv = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    inner, hidden = CONFIG.intermediate_size, CONFIG.hidden_size
    widths = {"qkv": (heads, kv, kv), "o": (hidden,), "gate_up": (inner, inner), "down": (hidden,)}
    columns = {"qkv": hidden, "o": heads, "gate_up": hidden, "down": inner}
    found: dict[str, LowRank] = {}
    for name in FUSED:
        if found and draw.random() < 0.3:
            continue
        rank, start, parts = draw.randint(1, 20), 0, []
        for width in widths[name]:
            parts.append(Part(start, start + width, 0.01 * torch.randn(width, rank).to(DEVICE)))
            start += width
        found[name] = LowRank(0.01 * torch.randn(rank * len(parts), columns[name]).to(DEVICE), parts)
    return make_adapter("a", [found], 0, DEVICE)


def serve(runner: TorchRunner, config: EngineConfig, seed: int) -> None:
    """A drawn load, all of it at once, to its end."""
    draw, hasher, answers = random.Random(seed), ChainHasher(bytes(32), BLOCK_SIZE), Answers()
    engine = Engine(runner, config, hasher, answers.on_step, measure_costs=known_costs)
    engine.start()
    try:
        for number in range(NUM_REQUESTS):
            tokens = [draw.randrange(3, VOCAB) for _ in range(PROMPTS[number % len(PROMPTS)])]
            sampling = SamplingParams(
                max_tokens=draw.randint(2, 4), seed=number, ignore_eos=True, **DRAWN[number % len(DRAWN)]
            )
            root = hasher.root(f"{number}")
            keys = hasher.extend(root, tokens)
            seq = Sequence(
                f"{number}", tokens, sampling, len(tokens), keys, keys[-1] if keys else root, time.monotonic(),
                lora=make_lora(draw) if draw.random() < 0.4 else None,
                prediction=[draw.randrange(3, VOCAB) for _ in range(6)] if draw.random() < 0.3 else [],
            )  # fmt: skip
            answers.begin(seq.request_id)
            engine.submit(seq)
        answers.wait(NUM_REQUESTS, TIMEOUT_S[DEVICE.type])
    finally:
        engine.stop()


def known_costs(_runner: Runner, _config: EngineConfig) -> StepCosts:
    return COSTS


@pytest.mark.parametrize(("method", "is_quantized", "kv_dtype"), KINDS)
def test_a_drawn_load_needs_no_kernel_that_was_not_warmed(
    method: Any, is_quantized: bool, kv_dtype: torch.dtype
) -> None:
    speculation = SpeculationConfig(
        method=method, max_draft_tokens=3, adaptive=False, model="itself" if method == "draft" else None
    )
    config = EngineConfig(
        block_size=BLOCK_SIZE, max_num_seqs=4, max_batched_tokens=132, kv_memory_bytes=2**20, speculation=speculation
    )

    with Launches() as warmed:
        runner = make_runner(config, is_quantized=is_quantized, kv_dtype=kv_dtype)
        warm_up(runner, config, CONFIG)
    with Launches() as needed:
        serve(runner, config, seed=len(method))
    with Launches() as decoding:
        run_step(runner, [WarmChunk(9, 1, GREEDY)], BLOCK_SIZE)

    assert needed.keys - warmed.keys == set()
    if DEVICE.type == "cpu":  # on a GPU a case compiles nothing that one before it has compiled
        assert warmed.keys
        assert needed.keys - decoding.keys, "a warm-up of decode steps alone would be found out"
