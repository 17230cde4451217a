"""compressed-tensors' matrices of 8-bit floats against its own compressor: the same weights to the bit."""

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from penstock.workers.compute.quant.float8 import LARGEST, Float8Tensor


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_compressed_tensors_kept_is_dequantized_to_the_same_weights(strategy: str, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    weight = torch.randn(24, 80)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy)
    )
    largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()[None]
    layer = {"weight": weight, "weight_scale": (largest / LARGEST).to(dtype)}
    kept = FloatQuantizationCompressor.compress(layer, scheme)
    matrix = Float8Tensor.empty(24, 80)

    matrix.copy_(kept["weight"], kept["weight_scale"])

    wanted = FloatQuantizationCompressor.decompress(
        {"weight": kept["weight"], "weight_scale": kept["weight_scale"].float()}, scheme
    )["weight"]
    assert matrix.q.dtype == torch.float8_e4m3fn
    assert torch.equal(matrix.dequantize_in(torch.float32), wanted)
    assert torch.equal(matrix.dequantize_in(torch.bfloat16), wanted.bfloat16())
    assert len(matrix.q.float().unique()) > 60


def test_rows_are_views() -> None:
    matrix = Float8Tensor.empty(4, 16)

    matrix.rows(1, 3).copy_(torch.ones(2, 16).to(torch.float8_e4m3fn), torch.tensor([2.0, 3.0]))

    assert matrix.dequantize_in(torch.float32).sum(1).tolist() == [0, 32, 48, 0]
