"""From a checkpoint to a 4-bit checkpoint and back: what is written is what is computed with, and transformers reads the rest alike."""

from pathlib import Path

import msgspec
import pytest
import torch

from penstock.text.source import ModelSource, resolve
from penstock.wire.errors import ConfigError
from penstock.workers.models.config import read_config, to_hf
from penstock.workers.models.llama import Llama
from penstock.workers.quant.calibrate import quantize_awq, quantize_rtn
from penstock.workers.quant.checkpoint import write_checkpoint
from penstock.workers.quant.int4 import Int4Matrix
from penstock.workers.quant.perplexity import perplexity
from penstock.workers.quant.quantize import dense_weights
from penstock.workers.weights import load_weights
from tests.unit.workers.tiny_models import saved, tiny_model

GROUP = 32
TEXTS = [torch.randint(0, 96, (64,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.fixture
def source(tmp_path: Path, request: pytest.FixtureRequest) -> ModelSource:
    folder = tmp_path / "dense"
    folder.mkdir()
    found = saved(tiny_model(getattr(request, "param", "qwen2-tied")), folder)
    (folder / "tokenizer.json").write_text('{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}')
    return found


def logits(source: ModelSource, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    config = read_config(source)
    model = Llama(config, load_weights(source, config, dtype), 128, 1, exact=False)
    return torch.tensor([perplexity(model, dtype, text, 64) for text in TEXTS])


@pytest.mark.parametrize("source", ["llama", "mistral", "qwen2", "qwen3", "llama-biased"], indirect=True)
def test_folding_scales_changes_no_more_than_rounding_does(source: ModelSource, tmp_path: Path) -> None:
    config = read_config(source)
    weights = dense_weights(source, config)
    model_before = Llama(config, dense_weights(source, config), 128, 1, exact=False)

    with torch.inference_mode():
        for _ in quantize_awq(weights, config, TEXTS, GROUP):
            pass  # what is left in `weights` is the scaled, unrounded model
    model_after = Llama(config, weights, 128, 1, exact=False)

    assert perplexity(model_after, torch.float32, TEXTS[0], 64) == pytest.approx(perplexity(model_before, torch.float32, TEXTS[0], 64), rel=1e-3)


def test_a_written_checkpoint_is_read_back_as_it_was_computed(source: ModelSource, tmp_path: Path) -> None:
    config = read_config(source)
    weights = dense_weights(source, config)
    with torch.inference_mode():
        layers = list(quantize_rtn(weights, config, GROUP))
        write_checkpoint(tmp_path / "int4", source, config, weights, iter(layers), GROUP)

    again = resolve(str(tmp_path / "int4"))
    loaded = load_weights(again, read_config(again), torch.float32)

    for layer in layers:
        for name, groups in layer.matrices.items():
            matrix = loaded[f"layers.{layer.index}.{name}"]
            assert isinstance(matrix, Int4Matrix)
            assert torch.equal(matrix.multiply(torch.eye(matrix.shape[1])).t(), groups.dequantized())
    assert torch.isfinite(logits(again)).all()
    assert not (tmp_path / "int4.partial").exists()


def test_a_folder_that_exists_is_left_alone(source: ModelSource, tmp_path: Path) -> None:
    config = read_config(source)
    (tmp_path / "int4").mkdir()

    with pytest.raises(ConfigError, match="exists already"):
        write_checkpoint(tmp_path / "int4", source, config, dense_weights(source, config), iter([]), GROUP)
    assert list((tmp_path / "int4").iterdir()) == []


@pytest.mark.parametrize("source", ["llama", "llama-tied", "llama3-rope", "llama-biased", "mistral", "qwen2", "qwen2-tied", "qwen3"], indirect=True)
def test_a_configuration_written_for_others_is_read_back_the_same(source: ModelSource) -> None:
    config = read_config(source)
    again = folder_with(source.path.parent / "again", to_hf(config))

    assert read_config(again) == config


def folder_with(folder: Path, config: dict[str, object]) -> ModelSource:
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return ModelSource("safetensors", folder, "again")


def test_a_layer_without_its_zeros_is_refused_by_name(source: ModelSource, tmp_path: Path) -> None:
    config = read_config(source)
    weights = dense_weights(source, config)
    with torch.inference_mode():
        write_checkpoint(tmp_path / "int4", source, config, weights, quantize_rtn(weights, config, GROUP), GROUP)
    index = tmp_path / "int4" / "model.safetensors.index.json"
    shards = sorted((tmp_path / "int4").glob("*.safetensors"))
    index.write_text(msgspec.json.encode({"weight_map": {path.name: path.name for path in shards[1:]}}).decode())

    again = resolve(str(tmp_path / "int4"))
    with pytest.raises(ConfigError, match=r"the checkpoint has no tensor model\.layers\.0"):
        load_weights(again, read_config(again), torch.float32)
