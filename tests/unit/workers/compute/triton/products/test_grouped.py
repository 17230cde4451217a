import pytest
import torch
from torch import Tensor

from penstock.workers.compute.quant.quantized import QuantizedTensor, quantize, quantize_int8
from penstock.workers.compute.triton.products.grouped import (
    MOST_ZERO,
    TILE_ROWS,
    GroupedTensor,
    chunk_columns,
    is_covered,
    lay_out_groups,
    read_back,
)

CPU = torch.device("cpu")


def packed(quantized: QuantizedTensor) -> GroupedTensor:
    return lay_out_groups(quantized, torch.float32, CPU)


def element(matrix: GroupedTensor, row: int, column: int) -> int:
    """The element, read from where the module's docstring says that it lies."""
    chunk, of_chunk = divmod(column, chunk_columns(matrix.bits))
    half, of_half = divmod(of_chunk, 32)
    w, of_w = divmod(row % TILE_ROWS, 16)
    h, r = divmod(of_w, 8)
    j, of_j = divmod(of_half, 16)
    i, of_i = divmod(of_j, 8)
    c, p = divmod(of_i, 2)
    byte = matrix.q[row // TILE_ROWS, chunk, 32 * w + 4 * r + c, 8 * j + 4 * i + 2 * h + p]
    return int(byte.view(torch.int8)) if matrix.bits == 8 else int(byte) >> 4 * half & 15


@pytest.mark.parametrize("bits", [4, 8])
def test_every_element_is_where_the_layout_says(bits: int) -> None:
    weight = torch.randn(TILE_ROWS + 3, 150)
    quantized = quantize(weight, 64) if bits == 4 else quantize_int8(weight, 64)

    matrix = packed(quantized)

    assert all(
        element(matrix, row, column) == quantized.q[row, column]
        for row in (0, 7, 8, 29, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 2)
        for column in range(150)
    )


@pytest.mark.parametrize(
    ("columns", "group_size", "run", "width"),
    [
        (4096, 128, 128, 128),
        (14336, 64, 64, 128),
        (4096, 32, 32, 128),
        (576, 128, 128, 128),
        (130, 128, 64, 64),
        (2048, 2048, 128, 128),
    ],
)
def test_a_run_is_as_long_as_groups_and_columns_allow(columns: int, group_size: int, run: int, width: int) -> None:
    matrix = packed(quantize(torch.randn(2, columns), group_size))

    assert (matrix.run, matrix.width) == (run, width)
    assert matrix.num_chunks * chunk_columns(4) % width == 0


def test_half_a_byte_is_kept_for_a_weight_and_two_bytes_for_a_scale() -> None:
    matrix = packed(quantize(torch.randn(TILE_ROWS, 4096), 128))

    assert matrix.q.nbytes == TILE_ROWS * 4096 // 2
    assert matrix.nbytes == matrix.q.nbytes + 2 * 2 * TILE_ROWS * 32


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(0.5, torch.float16), (2.0**-30, torch.bfloat16), (1 / 3, torch.float32)],
)
def test_scales_are_kept_as_short_as_they_lose_nothing(scale: float, dtype: torch.dtype) -> None:
    quantized = QuantizedTensor(torch.zeros(2, 32, dtype=torch.int8), torch.full((2, 1), scale), None, 32)

    matrix = packed(quantized)

    assert matrix.scale.dtype == dtype
    assert matrix.second_kind == "none"
    assert torch.equal(matrix.scale[:, :2].float(), quantized.scale.T)


def test_integer_zero_points_are_kept_as_such_and_other_offsets_as_they_are() -> None:
    quantized = quantize(torch.randn(2, 32), 32)
    shifted = QuantizedTensor(quantized.q, quantized.scale, torch.full_like(quantized.scale, 0.013), 32)

    assert packed(quantized).second_kind == "zero"
    assert packed(shifted).second_kind == "offset"
    assert torch.equal(stored(packed(quantized)), quantized.zero)
    assert torch.equal(stored(packed(shifted)), torch.full((2, 1), 0.013))


def stored(matrix: GroupedTensor) -> Tensor:
    return matrix.second[:, :2].float().T


@pytest.mark.parametrize(
    ("columns", "group_size", "is_taken"),
    [(64, 32, True), (40, 40, True), (40, 48, True), (96, 48, False), (64, 16, False)],
)
def test_groups_of_whole_runs_and_rows_of_one_group_are_covered(columns: int, group_size: int, is_taken: bool) -> None:
    assert is_covered(quantize(torch.randn(2, columns), group_size)) == is_taken


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "group_size"), [(300, 64), (256, 128), (70, 70)])
def test_a_matrix_that_is_read_back_is_what_was_laid_out(bits: int, columns: int, group_size: int) -> None:
    weight = torch.randn(TILE_ROWS + 9, columns)
    quantized = quantize(weight, group_size) if bits == 4 else quantize_int8(weight, group_size)

    found = read_back(packed(quantized))

    assert torch.equal(found.q, quantized.q)
    assert torch.equal(found.scale, quantized.scale)
    assert found.group_size == group_size
    if quantized.offset is None:
        assert found.offset is None
    else:
        assert torch.equal(found.offset, quantized.offset)


def test_zero_points_that_are_not_small_are_kept_as_offsets() -> None:
    quantized = quantize(torch.randn(2, 32), 32)
    far = QuantizedTensor(quantized.q, quantized.scale, -(MOST_ZERO + 1.0) * quantized.scale, 32)

    assert packed(far).second_kind == "offset"
