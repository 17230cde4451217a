"""4-bit matrices: rounding, the short last group, and products against the dequantized matrix."""

import pytest
import torch

from penstock.workers.compute.kernels.build import load_kernels
from penstock.workers.compute.kernels.matmul import Level
from penstock.workers.compute.linear import linear
from penstock.workers.compute.quant.quantized import QuantizedTensor, TorchQuantizedMatrix, quantize, quantize_int8


def random_weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns)) * 0.05


@pytest.mark.parametrize(("columns", "group_size"), [(256, 128), (576, 128), (576, 64), (96, 32), (40, 32)])
def test_every_weight_is_within_half_a_step_of_its_integer(columns: int, group_size: int) -> None:
    weight = random_weight(16, columns)
    quantized = quantize(weight, group_size)
    steps = quantized.scale.repeat_interleave(group_size, dim=1)[:, :columns]

    assert quantized.scale.shape == (16, -(-columns // group_size))
    # the range is rounded to 15 steps of a float16, its ends may lie a little outside
    assert bool(((quantized.dequantize() - weight).abs() <= 0.51 * steps + 1e-3 * steps * 15).all())


@pytest.mark.parametrize(("columns", "group_size"), [(576, 32), (40, 32), (96, 96)])
def test_in_8_bits_every_weight_is_within_half_a_step_of_its_integer(columns: int, group_size: int) -> None:
    weight = random_weight(16, columns)
    quantized = quantize_int8(weight, group_size)
    steps = quantized.scale.repeat_interleave(group_size, dim=1)[:, :columns]

    assert (quantized.bits, quantized.q.dtype, quantized.offset) == (8, torch.int8, None)
    # the float16 scale may be a little short of the largest weight, which is then cut
    assert bool(((quantized.dequantize() - weight).abs() <= 0.51 * steps + 1e-3 * steps * 127).all())


def test_zero_points_are_had_back_from_offsets() -> None:
    scale = torch.rand(16, 3).half().float()
    zero = torch.randint(0, 16, (16, 3)).float()
    scale[0, 0] = zero[0, 0] = 0

    assert torch.equal(QuantizedTensor(torch.zeros(16, 96, dtype=torch.uint8), scale, -zero * scale, 32).zero, zero)


def test_weights_on_the_lattice_stay_as_they_are() -> None:
    q = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    q[:, 0], q[:, 1] = 0, 15  # the whole range is in use
    lattice = QuantizedTensor(q, torch.full((16, 1), 0.0078125), torch.full((16, 1), -7 * 0.0078125), 64)

    again = quantize(lattice.dequantize(), 64)

    assert torch.equal(again.q, q)
    assert torch.equal(again.zero, lattice.zero)
    assert torch.equal(again.dequantize(), lattice.dequantize())


@pytest.mark.parametrize("value", [0.0, 0.02, -0.02])
def test_a_group_of_one_value_is_kept(value: float) -> None:
    weight = torch.full((16, 64), value)

    assert torch.allclose(quantize(weight, 64).dequantize(), weight, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 40])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"), [(64, 256, 128), (48, 576, 128), (16, 96, 32), (24, 64, 32), (16, 40, 32)]
)
def test_products_are_those_of_the_dequantized_matrix(
    rows: int, columns: int, group_size: int, num_tokens: int
) -> None:
    quantized = quantize(random_weight(rows, columns), group_size)
    x = torch.randn(num_tokens, columns, generator=torch.Generator().manual_seed(1))
    exact = x @ quantized.dequantize().t()

    rough = linear(x.bfloat16(), TorchQuantizedMatrix(quantized, torch.bfloat16), None, exact=False)

    assert rough.dtype == torch.bfloat16
    assert torch.allclose(rough.float(), exact, atol=0.02 * exact.abs().max().item())
    assert torch.allclose(
        linear(x, TorchQuantizedMatrix(quantized, torch.float32), None, exact=False), exact, atol=1e-5
    )


def test_without_kernels_of_ours_products_are_those_of_torchs_operator() -> None:
    kernels = load_kernels()
    assert kernels is not None
    quantized, x = (
        quantize(random_weight(64, 256), 64),
        torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16(),
    )
    ours = TorchQuantizedMatrix(quantized, torch.bfloat16)
    kernels.matmul.set_level(Level.PORTABLE)
    try:
        theirs = TorchQuantizedMatrix(quantized, torch.bfloat16)
    finally:
        kernels.matmul.set_level(None)

    assert torch.allclose(theirs.multiply(x).float(), ours.multiply(x).float(), atol=0.05)
    assert theirs.nbytes == ours.nbytes == 64 * 256 // 2 + 64 * 4 * 4


def test_a_bias_is_added() -> None:
    quantized, bias = quantize(random_weight(16, 64), 32), torch.arange(16).bfloat16()
    x, matrix = torch.zeros(2, 64, dtype=torch.bfloat16), TorchQuantizedMatrix(quantized, torch.bfloat16)

    assert torch.equal(linear(x, matrix, bias, exact=False), bias.expand(2, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_exact_mode_a_row_is_the_same_whatever_is_beside_it(dtype: torch.dtype) -> None:
    matrix = TorchQuantizedMatrix(quantize(random_weight(64, 576), 128), dtype)
    x = torch.randn(37, 576, generator=torch.Generator().manual_seed(2)).to(dtype)

    together = linear(x, matrix, None, exact=True)

    assert all(
        torch.equal(linear(x[row : row + 1], matrix, None, exact=True)[0], together[row]) for row in range(len(x))
    )


def test_packed_weights_take_little_more_than_half_a_byte() -> None:
    matrix = TorchQuantizedMatrix(quantize(random_weight(64, 1536), 128), torch.bfloat16)

    assert matrix.nbytes <= 0.54 * 64 * 1536
