"""Parts of a model as ranks load them on GPUs: put together, their products are those of the whole."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.gpu.steps.checkpoint import write_checkpoint
from bench.gpu.steps.shapes import bench_for
from penstock.text.source import ModelSource
from penstock.workers.compute.measured import Timing
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.models.gpu_weights import load_on_gpu
from penstock.workers.compute.models.llama import Matrix
from penstock.workers.compute.parallel.cut import take_own
from penstock.workers.compute.parallel.shares import Share, make_shares
from penstock.workers.compute.quant.float8 import LARGEST
from penstock.workers.compute.triton.products.float8_matrix import Float8Matrix, can_multiply
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from tests.gpu.cases import DEVICE

NAMES = ("qkv", "o", "gate_up", "down")
TOLERANCE = 2e-2
"""Share of the largest number: parts of a sum are rounded to bfloat16 before they are added."""
ROUNDED = {"num_bits": 8, "type": "float", "symmetric": True}
FLOAT8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "weights": {**ROUNDED, "strategy": "channel"},
            "input_activations": {**ROUNDED, "strategy": "token", "dynamic": True},
        }
    },
}
"""What llm-compressor writes of FP8_DYNAMIC."""


def multiply(matrix: Matrix, x: Tensor) -> Tensor:
    """float32 [T, N] on the host."""
    x = x.to(DEVICE)
    product = x @ matrix.t() if isinstance(matrix, Tensor) else matrix.multiply(x)
    return product.cpu().float()


def put_together(
    name: str, parts: list[Mapping[str, Matrix]], shares: list[Share], config: ModelConfig, x: Tensor
) -> Tensor:
    """The product with a matrix that ranks have parts of: as they would exchange it."""
    columns = [share.columns_of(name, config) for share in shares]
    if columns[0] is not None:
        own = [x[:, part.start : part.stop].contiguous() for part in columns if part is not None]
        return torch.stack([multiply(part[name], rows) for part, rows in zip(parts, own, strict=True)]).sum(0)
    places = [row for share in shares for rows in share.rows_of(name, config) or () for row in rows]
    found = torch.cat([multiply(part[name], x) for part in parts], dim=1)
    out = torch.empty(len(x), 1 + max(places))
    out[:, places] = found
    return out


def timing(folder: Path) -> Timing:
    return Timing(lambda calls: 1.0, lambda: 0.0, folder / "choices.json", "a card")


@pytest.mark.parametrize("size", [2, 3])
def test_packed_parts_multiply_as_the_whole_matrix(size: int, tmp_path: Path) -> None:
    write_checkpoint(bench_for(is_check=True), tmp_path)
    source = ModelSource("safetensors", tmp_path, "tiny")
    config = read_config(source)
    shares = make_shares(config, size)
    whole = load_on_gpu(source, config, "int8", torch.bfloat16, DEVICE, timing(tmp_path))

    parts = [
        load_on_gpu(source, config, "int8", torch.bfloat16, DEVICE, timing(tmp_path), take_own(share, config))
        for share in shares
    ]

    assert all(isinstance(part[f"layers.0.{name}"], GroupedMatrix) for part in parts for name in NAMES)
    for name in (*(f"layers.0.{name}" for name in NAMES), "lm_head"):
        x = torch.randn(5, whole[name].shape[1]).bfloat16()
        wanted = multiply(whole[name], x)
        found = put_together(name, parts, shares, config, x)
        assert float((found - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max()), name


def write_float8(folder: Path) -> None:
    """The tiny checkpoint with matrices of 8-bit floats instead of AutoAWQ's."""
    write_checkpoint(bench_for(is_check=True), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".qweight")]:
        layer = name.removesuffix(".qweight")
        columns, words = tensors.pop(name).shape
        del tensors[f"{layer}.qzeros"], tensors[f"{layer}.scales"]
        weight = torch.randn(8 * words, columns)
        scale = weight.abs().amax(1, keepdim=True) / LARGEST
        tensors[f"{layer}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{layer}.weight_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FLOAT8}), encoding="utf-8")


def test_parts_of_8_bit_floats_have_the_scales_of_their_rows(tmp_path: Path) -> None:
    """Activations are rounded by the largest number that a rank sees of a row: in parts of o and down another one."""
    write_float8(tmp_path)
    source = ModelSource("safetensors", tmp_path, "tiny")
    config = read_config(source)
    shares = make_shares(config, 2)
    kind = Float8Matrix if can_multiply(DEVICE) else Tensor
    whole = load_on_gpu(source, config, "keep", torch.bfloat16, DEVICE, timing(tmp_path))

    parts = [
        load_on_gpu(source, config, "keep", torch.bfloat16, DEVICE, timing(tmp_path), take_own(share, config))
        for share in shares
    ]

    for name in (f"layers.0.{name}" for name in NAMES):
        assert all(isinstance(part[name], kind) for part in parts)
        x = torch.randn(7, whole[name].shape[1]).bfloat16()
        wanted = multiply(whole[name], x)
        found = put_together(name, parts, shares, config, x)
        is_sum = name.endswith(("o", "down"))
        assert float((found - wanted).abs().max()) <= (2 * TOLERANCE if is_sum else 1e-6) * float(wanted.abs().max())
