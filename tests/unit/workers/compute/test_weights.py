"""Checkpoints into the normal form: every tensor in its place, and the sentence for those that do not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource, resolve
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.quant.quantized import QuantizedTensor, TorchQuantizedMatrix
from penstock.workers.compute.readers.gguf_file import TYPES
from penstock.workers.compute.weights import CHUNK_ELEMENTS, Head, layout, load_weights, parameter_shapes, read_weights
from tests.unit.workers.tiny_models import KINDS, gguf_name, saved, tiny_model, written_as_gguf


def load(source: ModelSource, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_weights(source, read_config(source), dtype)


def pieces(source: ModelSource, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loaded weights, taken apart again under their Hugging Face names."""
    return {
        name: weights[piece.target][piece.start : piece.start + piece.shape[0]]
        for name, piece in layout(read_config(source)).items()
    }


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
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == parameter_shapes(
        layout(read_config(source))
    )
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

    assert torch.equal(
        weights["layers.1.qkv"], torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    )
    assert torch.equal(
        weights["layers.1.qkv_bias"], torch.cat([attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias])
    )


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


def test_the_types_of_gguf_files_are_those_of_the_gguf_package() -> None:
    assert {number: (kind.name, kind.block, kind.block_bytes) for number, kind in TYPES.items()} == {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind])
        for kind in (GGMLQuantizationType(number) for number in TYPES)
    }


@pytest.mark.parametrize("quantized", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
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

    np.testing.assert_array_equal(
        found.numpy(), gguf.dequantize(gguf.quantize(embedding, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    )


def as_groups(source: ModelSource, head: Head = "keep") -> dict[str, Tensor | QuantizedTensor]:
    return dict(read_weights(source, read_config(source), torch.float32, head=head))


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied"])
@pytest.mark.parametrize(("quantized", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q4_1", 4)])
def test_a_gguf_file_stays_quantized_and_its_rows_are_where_dense_ones_would_be(
    kind: str, quantized: str, bits: int, tmp_path: Path
) -> None:
    source = written_as_gguf(tiny_model(kind), tmp_path / "tiny.gguf", GGMLQuantizationType[quantized])
    dense = load(source)

    found = as_groups(source)

    assert found.keys() == dense.keys()
    for name, value in found.items():
        assert isinstance(value, QuantizedTensor) == (dense[name].dim() == 2), name
        if isinstance(value, QuantizedTensor):
            assert (value.bits, value.group_size) == (bits, 32)
            assert torch.equal(value.dequantize(), dense[name]), name
            assert torch.equal(value.dequantize_in(torch.bfloat16), dense[name].bfloat16()), name
        else:
            assert torch.equal(value, dense[name]), name


def test_a_parameter_whose_parts_are_quantized_in_different_ways_is_dequantized(tmp_path: Path) -> None:
    mixed = {"blk.0.attn_v.weight": GGMLQuantizationType.Q8_0, "blk.1.attn_v.weight": GGMLQuantizationType.Q4_0}
    source = written_as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1, kinds=mixed)

    found = as_groups(source)

    assert isinstance(found["layers.0.qkv"], Tensor)
    assert isinstance(found["layers.1.qkv"], QuantizedTensor)  # offsets hold both
    assert torch.equal(found["layers.0.qkv"], load(source)["layers.0.qkv"])
    assert torch.equal(found["layers.1.qkv"].dequantize(), load(source)["layers.1.qkv"])


def test_the_demo_models_own_file_is_read_as_the_gguf_package_dequantizes_it() -> None:
    source = resolve("demo")
    stored = next(tensor for tensor in source.gguf.tensors if tensor.name == "blk.29.ffn_down.weight")
    columns, rows = stored.shape
    data = np.memmap(source.path, np.uint8, "r", stored.offset, (rows, columns // 32 * 20))

    found = dict(read_weights(source, read_config(source), torch.float32, "layers.29."))

    quantized = {
        name: (value.bits, value.group_size) for name, value in found.items() if isinstance(value, QuantizedTensor)
    }
    assert quantized == dict.fromkeys(("layers.29.qkv", "layers.29.o", "layers.29.gate_up", "layers.29.down"), (4, 32))
    np.testing.assert_array_equal(
        found["layers.29.down"].dequantize().numpy(), gguf.dequantize(data, GGMLQuantizationType.Q4_1)
    )


def packed_by_compressed_tensors(
    model: PreTrainedModel, folder: Path, **weights: Any
) -> tuple[ModelSource, dict[str, Tensor]]:
    """The layers' matrices through upstream's compressor; and what that gets back of them."""
    source = saved(model, folder)
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tensors, wanted = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors.pop(name).half()
        grouped = weight.float().view(len(weight), -1, args.group_size or weight.shape[1])
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        layer = {"weight": weight, "weight_scale": scale.half(), "weight_zero_point": zero.to(torch.int8)}
        kept = PackedQuantizationCompressor.compress(layer, scheme)
        wanted[name] = PackedQuantizationCompressor.decompress(kept, scheme)["weight"].float()
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in kept.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", ignore=["lm_head"]
    ).to_dict()
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return source, wanted


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32},
        {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32},
        {"num_bits": 4, "symmetric": False, "strategy": "channel"},
        {"num_bits": 8, "symmetric": True, "strategy": "channel"},
    ],
)
def test_a_checkpoint_by_compressed_tensors_is_read_as_upstream_reads_it(
    weights: dict[str, Any], tmp_path: Path
) -> None:
    source, wanted = packed_by_compressed_tensors(tiny_model("qwen2"), tmp_path, **weights)

    found = as_groups(source)

    parts = {
        name: found[piece.target].rows(piece.start, piece.start + piece.shape[0])
        for name, piece in layout(read_config(source)).items()
        if name in wanted
    }
    assert len(parts) == 14
    assert all(torch.equal(quantized.dequantize().half().float(), wanted[name]) for name, quantized in parts.items())
    assert all(len(quantized.q.unique()) > 12 for quantized in parts.values())
    assert isinstance(found["embed"], Tensor)
    torch_form = load(source)["layers.0.down"]
    torch_form = torch_form.multiply(torch.eye(160)).t() if isinstance(torch_form, TorchQuantizedMatrix) else torch_form
    assert torch.equal(torch_form, found["layers.0.down"].dequantize())


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_scale"),
            "has no tensor model.layers.0.mlp.up_proj.weight_scale, which belongs to",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_packed": torch.zeros(160, 8)}),
            "weight_packed of the checkpoint has the type F32",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_shape": torch.tensor([160, 32])}),
            r"weight_packed .* the shape \[160, 8\]",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_shape": torch.tensor([160])}),
            r"weight_shape .*two numbers belong there",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_g_idx": torch.zeros(64)}),
            r"has a tensor .*weight_g_idx, for which",
        ),
    ],
)
def test_a_packed_layer_that_does_not_fit_is_named(
    edit: Callable[[dict[str, Tensor]], object], sentence: str, tmp_path: Path
) -> None:
    source, _ = packed_by_compressed_tensors(
        tiny_model("qwen2"), tmp_path, num_bits=4, symmetric=True, strategy="group", group_size=32
    )
    change(tmp_path, edit)

    with pytest.raises(ConfigError, match=sentence):
        load(source)


# 8-bit floats


def saved_as_float8(
    model: PreTrainedModel, folder: Path, strategy: str = "channel", *, rounds_activations: bool = True
) -> tuple[ModelSource, dict[str, Tensor]]:
    """The layers' matrices through upstream's compressor; and what that gets back of them."""
    source = saved(model, folder)
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy)
    inputs = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="token", dynamic=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    tensors, wanted = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors.pop(name).float()
        largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()[None]
        kept = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": largest / 448}, scheme)
        wanted[name] = FloatQuantizationCompressor.decompress(kept, scheme)["weight"]
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in kept.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    groups = {"group_0": scheme if rounds_activations else QuantizationScheme(targets=["Linear"], weights=args)}
    quantization = QuantizationConfig(config_groups=groups, format="float-quantized", ignore=["lm_head"]).to_dict()
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return source, wanted


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_a_checkpoint_of_8_bit_floats_is_dequantized_as_upstream_does(strategy: str, tmp_path: Path) -> None:
    source, wanted = saved_as_float8(tiny_model("qwen2"), tmp_path, strategy)

    found = pieces(source, load(source))

    assert len(wanted) == 14
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    assert isinstance(as_groups(source, "auto")["embed"], Tensor)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_scale"),
            "has no tensor model.layers.0.mlp.up_proj.weight_scale, which belongs to",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(7, 1)}),
            r"weight_scale of the checkpoint has the shape \[7, 1\], its weight \[160, 64\]",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(160, 1).int()}),
            "weight_scale of the checkpoint has the type I32",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.input_scale": torch.ones(1)}),
            r"has a tensor .*input_scale, for which",
        ),
    ],
)
def test_a_layer_of_8_bit_floats_that_does_not_fit_is_named(
    edit: Callable[[dict[str, Tensor]], object], sentence: str, tmp_path: Path
) -> None:
    source, _ = saved_as_float8(tiny_model("qwen2"), tmp_path)
    change(tmp_path, edit)

    with pytest.raises(ConfigError, match=sentence):
        load(source)


# the embedding table and the head


@pytest.mark.parametrize(("head", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_a_dense_table_is_rounded_where_that_is_asked_for(kind: str, head: Head, bits: int, tmp_path: Path) -> None:
    source = saved(tiny_model(kind), tmp_path)
    plain, rounded = as_groups(source), as_groups(source, head)
    of_torch = load_weights(source, read_config(source), torch.float32, head=head)

    tables = [name for name in rounded if isinstance(rounded[name], QuantizedTensor)]

    assert tables == (["embed"] if kind == "llama-tied" else ["embed", "lm_head"])
    for name in tables:
        step = rounded[name].scale.repeat_interleave(32, dim=1)
        assert (rounded[name].bits, rounded[name].group_size) == (bits, 32)
        assert bool(((rounded[name].dequantize() - plain[name]).abs() <= 0.6 * step).all())
        assert torch.equal(of_torch[name], rounded[name].dequantize())


@pytest.mark.parametrize(
    ("quantized", "head", "bits"),
    [
        ("Q8_0", "keep", 8),
        ("Q8_0", "auto", 8),
        ("Q8_0", "int4", 4),
        ("Q4_1", "auto", 4),
        ("Q4_1", "int8", 4),
        ("F16", "auto", None),
    ],
)
def test_a_quantized_table_is_rounded_only_to_fewer_bits(
    quantized: str, head: Head, bits: int | None, tmp_path: Path
) -> None:
    source = written_as_gguf(tiny_model("llama-tied"), tmp_path / "tiny.gguf", GGMLQuantizationType[quantized])

    table = as_groups(source, head)["embed"]

    assert (table.bits if isinstance(table, QuantizedTensor) else None) == bits


def test_a_dense_table_beside_quantized_layers_is_rounded_to_8_bits_by_itself(tmp_path: Path) -> None:
    source, _ = packed_by_compressed_tensors(
        tiny_model("qwen2"), tmp_path, num_bits=4, symmetric=True, strategy="group", group_size=32
    )

    assert as_groups(source, "auto")["embed"].bits == as_groups(source, "auto")["lm_head"].bits == 8
    assert isinstance(as_groups(source, "keep")["lm_head"], Tensor)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            r"has no tensor model.layers.1.mlp.up_proj.weight",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.gate.weight": torch.zeros(2)}),
            r"has a tensor model.layers.0.mlp.gate.weight, for which",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}),
            r"model.norm.weight of the checkpoint has the shape \[63\].*asks for \[64\]",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            r"model.norm.weight has the type I8.*F32, F16, BF16",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    edit: Callable[[dict[str, Tensor]], object], sentence: str, tmp_path: Path
) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    change(tmp_path, edit)

    with pytest.raises(ConfigError, match=sentence):
        load(source)


def test_tensors_that_old_checkpoints_store_twice_are_passed_over(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    source = saved(model, tmp_path)
    change(
        tmp_path,
        lambda tensors: tensors.update(
            {"lm_head.weight": torch.ones(96, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        ),
    )

    assert_holds(source, load(source), model)


def test_a_directory_that_leaves_the_choice_open_is_refused(tmp_path: Path) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())

    with pytest.raises(ConfigError, match=r"holds 2 \*.safetensors and neither"):
        load(source)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": {"x": "../x.safetensors"}}, {"weight_map": [1]}]
)
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
    source = written_as_gguf(
        tiny_model("llama"),
        tmp_path / "tiny.gguf",
        GGMLQuantizationType.F32,
        {"blk.0.surprise.weight": np.zeros(4, np.int8)},
    )

    with pytest.raises(
        ConfigError, match=r"has the GGUF type I8, which is not supported; these are: F32, F16, BF16, Q4_0, Q4_1, Q8_0"
    ):
        load(source)


def test_an_unknown_gguf_tensor_is_named(tmp_path: Path) -> None:
    source = written_as_gguf(
        tiny_model("llama"),
        tmp_path / "tiny.gguf",
        GGMLQuantizationType.F32,
        {"blk.0.surprise.weight": np.zeros(4, np.float32)},
    )

    with pytest.raises(ConfigError, match=r"has a tensor blk.0.surprise.weight"):
        load(source)


def test_the_names_of_the_two_formats_correspond() -> None:
    assert gguf_name("model.layers.11.self_attn.q_proj.bias") == "blk.11.attn_q.bias"
    assert gguf_name("lm_head.weight") == "output.weight"
