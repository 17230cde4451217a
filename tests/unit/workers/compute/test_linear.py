import pytest
import torch
from torch.nn import functional

from penstock.workers.compute.linear import TILE_ROWS, linear

SHAPES = [
    (576, 576),
    (192, 576),
    (960, 576),
    (1536, 576),
    (576, 1536),
    (49152, 576),
    (64, 64),
    (128, 32),
    (48, 33),
    (1, 7),
    (2048, 2048),
]
DTYPES = [torch.float32, torch.bfloat16]


def make(shape: tuple[int, int], dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[0] + shape[1])
    x, weight, bias = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((rows, shape[1]), shape, (shape[0],))
    )
    return x, weight, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_exact_row_has_the_same_bits_alone_and_at_every_place_of_a_batch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    num_rows = TILE_ROWS + 3
    x, weight, bias = make(shape, dtype, num_rows)
    alone = torch.cat([linear(row[None], weight, bias, exact=True) for row in x])

    for shift in range(num_rows):
        together = linear(x.roll(shift, 0), weight, bias, exact=True)
        assert torch.equal(together.roll(-shift, 0), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exact_row_does_not_see_its_neighbours(dtype: torch.dtype) -> None:
    x, weight, _ = make((192, 576), dtype, TILE_ROWS)
    expected = linear(x, weight, None, exact=True)[5]
    x[:5], x[6:] = float("nan"), 1e30

    assert torch.equal(linear(x, weight, None, exact=True)[5], expected)


def test_exact_takes_a_slice_of_a_wider_tensor_for_what_it_is() -> None:
    x, weight, bias = make((96, 64), torch.float32, 20)
    wide = torch.cat([torch.ones(20, 3), x, torch.ones(20, 5)], dim=1)

    assert torch.equal(linear(wide[:, 3:67], weight, bias, exact=True), linear(x, weight, bias, exact=True))


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("exact", [False, True])
def test_both_modes_compute_the_dense_layer(rows: int, exact: bool) -> None:
    x, weight, bias = make((96, 64), torch.float32, rows)

    for offset in (None, bias):
        torch.testing.assert_close(
            linear(x, weight, offset, exact), functional.linear(x, weight, offset), atol=1e-4, rtol=1e-4
        )
