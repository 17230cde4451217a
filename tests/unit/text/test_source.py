"""What names a checkpoint, what its headers declare, and its digest."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.base.errors import ConfigError
from penstock.text.digest import FULL_BYTES
from penstock.text.source import ModelSource, resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-model"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096})
    )
    save_file({"w": np.arange(64, dtype=np.float32)}, path / "model.safetensors")
    return path


def digest_of(path: Path) -> str:
    """Digest of a checkpoint by a new source, because a source remembers its digest."""
    return resolve(str(path)).digest


def test_the_demo_is_found_without_being_imported(demo: ModelSource) -> None:
    assert demo.format == "gguf"
    assert demo.name == "SmolLM2-135M-Instruct"
    assert demo.max_model_len == 8192
    assert demo.architecture == "llama"
    assert demo.is_chat
    assert len(demo.digest) == 32


def test_a_directory_is_a_safetensors_checkpoint(folder: Path) -> None:
    source = resolve(str(folder))

    assert (source.format, source.path, source.name) == ("safetensors", folder.resolve(), "tiny-model")
    assert source.max_model_len == 4096
    assert source.architecture == "LlamaForCausalLM"
    assert not source.is_chat


def test_a_gguf_file_is_named_by_its_stem(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf(lambda writer: writer.add_context_length(77), name="some-model.Q8_0.gguf")

    source = resolve(str(path))

    assert (source.format, source.name, source.max_model_len) == ("gguf", "some-model.Q8_0", 77)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("./absent.gguf", "does not exist"),
        ("absent.gguf", "does not exist"),
        ("/absent/folder", "does not exist"),
        ("not a model!", "neither a path that exists nor a hub id"),
    ],
)
def test_what_can_not_be_a_model_is_refused_with_a_sentence(model: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(model)


def test_incomplete_directories_and_other_files_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        resolve(str(folder))
    with pytest.raises(ConfigError, match=r"does not end in \.gguf"):
        resolve(str(folder / "config.json"))


def test_a_malformed_config_or_one_without_context_length_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        _ = resolve(str(folder)).max_model_len
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        _ = resolve(str(folder)).max_model_len
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="context length"):
        _ = resolve(str(folder)).max_model_len


def test_the_template_file_goes_before_the_one_in_the_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})
    )
    assert resolve(str(folder)).chat_template == "D"
    (folder / "chat_template.jinja").write_text("F")

    assert resolve(str(folder)).chat_template == "F"


def test_the_digest_does_not_depend_on_where_the_files_lie(folder: Path, tmp_path: Path) -> None:
    before = digest_of(folder)
    (folder / "README.md").write_text("what it is")

    assert digest_of(folder.rename(tmp_path / "elsewhere")) == before


def test_the_digest_changes_with_weights_tokenizer_template_and_config(folder: Path) -> None:
    seen = {digest_of(folder)}
    save_file({"w": np.arange(1, 65, dtype=np.float32)}, folder / "model.safetensors")
    seen.add(digest_of(folder))
    for name in ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_text(f'{{"other": "{name}"}}')
        seen.add(digest_of(folder))

    assert len(seen) == 6


@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_a_large_file_is_sampled_at_every_tensor(folder: Path, make_gguf: Callable[..., Path], format: str) -> None:
    big = np.zeros((FULL_BYTES // 4 + 4096,), np.float32)
    if format == "gguf":
        path = weights = make_gguf(lambda writer: writer.add_tensor("big", big), weights=np.ones((32, 64), np.float32))
    else:
        path, weights = folder, folder / "model.safetensors"
        save_file({"big": big, "small": np.ones((32, 64), np.float32)}, weights)
    data = weights.read_bytes()
    small = data.index(np.ones((32, 64), np.float32).tobytes())
    seen = {digest_of(path)}
    for at in (
        small,
        small + 4100,
        small + 8191,
        len(data) - 33,
    ):  # of the small tensor: begin, middle, end; and the big one's end, or padding
        weights.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        seen.add(digest_of(path))
    weights.write_bytes(data.replace(b"big", b"bag", 1))
    seen.add(digest_of(path))

    assert len(seen) == 6


def test_a_split_gguf_is_refused_when_it_is_read(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf(lambda writer: gguf.GGUFWriter.add_uint16(writer, "split.count", 2))

    with pytest.raises(ConfigError, match="one of 2 parts"):
        _ = resolve(str(path)).max_model_len


def test_a_template_for_tools_is_found_by_its_name(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "D"}))
    assert resolve(str(folder)).tool_template is None
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})
    )
    assert resolve(str(folder)).tool_template == "T"
    (folder / "chat_template.jinja").write_text("F")
    assert resolve(str(folder)).tool_template is None
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("FT")
    assert resolve(str(folder)).tool_template == "FT"


def test_a_gguf_has_its_template_for_tools_under_a_key_of_its_own(make_gguf: Callable[..., Path]) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template([{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}])

    source = resolve(str(make_gguf(fill)))

    assert (source.chat_template, source.tool_template) == ("D", "T")
