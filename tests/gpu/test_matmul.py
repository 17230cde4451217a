"""Products with matrices of 4- and 8-bit integers against the same matrices dequantized on the host, in float32, over
random shapes."""

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.workers.compute.quant.quantized import QuantizedTensor, quantize, quantize_int8
from penstock.workers.compute.triton.products import grouped_matrix, matmul
from penstock.workers.compute.triton.products.grouped import TILE_ROWS
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix, capability_of
from penstock.workers.compute.triton.products.tiling import (
    BUCKETS,
    LEAST_COLUMNS,
    MANY_BEFORE,
    SMALL_ROWS,
    TILED_ROWS,
    Tile,
    bucket_of,
    part_blocks_of,
    tiles_of,
)
from tests.gpu.cases import DEVICE, IS_SHORT, NAN

SEEDS = range(8 if IS_SHORT else 12)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Error that is tolerated, as a share of the largest number of a result."""
LAUNCHED = [(torch.float32, tile) for tile in tiles_of(capability_of(DEVICE), 4, SMALL_ROWS)] + [
    (torch.bfloat16, tile)
    for tile in sorted(
        {*MANY_BEFORE[False], *(tile for rows in BUCKETS for tile in tiles_of(capability_of(DEVICE), 2, rows))}
    )
]
"""Tiles that a card may launch; those for little shared memory fit on any."""


LARGE = (
    [(4096, 14336, 128, 4, True), (6144, 4096, 32, 4, False), (32064, 4096, 32, 8, True)]
    if DEVICE.type == "cuda"
    else [(192, 1280, 128, 4, True), (140, 1024, 32, 4, False), (70, 768, 32, 8, True)]
)
"""Outputs, columns, group size, bits, and whether offsets are zero points: of models on a GPU, small in the
interpreter, which would take hours."""
LARGE_ROWS = (
    (1, 16, 17, 40, 64, 65, 128, 200, 256, 511, TILED_ROWS, TILED_ROWS + 1)
    if DEVICE.type == "cuda"
    else (1, 17, 40, 65)
)


def is_divided(matrix: GroupedMatrix, bucket: int) -> bool:
    """Whether the columns are divided among programs."""
    tile, columns = matrix.tiles(bucket)[0], matrix.shape[1]
    width = matmul.width_of(tile, matrix.tensor)
    blocks = -(-columns // width)
    return part_blocks_of(tile, bucket, matrix.shape[0], blocks, width) < blocks


class Shape(NamedTuple):
    rows: int
    outputs: int
    columns: int
    group_size: int
    bits: int
    has_zero: bool
    dtype: torch.dtype


def random_shape(seed: int) -> Shape:
    """Types, bits and group sizes go round; every fourth row is one group of any size; last groups are often short."""
    draw = random.Random(seed)
    size = (32, 64, 128, 0)[seed // 2 % 4]
    columns = draw.randint(1, 150) if not size else draw.randint(size, 3 * size)
    return Shape(
        draw.randint(1, 20),
        draw.randint(1, 150),
        columns,
        size or columns,
        8 if seed % 3 == 2 else 4,
        draw.random() < 0.5,
        tuple(TOLERANCE)[seed % 2],
    )


def make_quantized(shape: Shape, seed: int) -> QuantizedTensor:
    torch.manual_seed(seed)
    weight = torch.randn(shape.outputs, shape.columns)
    if shape.bits == 8:
        return quantize_int8(weight, shape.group_size)
    quantized = quantize(weight, shape.group_size)
    assert quantized.offset is not None
    return (
        quantized
        if shape.has_zero
        else QuantizedTensor(quantized.q, quantized.scale, quantized.offset + 0.013, quantized.group_size)
    )


def assert_close(result: Tensor, expected: Tensor, shape: Shape) -> None:
    assert result.dtype == shape.dtype
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(
        result.cpu().float(),
        expected,
        atol=tolerance * float(expected.abs().max()),
        rtol=tolerance,
        msg=lambda text: f"{shape}\n{text}",
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_few_rows_times_a_packed_matrix_is_what_the_dequantized_one_gives(seed: int) -> None:
    shape = random_shape(seed)
    quantized = make_quantized(shape, seed)
    wide = torch.full((shape.rows, shape.columns + 200), NAN, dtype=shape.dtype)
    wide[:, : shape.columns] = torch.randn(shape.rows, shape.columns)

    result = GroupedMatrix(quantized, shape.dtype, DEVICE).multiply(wide.to(DEVICE)[:, : shape.columns])

    assert_close(result, wide[:, : shape.columns].float() @ quantized.dequantize().T, shape)


@pytest.mark.parametrize("seed", SEEDS)
def test_some_hundred_rows_times_a_packed_matrix_is_what_the_dequantized_one_gives(seed: int) -> None:
    shape = random_shape(seed)._replace(rows=random.Random(seed).randint(SMALL_ROWS + 1, 300))
    quantized = make_quantized(shape, seed)
    wide = torch.full((shape.rows, shape.columns + 200), NAN, dtype=shape.dtype)
    wide[:, : shape.columns] = torch.randn(shape.rows, shape.columns)

    result = GroupedMatrix(quantized, shape.dtype, DEVICE).multiply(wide.to(DEVICE)[:, : shape.columns])

    assert_close(result, wide[:, : shape.columns].float() @ quantized.dequantize().T, shape)


@pytest.mark.parametrize(("dtype", "tile"), LAUNCHED)
def test_every_tile_gives_the_same(dtype: torch.dtype, tile: Tile) -> None:
    shape = Shape(tile.rows + 7, 3 * TILE_ROWS - 5, 1500, 64, 4, True, dtype)
    quantized = make_quantized(shape, 5)
    x = torch.randn(shape.rows, shape.columns).to(dtype)

    result = matmul.multiply(x.to(DEVICE), GroupedMatrix(quantized, dtype, DEVICE).tensor, tile)

    assert_close(result, x.float() @ quantized.dequantize().T, shape)


@pytest.mark.parametrize(("outputs", "columns", "size", "bits", "has_zero"), LARGE)
def test_matrices_of_models_multiply_as_their_weights(
    outputs: int, columns: int, size: int, bits: int, has_zero: bool
) -> None:
    shape = Shape(0, outputs, columns, size, bits, has_zero, torch.bfloat16)
    quantized = make_quantized(shape, 4)
    matrix = GroupedMatrix(quantized, shape.dtype, DEVICE)
    weight = quantized.dequantize().to(DEVICE)

    for rows in LARGE_ROWS:
        x = torch.randn(rows, columns).bfloat16().to(DEVICE)
        expected = (x.float() @ weight.T).cpu()
        bucket = bucket_of(rows)
        for kernel in (*(matrix.tiles(bucket) if bucket else ()), "dense"):
            assert_close(matrix.multiply_by(kernel, x), expected, shape._replace(rows=rows))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_long_row_is_divided_among_programs_for_some_hundred_rows_too(bits: int) -> None:
    shape = Shape(SMALL_ROWS + 3, 70, 900, 128, bits, True, torch.bfloat16)
    quantized = make_quantized(shape, 7)
    matrix = GroupedMatrix(quantized, shape.dtype, DEVICE)
    x = torch.randn(shape.rows, shape.columns).bfloat16()

    assert is_divided(matrix, 128)
    assert_close(matrix.multiply(x.to(DEVICE)), x.float() @ quantized.dequantize().T, shape)


@pytest.mark.parametrize("rows", [3, SMALL_ROWS + 3])
def test_parts_added_in_order_are_the_product(rows: int) -> None:
    shape = Shape(rows, 70, 900, 32, 4, True, torch.float32)
    matrix = GroupedMatrix(make_quantized(shape, 9), shape.dtype, DEVICE)
    x = torch.randn(shape.rows, shape.columns).to(DEVICE)

    parts = matrix.multiply_in_parts(x)

    assert parts.dtype == torch.float32
    assert len(parts) > 1
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    assert torch.equal(total, matrix.multiply(x))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_in_a_bucket_a_row_gets_the_same_bits_whatever_rows_are_beside_it(dtype: torch.dtype) -> None:
    shape = Shape(128, 100, 500, 32, 4, True, dtype)
    matrix = GroupedMatrix(make_quantized(shape, 8), dtype, DEVICE)
    x = torch.randn(shape.rows, shape.columns).to(dtype).to(DEVICE)

    whole = matrix.multiply(x)

    assert torch.equal(matrix.multiply(x), whole)
    if DEVICE.type == "cpu" and dtype == torch.float32:
        # in the interpreter numpy multiplies a tile, and on some CPUs rounds a row by its place there
        assert_close(matrix.multiply(x[40:110]), whole[40:110], shape)
    else:
        assert torch.equal(matrix.multiply(x[40:110]), whole[40:110])


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_rows_that_are_looked_up_are_those_of_the_dequantized_matrix(seed: int) -> None:
    shape = random_shape(seed)
    quantized = make_quantized(shape, seed)
    ids = torch.randint(shape.outputs, (5,))

    assert_close(GroupedMatrix(quantized, shape.dtype, DEVICE).rows(ids.to(DEVICE)), quantized.dequantize()[ids], shape)


@pytest.mark.parametrize("seed", SEEDS[1::2])
def test_a_slice_of_the_matrix_is_dequantized(seed: int) -> None:
    shape = random_shape(seed)._replace(outputs=2 * TILE_ROWS + 5)
    quantized = make_quantized(shape, seed)
    matrix = GroupedMatrix(quantized, shape.dtype, DEVICE)

    assert_close(matrix.dense(TILE_ROWS, shape.outputs), quantized.dequantize()[TILE_ROWS:], shape)
    assert_close(matrix.dense(0, TILE_ROWS), quantized.dequantize()[:TILE_ROWS], shape)


@pytest.mark.parametrize("rows_a_slice", [1, 3])
def test_many_rows_are_multiplied_slice_by_slice(rows_a_slice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(TILED_ROWS + 1, 3 * TILE_ROWS - 7, 80, 32, 4, True, torch.float32)
    quantized = make_quantized(shape, 1)
    x = torch.randn(shape.rows, shape.columns)
    monkeypatch.setattr(grouped_matrix, "SLICE_ELEMENTS", rows_a_slice * TILE_ROWS * shape.columns)

    assert_close(
        GroupedMatrix(quantized, shape.dtype, DEVICE).multiply(x.to(DEVICE)), x @ quantized.dequantize().T, shape
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_long_row_is_read_by_several_programs(dtype: torch.dtype) -> None:
    shape = Shape(3, 70, 2 * LEAST_COLUMNS + 40, 32, 4, True, dtype)
    quantized = make_quantized(shape, 2)
    matrix = GroupedMatrix(quantized, dtype, DEVICE)
    x = torch.randn(shape.rows, shape.columns).to(dtype)

    assert is_divided(matrix, 16)
    assert_close(matrix.multiply(x.to(DEVICE)), x.float() @ quantized.dequantize().T, shape)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_gets_the_same_beside_other_rows(bits: int) -> None:
    shape = Shape(9, 40, 100, 32, bits, True, torch.float32)
    matrix = GroupedMatrix(make_quantized(shape, 3), shape.dtype, DEVICE)
    x = torch.randn(shape.rows, shape.columns).to(DEVICE)

    torch.testing.assert_close(matrix.multiply(x)[4:5], matrix.multiply(x[4:5]), atol=1e-5, rtol=1e-5)


def test_no_rows_at_all() -> None:
    shape = Shape(0, 40, 64, 32, 8, False, torch.float32)
    matrix = GroupedMatrix(make_quantized(shape, 4), shape.dtype, DEVICE)

    assert matrix.multiply(torch.empty(0, 64, device=DEVICE)).shape == (0, 40)
    assert matrix.rows(torch.empty(0, dtype=torch.int64, device=DEVICE)).shape == (0, 64)


def test_the_random_shapes_cover_bits_zeros_short_groups_and_rows_of_one_group() -> None:
    shapes = [random_shape(seed) for seed in SEEDS]

    assert {(shape.bits, shape.dtype) for shape in shapes} == {(bits, dtype) for bits in (4, 8) for dtype in TOLERANCE}
    assert {shape.has_zero for shape in shapes if shape.bits == 4} == {True, False}
    assert {32, 64, 128} < {shape.group_size for shape in shapes}
    assert any(shape.columns % shape.group_size for shape in shapes)
    assert any(shape.group_size == shape.columns for shape in shapes)
    assert any(shape.outputs > 2 * TILE_ROWS for shape in shapes)


def run_assembly(assembly: str, word: int) -> list[int]:
    """The registers $0 to $3 after the assembly with $4 = word, by what the PTX ISA says of its instructions."""
    registers = {"$4": word}

    def value_of(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in assembly.splitlines():
        name, _, rest = line.strip().strip(";{}").partition(" ")
        if name in ("and.b32", "shr.b32", "prmt.b32"):
            target, *operands = (operand.strip() for operand in rest.split(","))
            first, second, *more = map(value_of, operands)
            if name == "and.b32":
                registers[target] = first & second
            elif name == "shr.b32":
                registers[target] = first >> second
            else:
                sources = (first | second << 32).to_bytes(8, "little")
                chosen = bytes(sources[more[0] >> 4 * place & 7] for place in range(4))
                registers[target] = int.from_bytes(chosen, "little")
    return [registers[f"${place}"] for place in range(4)]


def numbers_of(assembly: str, packed: Tensor) -> Tensor:
    """bfloat16 [2, 4] that the assembly makes of four bytes."""
    words = run_assembly(assembly, int.from_bytes(bytes(packed.tolist()), "little"))
    numbers = torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)
    return numbers.view(torch.bfloat16).view(2, 4)


@pytest.mark.parametrize("seed", range(4))
def test_the_assembly_makes_numbers_of_halves_in_their_order(seed: int) -> None:
    packed = torch.randint(256, (4,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))

    low, high = numbers_of(matmul.FOUR_BITS.value, packed)

    assert torch.equal(low - matmul.BASE, (packed & 15).bfloat16())
    assert torch.equal(high - matmul.BASE, (packed >> 4).bfloat16())


@pytest.mark.parametrize("start", range(0, 256, 4))
def test_the_assembly_makes_numbers_of_bytes_in_their_order(start: int) -> None:
    packed = torch.arange(start, start + 4, dtype=torch.uint8)

    rest, sign = numbers_of(matmul.EIGHT_BITS.value, packed)

    assert torch.equal(rest - sign, packed.view(torch.int8).bfloat16())
