"""The token budget that a GPU gets: the arithmetic, and what is measured for it, on the CPU."""

import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.steps.shapes import LLAMA_8B
from penstock.base.errors import ConfigError
from penstock.workers.compute.device import CPU
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.token_budget import (
    Capacity,
    choose_tokens,
    measure_flops,
    settle,
    token_bytes,
    weights_bytes,
)
from penstock.workers.config import LEAST_AUTO_TOKENS, MOST_AUTO_TOKENS, EngineConfig
from tests.unit.workers.tiny_models import saved, tiny_model

GIB = 2**30
CONFIG = EngineConfig(device="cuda")
FAST = Capacity(600e12, 79 * GIB, 2)
LLAMA_1B = replace(LLAMA_8B, num_layers=16, hidden_size=2048, intermediate_size=8192, num_heads=32, head_dim=64)
LLAMA_70B = replace(LLAMA_8B, num_layers=80, hidden_size=8192, intermediate_size=28672, num_heads=64)


@pytest.mark.parametrize(
    ("model", "weights_gib", "capacity", "expected"),
    [
        (LLAMA_8B, 15, FAST, 2048),
        (LLAMA_8B, 15, FAST._replace(flops=1500e12), 5120),
        (LLAMA_8B, 15, FAST._replace(flops=120e12), 2048),
        (LLAMA_1B, 2, FAST, 8192),
        (LLAMA_70B, 35, FAST, 2048),
        (LLAMA_1B, 2, FAST._replace(free_bytes=7 * GIB), 4096),
        (LLAMA_1B, 9, FAST._replace(free_bytes=7 * GIB), 2048),
    ],
)
def test_a_step_has_as_many_tokens_as_time_and_memory_allow(
    model: ModelConfig, weights_gib: int, capacity: Capacity, expected: int
) -> None:
    assert choose_tokens(model, CONFIG, capacity, weights_gib * GIB) == expected


def test_parts_share_the_work_and_the_memory() -> None:
    four = msgspec.structs.replace(CONFIG, tensor_parallel_size=4)

    assert choose_tokens(LLAMA_8B, four, FAST, 15 * GIB) == 8192
    assert token_bytes(LLAMA_8B, 4, 2) < token_bytes(LLAMA_8B, 1, 2)


def test_a_step_has_a_row_of_every_sequence() -> None:
    many = msgspec.structs.replace(CONFIG, max_num_seqs=3000)

    assert choose_tokens(LLAMA_8B, many, FAST, 15 * GIB) == 3000


@given(st.floats(1e9, 1e17), st.integers(0, 2**42), st.integers(0, 2**42))
def test_a_better_gpu_never_gets_less(flops: float, free_bytes: int, weights: int) -> None:
    found = choose_tokens(LLAMA_8B, CONFIG, Capacity(flops, free_bytes, 2), weights)

    assert LEAST_AUTO_TOKENS <= found <= MOST_AUTO_TOKENS
    assert found % 1024 == 0
    assert choose_tokens(LLAMA_8B, CONFIG, Capacity(2 * flops, 2 * free_bytes, 2), weights) >= found


def test_what_was_chosen_is_in_the_settings_and_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    caplog.set_level(logging.INFO, "penstock.runner")

    settled = settle(source, CONFIG, lambda config: FAST)

    assert settled == msgspec.structs.replace(CONFIG, max_batched_tokens=8192)
    assert settled.token_budget == 8192
    assert "engine.max_batched_tokens: auto is 8192: a large product has 600 TFLOP/s" in caplog.text
    assert weights_bytes(source) == sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) > 0


def test_without_a_gpu_nothing_is_chosen(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="device: cuda needs a GPU"):
        settle(saved(tiny_model("llama"), tmp_path), CONFIG)


def test_the_speed_of_a_product_is_measured() -> None:
    assert 1e6 < measure_flops(CPU, torch.float32, size=128) < 1e14
