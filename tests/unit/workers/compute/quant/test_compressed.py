"""compressed-tensors' packed layers against its own compressor: the same integers, scales, zero points, and the same
weights to the bit."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.compute.quant import compressed
from penstock.workers.compute.quant.quantized import QuantizedTensor


def upstream(
    rows: int, columns: int, bits: int, group_size: int | None, is_symmetric: bool, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What compressed-tensors keeps of a random layer, and the weights that it gets back out of that."""
    generator = torch.Generator().manual_seed(rows * columns + bits)
    strategy = {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=bits, symmetric=is_symmetric, **strategy)
    )
    num_groups = 1 if group_size is None else columns // group_size
    top = 2 ** (bits - 1)
    layer = {
        "weight": torch.randn(rows, columns, generator=generator).to(dtype),
        "weight_scale": (torch.rand(rows, num_groups, generator=generator) * 6 / top + 0.01).to(dtype),
        "weight_zero_point": torch.randint(-top, top, (rows, num_groups), generator=generator, dtype=torch.int8),
    }
    if is_symmetric:
        layer["weight_zero_point"].zero_()
    kept = PackedQuantizationCompressor.compress(layer, scheme)
    return kept, PackedQuantizationCompressor.decompress(kept, scheme)["weight"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "is_symmetric"), [(4, True), (4, False), (8, True)])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"), [(64, 256, 128), (24, 96, 32), (13, 64, 64), (20, 72, None)]
)
def test_what_compressed_tensors_packed_is_unpacked_to_the_same_weights(
    rows: int, columns: int, group_size: int | None, bits: int, is_symmetric: bool, dtype: torch.dtype
) -> None:
    kept, wanted = upstream(rows, columns, bits, group_size, is_symmetric, dtype)
    quantized = QuantizedTensor.empty(rows, columns, group_size or columns, bits)

    compressed.copy_groups(kept["weight_packed"], kept["weight_scale"], kept.get("weight_zero_point"), quantized)

    assert ("weight_zero_point" in kept) == (not is_symmetric)
    assert torch.equal(quantized.scale, kept["weight_scale"].float())
    assert torch.equal(quantized.dequantize().to(dtype), wanted)
    assert quantized.q.float().std() > 2  # all of the range is in use, not a corner of it


@given(st.sampled_from([4, 8]), st.integers(1, 5), st.integers(1, 41), st.integers(0, 2**31))
def test_any_integers_that_upstream_packs_are_had_back(bits: int, rows: int, columns: int, seed: int) -> None:
    top = 2 ** (bits - 1)
    values = torch.randint(-top, top, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))

    unpacked = compressed.unpack(pack_to_int32(values, bits), bits, columns)

    assert torch.equal(unpacked.to(torch.int16) - top, values.to(torch.int16))
