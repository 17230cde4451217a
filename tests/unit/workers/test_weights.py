"""Checkpoints into the normal form: every tensor in its place, and the sentence for those that do not fit."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from penstock.text.source import ModelSource
from penstock.wire.errors import ConfigError
from penstock.workers.models.config import read_config
from penstock.workers.weights import CHUNK_ELEMENTS, layout, load_weights, parameter_shapes
from tests.unit.workers.tiny_models import KINDS, gguf_name, saved, tiny_model, written_as_gguf


def load(source: ModelSource, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_weights(source, read_config(source), dtype)


def pieces(source: ModelSource, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loaded weights, taken apart again under their Hugging Face names."""
    return {name: weights[piece.target][piece.start : piece.start + piece.shape[0]] for name, piece in layout(read_config(source)).items()}


def assert_holds(source: ModelSource, weights: dict[str, Tensor], model: PreTrainedModel) -> None:
    found = pieces(source, weights)
    parameters = dict(model.named_parameters())
    assert found.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert torch.equal(found[name], parameter.detach()), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_safetensors_directory_keeps_every_value(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    source = saved(model, tmp_path)

    weights = load(source)

    assert_holds(source, weights, model)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == parameter_shapes(layout(read_config(source)))
    assert all(tensor.is_contiguous() for tensor in weights.values())


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    source = saved(model, tmp_path, max_shard_size="60KB")

    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_holds(source, load(source), model)


def test_queries_keys_and_values_lie_one_behind_the_other(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    attention = model.model.layers[1].self_attn

    weights = load(saved(model, tmp_path))

    assert torch.equal(weights["layers.1.qkv"], torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]))
    assert torch.equal(weights["layers.1.qkv_bias"], torch.cat([attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias]))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_stored_halves_become_the_wanted_type(stored: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model("llama").to(stored)

    weights = load(saved(model, tmp_path))

    assert torch.equal(weights["layers.0.down"], model.model.layers[0].mlp.down_proj.weight.float())


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "llama-biased", "qwen2", "qwen3"])
def test_an_unquantized_gguf_file_keeps_every_value(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    source = written_as_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType.F32)

    assert_holds(source, load(source), model)


@pytest.mark.parametrize("quantized", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_quantized_gguf_file_is_dequantized_to_the_bit(quantized: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[quantized]
    model = tiny_model("qwen2")
    source = written_as_gguf(model, tmp_path / "tiny.gguf", kind)

    found = pieces(source, load(source))

    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        wanted = values if values.ndim == 1 else gguf.dequantize(gguf.quantize(values, kind), kind)
        np.testing.assert_array_equal(found[name].numpy(), wanted)


def test_a_large_tensor_is_dequantized_in_parts(tmp_path: Path) -> None:
    model = tiny_model("qwen2", vocab_size=CHUNK_ELEMENTS // 64 + 777)
    embedding = model.model.embed_tokens.weight.detach().numpy()
    source = written_as_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)

    found = load(source)["embed"]

    np.testing.assert_array_equal(found.numpy(), gguf.dequantize(gguf.quantize(embedding, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"has no tensor model.layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.update({"model.layers.0.mlp.gate.weight": torch.zeros(2)}), r"has a tensor model.layers.0.mlp.gate.weight, for which"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}), r"model.norm.weight of the checkpoint has the shape \[63\].*asks for \[64\]"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}), r"model.norm.weight has the type I8.*F32, F16, BF16"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(edit: Callable[[dict[str, Tensor]], object], sentence: str, tmp_path: Path) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    change(tmp_path, edit)

    with pytest.raises(ConfigError, match=sentence):
        load(source)


def test_tensors_that_old_checkpoints_store_twice_are_passed_over(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    source = saved(model, tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(96, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))

    assert_holds(source, load(source), model)


def test_a_directory_that_leaves_the_choice_open_is_refused(tmp_path: Path) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())

    with pytest.raises(ConfigError, match=r"holds 2 \*.safetensors and neither"):
        load(source)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {"x": "../x.safetensors"}}, {"weight_map": [1]}])
def test_an_index_that_names_no_files_of_its_directory_is_refused(index: object, tmp_path: Path) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ConfigError, match="does not name files of that directory"):
        load(source)


@pytest.mark.parametrize("size", [0, 4, 1000])
def test_a_file_cut_short_is_refused(size: int, tmp_path: Path) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(ConfigError, match=r"can't read .*model.safetensors"):
        load(source)


def test_a_gguf_file_cut_short_is_refused(tmp_path: Path) -> None:
    source = written_as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_0)
    source.path.write_bytes(source.path.read_bytes()[:-5000])

    with pytest.raises(ConfigError, match=r"cut short: tensor"):
        load(source)


def test_another_gguf_quantization_is_refused_by_name(tmp_path: Path) -> None:
    source = written_as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", GGMLQuantizationType.Q5_0)

    with pytest.raises(ConfigError, match=r"has the GGUF type Q5_0, which is not supported; these are: F32, F16, BF16, Q8_0, Q4_0, Q4_1"):
        load(source)


def test_an_unknown_gguf_tensor_is_named(tmp_path: Path) -> None:
    source = written_as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", GGMLQuantizationType.F32, {"blk.0.surprise.weight": np.zeros(4, np.float32)})

    with pytest.raises(ConfigError, match=r"has a tensor blk.0.surprise.weight"):
        load(source)


def test_the_names_of_the_two_formats_correspond() -> None:
    assert gguf_name("model.layers.11.self_attn.q_proj.bias") == "blk.11.attn_q.bias"
    assert gguf_name("lm_head.weight") == "output.weight"
