"""Checkpoints read by threads, as for a GPU, against the same ones mapped: the same weights to the bit."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.workers.compute.device import CPU, place_weights
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.quant.float8 import Float8Tensor
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.readers.device_reader import DeviceReader, Span, read_spans
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from penstock.workers.compute.weights import Head, read_weights, read_with_float8
from tests.unit.workers.compute.parallel.tiny_awq import saved_as_awq
from tests.unit.workers.compute.test_weights import packed_by_compressed_tensors, saved_as_float8
from tests.unit.workers.tiny_models import saved, tiny_model, written_as_gguf

Maker = Callable[[Path], ModelSource]


def by_compressed_tensors(bits: int, *, is_symmetric: bool) -> Maker:
    return lambda folder: packed_by_compressed_tensors(
        tiny_model("qwen2"), folder, num_bits=bits, symmetric=is_symmetric, strategy="group", group_size=32
    )[0]


MAKERS: dict[str, Maker] = {
    "dense": lambda folder: saved(tiny_model("llama-biased"), folder),
    "bfloat16": lambda folder: saved(tiny_model("qwen3").bfloat16(), folder),
    "shards": lambda folder: saved(tiny_model("qwen2"), folder, max_shard_size="60KB"),
    "awq": lambda folder: saved_as_awq(tiny_model("llama"), folder),
    "int4": by_compressed_tensors(4, is_symmetric=True),
    "int4 with zeros": by_compressed_tensors(4, is_symmetric=False),
    "int8": by_compressed_tensors(8, is_symmetric=True),
    "float8": lambda folder: saved_as_float8(tiny_model("llama"), folder)[0],
    "gguf": lambda folder: written_as_gguf(tiny_model("llama"), folder / "tiny.gguf", GGMLQuantizationType.Q4_1),
}


def numbers_of(value: Tensor | QuantizedTensor | Float8Tensor) -> list[Tensor]:
    if isinstance(value, Float8Tensor):
        return [value.q.view(torch.uint8), value.scale]
    if isinstance(value, QuantizedTensor):
        return [value.q, value.scale, *([] if value.offset is None else [value.offset])]
    return [value]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("head", ["keep", "int8"])
def test_a_checkpoint_is_the_same_read_by_threads_and_mapped(name: str, head: Head, tmp_path: Path) -> None:
    source = MAKERS[name](tmp_path)
    config = read_config(source)
    wanted = dict(read_weights(source, config, torch.bfloat16, head=head))

    with DeviceReader(CPU, threads=3, chunk_bytes=1000) as reader:
        found = dict(read_weights(source, config, torch.bfloat16, head=head, reader=reader))

    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert type(found[key]) is type(value)
        for ours, theirs in zip(numbers_of(found[key]), numbers_of(value), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), key


def test_what_was_read_by_threads_is_laid_out_as_what_was_mapped(tmp_path: Path) -> None:
    source = saved_as_awq(tiny_model("llama"), tmp_path)
    config = read_config(source)
    wanted = place_weights(read_weights(source, config, torch.bfloat16), torch.bfloat16, CPU)

    with DeviceReader(CPU) as reader:
        found = place_weights(read_weights(source, config, torch.bfloat16, reader=reader), torch.bfloat16, CPU)

    matrices = [name for name, value in wanted.items() if isinstance(value, GroupedMatrix)]
    assert len(matrices) == 8
    for name in matrices:
        ours, theirs = found[name], wanted[name]
        assert isinstance(ours, GroupedMatrix)
        assert isinstance(theirs, GroupedMatrix)
        for part in ("q", "scale", "second"):
            assert torch.equal(getattr(ours.tensor, part), getattr(theirs.tensor, part))


def test_float8_matrices_stay_so_where_that_is_asked_for(tmp_path: Path) -> None:
    source, _ = saved_as_float8(tiny_model("llama"), tmp_path)
    config = read_config(source)
    dense = dict(read_weights(source, config, torch.bfloat16))

    with DeviceReader(CPU) as reader:
        found = dict(read_with_float8(source, config, torch.bfloat16, "keep", reader))

    kept = {name: value for name, value in found.items() if isinstance(value, Float8Tensor)}
    assert len(kept) == 8
    for name, value in kept.items():
        assert torch.equal(value.dequantize_in(torch.bfloat16), dense[name]), name


def test_weights_that_alone_are_float8_are_dequantized(tmp_path: Path) -> None:
    source, _ = saved_as_float8(tiny_model("llama"), tmp_path, rounds_activations=False)

    with DeviceReader(CPU) as reader:
        found = dict(read_with_float8(source, read_config(source), torch.bfloat16, "keep", reader))

    assert all(isinstance(value, Tensor) for value in found.values())


@pytest.mark.parametrize("size", [0, 4, 1000])
def test_a_file_cut_short_is_refused(size: int, tmp_path: Path) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])

    with DeviceReader(CPU) as reader, pytest.raises(ConfigError, match=r"can't read .*model.safetensors"):
        dict(read_weights(source, read_config(source), torch.float32, reader=reader))


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    path = tmp_path / "model.safetensors"

    with DeviceReader(CPU, chunk_bytes=1000) as reader:
        weights = read_weights(source, read_config(source), torch.float32, reader=reader)
        next(weights)
        os.truncate(path, 5000)
        with pytest.raises(ConfigError, match=r"can't read .*model.safetensors: it ends before byte \d+"):
            dict(weights)


def test_empty_and_odd_tensors_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(256)) * 4)

    with DeviceReader(CPU, threads=2, chunk_bytes=7) as reader, path.open("rb") as file:
        found = reader.read(path, file.fileno(), Span(torch.uint8, (9, 11), 3))
        nothing = reader.read(path, file.fileno(), Span(torch.float32, (0, 4), 0))

    assert found.flatten().tolist() == [(3 + place) % 256 for place in range(99)]
    assert nothing.shape == (0, 4)


def test_places_are_those_of_the_header(tmp_path: Path) -> None:
    saved(tiny_model("llama"), tmp_path)
    path = tmp_path / "model.safetensors"

    spans = read_spans(path)

    assert max(span.start + span.size for span in spans.values()) == path.stat().st_size
    assert spans["model.norm.weight"].shape == (64,)
