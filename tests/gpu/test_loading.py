"""A small checkpoint as a replica with a GPU loads it: read by threads, packed, kernels chosen by made-up times."""

from pathlib import Path

import torch

from bench.gpu.steps.checkpoint import write_checkpoint
from bench.gpu.steps.shapes import bench_for
from penstock.text.source import ModelSource
from penstock.workers.compute.measured import Timing
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.models.gpu_weights import load_on_gpu
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from penstock.workers.compute.weights import read_weights
from tests.gpu.cases import DEVICE

ROWS = (3, 70, 1100)


def test_loaded_weights_multiply_as_those_of_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(bench_for(is_check=True), tmp_path)
    source = ModelSource("safetensors", tmp_path, "tiny")
    config = read_config(source)
    timing = Timing(lambda calls: 1.0, lambda: 0.0, tmp_path / "choices.json", "a card")
    on_host = dict(read_weights(source, config, torch.bfloat16, head="int8"))

    weights = load_on_gpu(source, config, "int8", torch.bfloat16, DEVICE, timing)

    assert weights.keys() == on_host.keys()
    packed = {name: weight for name, weight in weights.items() if isinstance(weight, GroupedMatrix)}
    assert {"embed", "lm_head", "layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down"} == packed.keys()
    for name, matrix in packed.items():
        known = on_host[name]
        assert isinstance(known, QuantizedTensor)
        for rows in ROWS:
            x = torch.randn(rows, matrix.shape[1]).bfloat16()
            expected = x.float() @ known.dequantize().t()
            result = matrix.multiply(x.to(DEVICE)).cpu().float()
            largest = float(expected.abs().max())
            torch.testing.assert_close(result, expected, atol=2e-2 * largest, rtol=2e-2)
