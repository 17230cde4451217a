"""GGUF's block formats against the gguf package, which packs and dequantizes: to the bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from penstock.workers.compute.quant.gguf_blocks import BLOCK, UNPACK
from penstock.workers.compute.quant.quantized import QuantizedTensor


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize(("rows", "columns"), [(2, 32), (7, 96), (48, 576)])
def test_what_gguf_packed_is_unpacked_to_the_same_weights(kind: str, rows: int, columns: int) -> None:
    values = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32) * np.linspace(
        0, 3, columns, dtype=np.float32
    )
    values[0, :BLOCK] = 0.25  # a group of equal weights: Q4_1's scale is 0
    packed = gguf.quantize(values, GGMLQuantizationType[kind])
    bits, unpack = UNPACK[kind]
    quantized = QuantizedTensor.empty(rows, columns, BLOCK, bits)

    unpack(torch.from_numpy(packed).view(rows, columns // BLOCK, -1), quantized)

    np.testing.assert_array_equal(quantized.dequantize().numpy(), gguf.dequantize(packed, GGMLQuantizationType[kind]))
    assert len(quantized.q.unique()) > (8 if bits == 4 else 25)
