"""A checkpoint is made into a 4-bit checkpoint and read back: what is written is what is computed with, and a run that
was ended goes on."""

import fcntl
import json
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AwqConfig
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils.quantization_config import AwqFormat

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource, resolve
from penstock.workers.compute.model_config import read_config, to_hf
from penstock.workers.compute.models.llama import Llama
from penstock.workers.compute.models.rope import inverse_frequencies, rope_tables
from penstock.workers.compute.quant.quantized import TorchQuantizedMatrix
from penstock.workers.compute.weights import load_weights
from penstock.workers.quantize.calibrate import LINEAR, DenseLayer, InputStats, quantize_awq
from penstock.workers.quantize.checkpoint import write_checkpoint
from penstock.workers.quantize.partial_checkpoint import RECIPE_FILE, Recipe
from penstock.workers.quantize.perplexity import perplexity
from penstock.workers.quantize.quantize import (
    Plan,
    dense_weights,
    evaluation_tokens,
    model_perplexity,
    plain_group_size,
    quantize_checkpoint,
)
from tests.unit.workers.tiny_models import saved, tiny_model

GOLDEN = Path(__file__).parents[1] / "compute" / "quant" / "autoawq_golden.safetensors"
GROUP = 32
TEXTS = [torch.randint(0, 96, (64,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
RECIPE = Recipe(model="m", calibration="c", group_size=GROUP)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    "model": {"type": "BPE", "vocab": {letter: index for index, letter in enumerate(LETTERS)}, "merges": []},
}
TEXT = "".join(LETTERS[(7 * place + place // 5) % 26] for place in range(1200))


def source_of(folder: Path, kind: str, **sizes: int) -> ModelSource:
    folder.mkdir()
    found = saved(tiny_model(kind, **sizes), folder)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    return found


@pytest.fixture
def source(tmp_path: Path, request: pytest.FixtureRequest) -> ModelSource:
    return source_of(tmp_path / "dense", getattr(request, "param", "qwen2-tied"))


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plan(source: ModelSource, out: Path, **changes: int) -> Plan:
    return Plan(str(source.path), out, TEXT, **{"group_size": GROUP, "sequences": 2} | changes)


def quantized(source: ModelSource, out: Path, **changes: int) -> list[tuple[int, int]]:
    """Make the checkpoint; returns the progress that was reported, as (layers done, all layers)."""
    progress: list[tuple[int, int]] = []
    quantize_checkpoint(plan(source, out, **changes), lambda done, total: progress.append((done, total)))
    return progress


def ended_after(source: ModelSource, out: Path, num_layers: int) -> None:
    """Stop the run in the middle, as Ctrl-C does."""

    def on_layer(done: int, _total: int) -> None:
        if done == num_layers:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(plan(source, out), on_layer)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("source", ["llama", "mistral", "qwen2", "qwen3", "llama-biased"], indirect=True)
def test_folding_scales_changes_nothing_that_a_layer_computes(source: ModelSource) -> None:
    config = read_config(source)
    with torch.inference_mode():
        layer = DenseLayer(
            dense_weights(source, config, "layers.0."), config, 0, rope_tables(inverse_frequencies(config, None), 64)
        )
        stats = {name: InputStats(layer.get(name).shape[1]) for name in LINEAR}
        x = torch.randn(64, config.hidden_size, generator=torch.Generator().manual_seed(1)) * torch.linspace(
            0.1, 8, config.hidden_size
        )
        before, matrices = layer.forward(x, stats), {name: layer.get(name) for name in LINEAR}
        layer.fold(stats, GROUP)
        after = layer.forward(x, {})

    assert not torch.equal(layer.get("down"), matrices["down"])
    assert torch.allclose(after, before, rtol=1e-4, atol=1e-3)


def test_a_written_checkpoint_is_read_back_as_it_was_computed(source: ModelSource, tmp_path: Path) -> None:
    config = read_config(source)
    load = partial(dense_weights, source, config)
    with torch.inference_mode():
        layers = list(quantize_awq(load, config, TEXTS, GROUP))
        write_checkpoint(tmp_path / "int4", source, config, RECIPE, lambda first: layers[first:], load)

    again = resolve(str(tmp_path / "int4"))
    loaded = load_weights(again, read_config(again), torch.float32)

    for layer in layers:
        for name, quantized in layer.matrices.items():
            matrix = loaded[f"layers.{layer.index}.{name}"]
            assert isinstance(matrix, TorchQuantizedMatrix)
            assert torch.equal(matrix.multiply(torch.eye(matrix.shape[1])).t(), quantized.dequantize())
    model = Llama(read_config(again), loaded, 128, 1, exact=False)
    found = [perplexity(model, torch.float32, text, 64) for text in TEXTS]
    assert all(value < 1e4 for value in found)
    assert [perplexity(model, torch.float32, text, 64, 5) for text in TEXTS] == pytest.approx(found, rel=1e-4)
    assert not (tmp_path / "int4.partial").exists()


def awq_layer(rows: int, columns: int, group_size: int) -> dict[str, tuple[list[int], torch.dtype]]:
    """Shapes and types of AutoAWQ's WQLinear_GEMM."""
    groups = columns // group_size
    return {
        "qweight": ([columns, rows // 8], torch.int32),
        "qzeros": ([groups, rows // 8], torch.int32),
        "scales": ([groups, rows], torch.float16),
    }


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[list[int], torch.dtype]]:
    return {name: (list(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def test_what_is_expected_of_an_awq_layer_is_what_autoawq_packed() -> None:
    golden = load_file(GOLDEN)
    packed = {name: golden[name] for name in ("qweight", "qzeros", "scales")}

    assert described(packed) == awq_layer(*golden["q"].shape, group_size=golden["q"].shape[1] // len(golden["scales"]))


@pytest.mark.parametrize("source", ["llama", "qwen2-tied", "llama-biased"], indirect=True)
def test_transformers_takes_the_configuration_and_has_a_place_for_every_tensor(
    source: ModelSource, tmp_path: Path
) -> None:
    quantized(source, tmp_path / "int4")
    config = AutoConfig.from_pretrained(tmp_path / "int4")
    tensors = {
        name: tensor for path in (tmp_path / "int4").glob("*.safetensors") for name, tensor in load_file(path).items()
    }

    accepted = AutoQuantizationConfig.from_dict(config.quantization_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {
        name: module
        for name, module in model.model.layers.named_modules(prefix="model.layers")
        if isinstance(module, torch.nn.Linear)
    }
    expected = {
        name: (list(tensor.shape), torch.float16)
        for name, tensor in model.state_dict().items()
        if name.removesuffix(".weight") not in linear
    }
    for name, module in linear.items():
        expected |= {
            f"{name}.{part}": what for part, what in awq_layer(module.out_features, module.in_features, GROUP).items()
        }
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]

    assert isinstance(accepted, AwqConfig)
    assert (accepted.bits, accepted.group_size, accepted.zero_point, accepted.format) == (
        4,
        GROUP,
        True,
        AwqFormat.GEMM,
    )
    assert described(tensors) == expected


def test_progress_is_told_layer_by_layer_and_perplexities_can_be_compared(source: ModelSource, tmp_path: Path) -> None:
    assert quantized(source, tmp_path / "int4") == [(0, 2), (1, 2), (2, 2)]
    assert json.loads((tmp_path / "int4" / RECIPE_FILE).read_text())["model"] == source.digest
    ids = evaluation_tokens(str(source.path), TEXT[::-1], 200)
    dense, rounded = (model_perplexity(str(source.path), ids, torch.float32, group_size=size) for size in (None, GROUP))

    assert len(ids) == 200
    assert rounded != dense
    assert rounded == pytest.approx(dense, rel=0.5)
    assert model_perplexity(str(tmp_path / "int4"), ids, torch.float32) == pytest.approx(dense, rel=0.5)


# a run that ends in the middle


def test_a_run_that_was_ended_goes_on_and_makes_the_same_checkpoint(source: ModelSource, tmp_path: Path) -> None:
    quantized(source, tmp_path / "whole")
    ended_after(source, tmp_path / "int4", 1)

    assert not (tmp_path / "int4").exists()
    assert quantized(source, tmp_path / "int4") == [(1, 2), (2, 2)]
    assert contents(tmp_path / "int4") == contents(tmp_path / "whole")
    assert not (tmp_path / "int4.partial").exists()


def test_a_shard_that_was_cut_short_is_made_again(source: ModelSource, tmp_path: Path) -> None:
    ended_after(source, tmp_path / "int4", 2)
    shards = sorted((tmp_path / "int4.partial").glob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-1])

    assert len(shards) == 2
    assert quantized(source, tmp_path / "int4") == [(0, 2), (1, 2), (2, 2)]
    resolve(str(tmp_path / "int4"))


def test_the_beginning_of_another_checkpoint_is_not_gone_on_with(source: ModelSource, tmp_path: Path) -> None:
    ended_after(source, tmp_path / "int4", 1)
    before = contents(tmp_path / "int4.partial")

    with pytest.raises(ConfigError, match="is the beginning of another checkpoint"):
        quantized(source, tmp_path / "int4", group_size=64)
    assert contents(tmp_path / "int4.partial") == before


def test_two_runs_do_not_write_the_same_folder(source: ModelSource, tmp_path: Path) -> None:
    ended_after(source, tmp_path / "int4", 1)

    with (tmp_path / "int4.partial" / RECIPE_FILE).open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another penstock quantize is writing"):
            quantized(source, tmp_path / "int4")


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Limit the size of files, so that a write beyond it fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_loses_nothing_that_was_done(source: ModelSource, tmp_path: Path) -> None:
    ended_after(source, tmp_path / "int4", 1)
    before = contents(tmp_path / "int4.partial")

    with (
        files_of_at_most(4096),
        pytest.raises(
            ConfigError, match=r"can't write .*model-00002-of-00003.safetensors: .*the same command goes on behind it"
        ),
    ):
        quantized(source, tmp_path / "int4")
    assert contents(tmp_path / "int4.partial") == before
    assert quantized(source, tmp_path / "int4") == [(1, 2), (2, 2)]


# what is refused


@pytest.mark.parametrize("name", ["int4", "int4.partial"])
def test_a_folder_that_is_somebody_elses_is_left_alone(source: ModelSource, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").write_text("mine")

    with pytest.raises(ConfigError, match=r"exists already|is in the way"):
        quantized(source, tmp_path / "int4")
    assert contents(tmp_path / name) == {"precious": b"mine"}


def test_a_place_that_can_not_be_written_is_refused_with_a_sentence(source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"can't write .*: Not a directory"):
        quantized(source, tmp_path / "file" / "int4")
    with pytest.raises(ConfigError, match="exists already"):
        quantized(source, Path())


def test_weights_that_are_no_numbers_are_refused_by_name(source: ModelSource, tmp_path: Path) -> None:
    tensors = load_file(source.path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, source.path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"tensor model\.layers\.1\.mlp\.\w+_proj\.scales can't be kept in float16"):
        quantized(source, tmp_path / "int4")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"group_size": 16}, "group size 16 is not supported; 32, 64 and 128 are"),
        ({"sequences": 0}, "at least 1 calibration sequence is needed, not 0"),
    ],
)
def test_settings_that_can_not_be_are_refused_before_anything_is_written(
    source: ModelSource, tmp_path: Path, changes: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        quantized(source, tmp_path / "int4", **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_text_that_is_too_short_is_refused(source: ModelSource, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the calibration text has 4 tokens; at least 256 are needed"):
        quantize_checkpoint(Plan(str(source.path), tmp_path / "int4", "abcd"), lambda done, total: None)
    with pytest.raises(ConfigError, match="the evaluation text has 1 tokens; at least 2 are needed"):
        evaluation_tokens(str(source.path), "a", 100)


def test_a_matrix_whose_outputs_can_not_be_packed_is_refused(tmp_path: Path) -> None:
    odd = source_of(tmp_path / "odd", "llama", intermediate_size=156)

    with pytest.raises(ConfigError, match="packs outputs by 8: its gate_proj has 156"):
        quantized(odd, tmp_path / "int4")


def test_a_quantized_checkpoint_is_not_quantized_again(source: ModelSource, tmp_path: Path) -> None:
    quantized(source, tmp_path / "int4")

    with pytest.raises(ConfigError, match="int4 is quantized already"):
        quantized(resolve(str(tmp_path / "int4")), tmp_path / "again")


def test_a_layer_whose_integers_are_of_another_type_is_refused_by_name(source: ModelSource, tmp_path: Path) -> None:
    quantized(source, tmp_path / "int4")
    shard = tmp_path / "int4" / "model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.0.mlp.up_proj.qzeros"] = tensors["model.layers.0.mlp.up_proj.qzeros"].float()
    save_file(tensors, shard, metadata={"format": "pt"})

    again = resolve(str(tmp_path / "int4"))
    with pytest.raises(ConfigError, match=r"up_proj\.qzeros of the checkpoint has the type F32; AWQ has I32 there"):
        load_weights(again, read_config(again), torch.float32)


@pytest.mark.parametrize(
    "source",
    ["llama", "llama-tied", "llama3-rope", "llama-biased", "mistral", "qwen2", "qwen2-tied", "qwen3"],
    indirect=True,
)
def test_a_configuration_written_for_others_is_read_back_the_same(source: ModelSource) -> None:
    config = read_config(source)
    again = folder_with(source.path.parent / "again", to_hf(config))

    assert read_config(again) == config


def folder_with(folder: Path, config: dict[str, object]) -> ModelSource:
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return ModelSource("safetensors", folder, "again")


def test_a_layer_without_its_shard_is_refused_by_name(source: ModelSource, tmp_path: Path) -> None:
    quantized(source, tmp_path / "int4")
    index = tmp_path / "int4" / "model.safetensors.index.json"
    shards = sorted((tmp_path / "int4").glob("*.safetensors"))
    index.write_text(msgspec.json.encode({"weight_map": {path.name: path.name for path in shards[1:]}}).decode())

    again = resolve(str(tmp_path / "int4"))
    with pytest.raises(ConfigError, match=r"the checkpoint has no tensor model\.layers\.0"):
        load_weights(again, read_config(again), torch.float32)


@pytest.mark.parametrize(("group_size", "plain"), [(128, 64), (64, 64), (32, 32)])
def test_the_group_size_that_divides_the_demo_models_576_columns_is_found(group_size: int, plain: int) -> None:
    assert plain_group_size("demo", group_size) == plain
