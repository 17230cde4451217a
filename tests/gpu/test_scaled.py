"""Products of 8-bit floats: activations rounded row by row, and the product, against plain torch in float32."""

import pytest
import torch
from torch import Tensor

from penstock.workers.compute.quant.float8 import LARGEST, Float8Tensor
from penstock.workers.compute.triton.products.float8_matrix import (
    Float8Matrix,
    Product,
    can_multiply,
    has_sizes,
    multiply_scaled,
)
from penstock.workers.compute.triton.products.scale_rows import LANES, scale_rows
from tests.gpu.cases import DEVICE, NAN


def plain_product(x: Tensor, x_scale: Tensor, q: Tensor, q_scale: Tensor) -> Tensor:
    return ((x.float() * x_scale) @ (q.float().t() * q_scale)).bfloat16()


@pytest.fixture(scope="module")
def product() -> Product:
    """torch's product, or the same in plain operators where torch has none."""
    return multiply_scaled if can_multiply(DEVICE) else plain_product


def random_matrix(outputs: int, columns: int) -> Float8Tensor:
    weight = torch.randn(outputs, columns)
    scale = weight.abs().amax(1) / LARGEST
    return Float8Tensor((weight / scale[:, None]).to(torch.float8_e4m3fn), scale)


@pytest.mark.parametrize("columns", [16, 100, LANES, 2 * LANES + 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_rounded_in_units_of_their_largest_number(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(columns)
    wide = torch.full((5, columns + 64), NAN, dtype=dtype)
    wide[:, :columns] = torch.randn(5, columns) * torch.tensor([1e-6, 1e-2, 1.0, 30.0, 0.0])[:, None]
    x = wide.to(DEVICE)[:, :columns]

    q, scale = (result.cpu() for result in scale_rows(x))

    expected = wide[:, :columns].float().abs().amax(1, keepdim=True) * torch.tensor(1 / LARGEST)
    divisor = torch.where(expected > 0, expected, 1.0)
    torch.testing.assert_close(scale, expected, rtol=1e-6, atol=0)
    rounded = (wide[:, :columns].float() / divisor).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    assert torch.equal(q.view(torch.uint8) & 0x7F, rounded.view(torch.uint8) & 0x7F)
    assert torch.equal(q.float(), rounded.float())


@pytest.mark.parametrize("rows", [1, 17, 130])
def test_a_product_is_that_of_the_rounded_numbers(rows: int, product: Product) -> None:
    torch.manual_seed(rows)
    weight = random_matrix(48, 160)
    x = torch.randn(rows, 160).bfloat16()
    matrix = Float8Matrix(weight, DEVICE, product)

    result = matrix.multiply(x.to(DEVICE)).cpu()

    q, scale = (part.cpu() for part in scale_rows(x.to(DEVICE)))
    rounded = (q.float() * scale) @ (weight.q.float() * weight.scale[:, None]).t()
    whole = x.float() @ (weight.q.float() * weight.scale[:, None]).t()
    largest = float(whole.abs().max())
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), rounded, atol=1e-2 * largest, rtol=1e-2)
    torch.testing.assert_close(result.float(), whole, atol=5e-2 * largest, rtol=5e-2)
    assert matrix.nbytes == 48 * 160 + 48 * 4


def test_no_rows_at_all(product: Product) -> None:
    matrix = Float8Matrix(random_matrix(16, 32), DEVICE, product)

    assert matrix.multiply(torch.empty(0, 32, device=DEVICE, dtype=torch.bfloat16)).shape == (0, 16)
    assert scale_rows(torch.empty(0, 32, device=DEVICE))[0].shape == (0, 32)


@pytest.mark.parametrize(("shape", "is_taken"), [((32, 48), True), ((32, 40), False), ((24, 48), False)])
def test_sizes_are_multiples_of_16(shape: tuple[int, int], is_taken: bool) -> None:
    assert has_sizes(torch.Size(shape)) == is_taken
