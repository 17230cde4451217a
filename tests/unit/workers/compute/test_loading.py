"""A checkpoint made into a runner: KV planning, the computation's type, and what is refused before weights are read."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.workers.compute.loading import compute_dtype, has_bfloat16, load_runner
from penstock.workers.compute.memory import HostMeter, plan_kv
from penstock.workers.compute.model_config import read_config
from penstock.workers.config import EngineConfig, SpeculationConfig
from tests.unit.workers.tiny_models import BLOCK_BYTES, engine_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_the_kv_cache_fills_its_budget(source: ModelSource) -> None:
    runner = load_runner(source, engine_config(blocks=40))

    assert (runner.num_blocks, runner.max_model_len) == (40, 160)


@pytest.mark.parametrize(
    ("blocks", "wanted", "found"),
    [(1000, None, 256), (1000, 100, 100), (1000, 9999, 256), (40, None, 160), (40, 200, 160), (3, 12, 12)],
)
def test_the_context_is_the_least_of_config_checkpoint_and_cache(
    blocks: int, wanted: int | None, found: int, source: ModelSource
) -> None:
    assert plan_kv(read_config(source), engine_config(blocks, wanted), torch.float32) == (blocks, found)


def test_a_context_cut_short_is_told(source: ModelSource, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock.runner"):
        plan_kv(read_config(source), engine_config(40), torch.float32)
        plan_kv(read_config(source), engine_config(1000, 300), torch.float32)

    assert "max_model_len is 160, not 256: the KV cache holds no more" in caplog.text
    assert "max_model_len is 256, not 300: the checkpoint was made for no more" in caplog.text


@pytest.mark.parametrize("blocks", [0, 1, 31])
def test_a_kv_cache_without_room_for_a_useful_context_is_refused(blocks: int, source: ModelSource) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"holds {blocks} KV blocks of {BLOCK_BYTES} bytes.*a context of 128 needs {32 * BLOCK_BYTES} bytes",
    ):
        plan_kv(read_config(source), engine_config(blocks), torch.float32)


def test_bfloat16_takes_half_the_kv_memory(source: ModelSource) -> None:
    assert plan_kv(read_config(source), engine_config(64), torch.bfloat16)[0] == 128


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"method": "draft"},
            "engine.speculation.model names the draft model of method: draft; with method: draft it is None",
        ),
        ({"method": "ngram", "model": "demo"}, "with method: ngram it is demo"),
        ({"draft_layers": 3}, "draft_layers is a number of layers of a draft model, 1 or more, not 3 with none"),
        ({"method": "draft", "model": "demo", "draft_layers": 0}, "1 or more, not 0 with draft"),
        ({"max_draft_tokens": 17}, "engine.speculation.max_draft_tokens must be between 1 and 16, not 17"),
    ],
)
def test_speculation_that_can_not_work_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SpeculationConfig(**changes)


def test_a_draft_models_kv_is_taken_of_the_same_memory(source: ModelSource) -> None:
    speculation = SpeculationConfig(method="draft", model=str(source.path))
    config = engine_config(blocks=64)

    assert load_runner(source, config).num_blocks == 64
    assert load_runner(source, msgspec.structs.replace(config, speculation=speculation)).num_blocks == 32


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 avx512vl\n", True),
        ("flags\t\t: fpu amx_tile amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags\t\t: fpu avx2 avx512f\nmodel name\t: avx512_bf16\n", False),
        ("", False),
    ],
)
def test_bfloat16_is_known_by_the_flags_of_the_cpu(cpuinfo: str, expected: bool) -> None:
    assert has_bfloat16(cpuinfo) is expected


def test_a_named_dtype_is_taken_as_it_is() -> None:
    assert compute_dtype("float32") is torch.float32
    assert compute_dtype("bfloat16") is torch.bfloat16
    assert compute_dtype("auto") in (torch.float32, torch.bfloat16)
    assert compute_dtype("auto", is_fused=True) is torch.bfloat16
    assert compute_dtype("float32", is_fused=True) is torch.float32


def test_the_checkpoint_says_where_a_sequence_ends(model: PreTrainedModel, source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 9]}')
    for file in source.path.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)

    assert load_runner(ModelSource("safetensors", tmp_path, "x"), engine_config()).eos_token_ids == {3, 9}


def test_a_token_budget_that_nobody_has_chosen_yet_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_batched_tokens: auto is to be settled first"):
        load_runner(ModelSource("safetensors", tmp_path / "none", "x"), EngineConfig(device="cuda"))


def test_a_fixed_cache_larger_than_what_is_available_now_is_told_and_starts(
    source: ModelSource, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostMeter, "total", lambda _: 1000)

    with caplog.at_level(logging.WARNING, "penstock.runner"):
        runner = load_runner(source, engine_config(blocks=40))

    assert runner.num_blocks == 40
    assert "Memory may become short" in caplog.text
    assert "available now are 0.00 GB" in caplog.text


def test_a_fixed_cache_larger_than_the_machine_is_refused(source: ModelSource) -> None:
    with pytest.raises(ConfigError, match=r"can't fit, so no weight is read.*this machine has"):
        load_runner(source, msgspec.structs.replace(engine_config(blocks=40), kv_memory_bytes=10**15))
