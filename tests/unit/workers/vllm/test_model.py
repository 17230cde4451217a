import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource, resolve
from penstock.workers.compute.model_config import read_config, read_eos_token_ids
from penstock.workers.compute.weights import load_weights
from penstock.workers.vllm.model import prepare_folder
from tests.unit.workers.tiny_models import saved, tiny_model, written_as_gguf

Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_a_gguf_file_becomes_a_directory_that_is_the_same_model(kind: str, tmp_path: Path) -> None:
    source = written_as_gguf(tiny_model(kind), tmp_path / "tiny.gguf", Q8_0)
    made = resolve(str(prepare_folder(source, tmp_path / "cache")))
    config = read_config(source)

    assert read_config(made) == config
    assert read_eos_token_ids(made) == read_eos_token_ids(source) == config.eos_token_ids == {2, 5}
    theirs, ours = load_weights(made, config, torch.bfloat16), load_weights(source, config, torch.bfloat16)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)  # type: ignore[arg-type]


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    source = saved(tiny_model("llama"), tmp_path / "model")

    assert prepare_folder(source, tmp_path / "cache") == source.path
    assert not (tmp_path / "cache").exists()


def test_replicas_that_start_at_once_find_one_whole_directory(tmp_path: Path) -> None:
    source = written_as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", Q8_0)
    cache = tmp_path / "cache"
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(prepare_folder(source, cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [cache / source.digest] * 4
    assert [path.name for path in cache.iterdir()] == [source.digest]
    assert {path.name for path in found[0].iterdir()} == {"config.json", "model.safetensors"}


def test_rope_factors_of_a_gguf_are_refused(tmp_path: Path) -> None:
    source = written_as_gguf(
        tiny_model("llama"), tmp_path / "tiny.gguf", Q8_0, {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    )

    with pytest.raises(ConfigError, match="RoPE factors"):
        prepare_folder(source, tmp_path / "cache")


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    source: ModelSource = written_as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", Q8_0)

    with pytest.raises(ConfigError, match="cache"):
        prepare_folder(source, tmp_path / "cache")
