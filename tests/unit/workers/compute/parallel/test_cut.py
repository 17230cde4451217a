"""What ranks read of a checkpoint: their parts, to the bit, and no more bytes than these take."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch import Tensor

from penstock.text.source import ModelSource
from penstock.workers.compute.device import CPU
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.parallel.cut import take_own
from penstock.workers.compute.parallel.shares import Share, make_shares
from penstock.workers.compute.quant.float8 import Float8Tensor
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.quantization_config import FloatQuantized
from penstock.workers.compute.readers.device_reader import DeviceReader
from penstock.workers.compute.weights import Head, read_weights, read_with_float8
from tests.unit.workers.compute.parallel.cut_whole import Parameter, cut_weights
from tests.unit.workers.compute.parallel.tiny_awq import saved_as_awq
from tests.unit.workers.compute.test_weights import packed_by_compressed_tensors, saved_as_float8
from tests.unit.workers.tiny_models import saved, tiny_model, written_as_gguf

Maker = Callable[[Path], ModelSource]
Reader = DeviceReader | None

HEADS_OF_12 = {
    "hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 192, "head_dim": 12,
}  # fmt: skip
"""Rows and columns of a rank begin within the ints and the groups of every packed format."""
OF_EIGHTS = HEADS_OF_12 | {"num_key_value_heads": 2}
"""AutoAWQ's matrices have a multiple of 8 rows."""
EVEN = {"vocab_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256, "head_dim": 32}
"""Parts of 2 and of 4 ranks are equal, and on borders of groups of 32."""


def by_compressed_tensors(bits: int, group_size: int | None, *, is_symmetric: bool) -> Maker:
    strategy = "channel" if group_size is None else "group"
    return lambda folder: packed_by_compressed_tensors(
        tiny_model("llama", **HEADS_OF_12),
        folder,
        num_bits=bits,
        symmetric=is_symmetric,
        strategy=strategy,
        group_size=group_size,
    )[0]


def by_gguf(kind: GGMLQuantizationType, architecture: str = "llama") -> Maker:
    return lambda folder: written_as_gguf(tiny_model(architecture), folder / "tiny.gguf", kind)


MAKERS: dict[str, Maker] = {
    "dense": lambda folder: saved(tiny_model("llama-biased", **HEADS_OF_12), folder),
    "tied": lambda folder: saved(tiny_model("qwen2-tied", hidden_size=72, num_attention_heads=6), folder),
    "norms of heads": lambda folder: saved(tiny_model("qwen3").bfloat16(), folder),
    "shards": lambda folder: saved(tiny_model("qwen2"), folder, max_shard_size="60KB"),
    "awq": lambda folder: saved_as_awq(tiny_model("llama", **OF_EIGHTS), folder),
    "awq, a group a row": lambda folder: saved_as_awq(tiny_model("llama", **OF_EIGHTS), folder, 256),
    "int4": by_compressed_tensors(4, 24, is_symmetric=True),
    "int4 with zeros": by_compressed_tensors(4, 24, is_symmetric=False),
    "int4 a row": by_compressed_tensors(4, None, is_symmetric=False),
    "int8": by_compressed_tensors(8, 24, is_symmetric=True),
    "float8": lambda folder: saved_as_float8(tiny_model("llama", **HEADS_OF_12), folder)[0],
    "float8, a scale for all": lambda folder: saved_as_float8(tiny_model("llama"), folder, "tensor")[0],
    "gguf": by_gguf(GGMLQuantizationType.F16),
    "gguf of 4 bits": by_gguf(GGMLQuantizationType.Q4_1),
    "gguf of 5 bits": by_gguf(GGMLQuantizationType.Q5_0),
    "gguf with biases": by_gguf(GGMLQuantizationType.Q8_0, "qwen2"),
    "gguf with biases of heads": lambda folder: written_as_gguf(
        tiny_model("llama-biased"), folder / "tiny.gguf", GGMLQuantizationType.Q4_0
    ),
}


def numbers_of(value: Parameter) -> list[Tensor]:
    if isinstance(value, Float8Tensor):
        return [value.q.view(torch.uint8), value.scale]
    if isinstance(value, QuantizedTensor):
        return [value.q, value.scale, *([] if value.offset is None else [value.offset])]
    return [value]


def read(
    source: ModelSource, config: ModelConfig, head: Head, reader: Reader, share: Share | None = None
) -> Iterator[tuple[str, Parameter]]:
    take = {} if share is None else {"take": take_own(share, config)}
    if reader is not None and config.quantization == FloatQuantized(rounds_activations=True):
        return read_with_float8(source, config, torch.bfloat16, head, reader, **take)
    return read_weights(source, config, torch.bfloat16, head=head, reader=reader, **take)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("has_threads", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_what_a_rank_reads_is_its_part_of_the_whole(name: str, has_threads: bool, size: int, tmp_path: Path) -> None:
    source = MAKERS[name](tmp_path)
    config = read_config(source)
    head: Head = "int8" if size == 3 else "keep"

    with DeviceReader(CPU, threads=2, chunk_bytes=1000) if has_threads else nullcontext() as reader:
        whole = dict(read(source, config, head, reader))
        for share in make_shares(config, size):
            wanted = dict(cut_weights(whole.items(), config, share))
            found = dict(read(source, config, head, reader, share))

            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                assert type(found[key]) is type(value)
                for ours, theirs in zip(numbers_of(found[key]), numbers_of(value), strict=True):
                    assert ours.dtype == theirs.dtype
                    assert ours.is_contiguous()
                    assert torch.equal(ours, theirs), key


FORMATS: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "dense": (lambda folder: saved(tiny_model("llama", **EVEN).bfloat16(), folder), ("norm.weight",)),
    "awq": (lambda folder: saved_as_awq(tiny_model("llama", **EVEN), folder), ("norm.weight",)),
    # a scale for each row belongs to all columns
    "float8": (
        lambda folder: saved_as_float8(tiny_model("llama", **EVEN), folder)[0],
        ("norm.weight", "o_proj.weight_scale", "down_proj.weight_scale"),
    ),
    "int4": (
        lambda folder: packed_by_compressed_tensors(
            tiny_model("llama", **EVEN), folder, num_bits=4, symmetric=True, strategy="group", group_size=32
        )[0],
        ("norm.weight", "weight_shape"),
    ),
}
"""Makers of checkpoints, and ends of the names of tensors that every rank reads whole."""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_read_each_byte_of_a_checkpoint_once_but_for_what_all_of_them_need(
    name: str, size: int, tmp_path: Path
) -> None:
    make, ends = FORMATS[name]
    source = make(tmp_path)
    config = read_config(source)
    tensors = load_file(source.path / "model.safetensors")
    shared = sum(tensor.nbytes for key, tensor in tensors.items() if key.endswith(ends))

    num_bytes: list[int] = []
    for share in make_shares(config, size):
        with DeviceReader(CPU, threads=1) as reader:
            assert dict(read(source, config, "keep", reader, share))
            num_bytes.append(reader.num_bytes)

    assert sum(num_bytes) == sum(tensor.nbytes for tensor in tensors.values()) + (size - 1) * shared
    assert max(num_bytes) - min(num_bytes) <= sum(num_bytes) // 10
