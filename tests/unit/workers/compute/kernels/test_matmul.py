"""Products with packed matrices: every path of this machine against a twin in float64 over the same roundings, over
shapes with odd ends."""

import math
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.kernels.matmul import Kind, Level, MatmulKernels, PackedMatrix, Rounding, is_group
from penstock.workers.compute.quant.quantized import QuantizedTensor, quantize, quantize_int8
from tests.unit.workers.built_kernels import built_kernels

SHAPES = [
    (16, 32, 32),
    (64, 256, 64),
    (33, 100, 32),
    (36, 300, 32),
    (7, 96, 128),
    (50, 576, 128),
    (48, 40, 40),
    (1, 2080, 1024),
]
"""Rows, columns, columns of a group: short last groups, one group only, rows that are no multiple of 16, more columns
than are dequantized at once."""
COUNTS = [1, 2, 3, 4, 7, 9, 11, 19, 23, 24, 70]
MOST_STEPS = {Rounding.TWO_TERMS: 127 * 128, Rounding.ONE_TERM: 127}
"""Steps to which activations are rounded, up to a group's largest one."""


def dense_rows(level: Level, rounding: Rounding) -> float:
    """Rows from which on activations are kept in bfloat16 although another rounding is set."""
    if level >= Level.AMX:
        return 24
    return 16 if level is Level.AVX512 and rounding is Rounding.TWO_TERMS else math.inf


@pytest.fixture(scope="module")
def matmul() -> MatmulKernels:
    return built_kernels().matmul


@pytest.fixture(params=list(Level), ids=lambda level: level.name.lower())
def level(matmul: MatmulKernels, request: pytest.FixtureRequest) -> Iterator[Level]:
    if not matmul.set_level(request.param):
        pytest.skip(f"this CPU does not have {request.param.name}")
    yield request.param
    matmul.set_level(None)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def quantized_of(kind: Kind, rows: int, columns: int, group_size: int) -> QuantizedTensor:
    weight = random(rows, columns) * 0.05
    if kind is Kind.INT8:
        return quantize_int8(weight, group_size)
    quantized = quantize(weight, group_size)
    # offsets that are no multiples of the scale, in half of the matrices
    return (
        quantized
        if rows % 2
        else QuantizedTensor(quantized.q, quantized.scale, random(*quantized.scale.shape).half().float(), group_size)
    )


def packed(matmul: MatmulKernels, kind: Kind, rows: int, columns: int, group_size: int) -> tuple[PackedMatrix, Tensor]:
    """The matrix, and what it holds: float32 [N, K]."""
    if kind is Kind.BF16:
        weight = random(rows, columns).bfloat16()
        return matmul.pack_bf16(weight), weight.float()
    quantized = quantized_of(kind, rows, columns, group_size)
    if quantized.offset is None:
        return matmul.pack_int8(quantized.q, quantized.scale, group_size), quantized.dequantize()
    return matmul.pack_int4(quantized.q, quantized.scale, quantized.offset, group_size), quantized.dequantize()


def in_steps(x: Tensor, group_size: int, rounding: Rounding = Rounding.TWO_TERMS) -> Tensor:
    """x [T, K], rounded per row; with one term, per row and group."""
    groups = grouped(x, group_size, rounding)
    step = step_of(groups, rounding)
    rounded = torch.where(step == 0, 0.0, (groups / step).round() * step)
    return rounded.view(len(x), -1)[:, : x.shape[1]]


def step_of(groups: Tensor, rounding: Rounding) -> Tensor:
    """The step of each of groups [T, G, columns]: [T, G, 1]."""
    if rounding is not Rounding.OUTLIERS:
        return groups.abs().amax(-1, keepdim=True) / MOST_STEPS[rounding]
    groups = (groups.contiguous().view(torch.int32) & ~7).view(torch.float32)  # the last bits tell words apart
    words = functional.pad(groups, (0, -groups.shape[2] % 32)).unflatten(2, (-1, 8, 4)).abs().amax(-1)
    largest = words.topk(2, -1).values.amax(2)  # of each block of 32, then of all blocks of the group
    return torch.maximum(
        largest[..., :1] / MOST_STEPS[Rounding.TWO_TERMS], largest[..., 1:] / MOST_STEPS[Rounding.ONE_TERM]
    )


def grouped(x: Tensor, group_size: int, rounding: Rounding) -> Tensor:
    """x [T, K] by what shares a step, filled up with zeros: [T, groups, columns]."""
    columns = x.shape[1] if rounding is Rounding.TWO_TERMS else group_size
    return functional.pad(x, (0, -x.shape[1] % columns)).view(len(x), -1, columns)


def steps_of_ties(x: Tensor, group_size: int, rounding: Rounding) -> Tensor:
    """A step of the rounding for each activation [T, K] that lies halfway between two integers, as far as float32 can
    tell: it may go either way, and of one term a step is a 127th of the group's largest. 0 for all others."""
    groups = grouped(x, group_size, rounding)
    step = step_of(groups, rounding)
    scaled = groups / step.clamp(min=1e-30)
    is_tie = ((scaled - scaled.floor()) - 0.5).abs() <= 5e-7 * scaled.abs().amax(-1, keepdim=True)
    return torch.where(is_tie, step, 0.0).view(len(x), -1)[:, : x.shape[1]]


def in_effect(rounding: Rounding, level: Level) -> Rounding:
    """What becomes of rows at a level."""
    least = {Rounding.OUTLIERS: Level.VNNI, Rounding.ONE_TERM: Level.AVX2}.get(rounding, Level.PORTABLE)
    return rounding if level >= least else Rounding.TWO_TERMS


def twin(x: Tensor, weight: Tensor, group_size: int, level: Level, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """The product in float64, and how far from it a product by float32 may be: a rounding for each partial sum, and
    what ties of the activations' rounding make."""
    ties = torch.zeros_like(x)
    rounding = in_effect(rounding, level)
    if group_size and rounding is not Rounding.NONE and len(x) < dense_rows(level, rounding):
        ties = steps_of_ties(x, group_size, rounding)
        x = in_steps(x, group_size, rounding)
    elif level >= Level.AVX512:
        x, weight = x.bfloat16(), weight.bfloat16()
    magnitudes = weight.double().abs().t()
    terms = x.double().abs() @ magnitudes
    return x.double() @ weight.double().t(), 2e-6 * terms + 1e-4 * terms.mean() + ties.double() @ magnitudes


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("kind", list(Kind))
def test_products_are_those_of_the_same_roundings(
    matmul: MatmulKernels, level: Level, kind: Kind, rounding: Rounding
) -> None:
    for shape in SHAPES:
        matrix, weight = packed(matmul, kind, *shape)
        for count in COUNTS[: 6 if level is Level.PORTABLE else None]:
            x = random(count, shape[1])
            expected, allowed = twin(x, weight, matrix.group_size, level, rounding)

            assert matrix.shape == shape[:2]
            error = (matmul.multiply(x, matrix, rounding, threads=2).double() - expected).abs()
            assert bool((error <= allowed).all()), (shape, count)


@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.name.lower())
@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 400),
    group=st.sampled_from((32, 64, 96, 128, 256, None)),
    count=st.integers(1, 40),
    kind=st.sampled_from(list(Kind)),
    rounding=st.sampled_from(list(Rounding)),
)
@example(rows=2, columns=267, group=128, count=12, kind=Kind.INT8, rounding=Rounding.ONE_TERM)
def test_products_of_any_shape_are_those_of_the_same_roundings(
    matmul: MatmulKernels,
    level: Level,
    rows: int,
    columns: int,
    group: int | None,
    count: int,
    kind: Kind,
    rounding: Rounding,
) -> None:
    """group: None is one of all columns."""
    if not matmul.set_level(level):
        pytest.skip(f"this CPU does not have {level.name}")
    try:
        matrix, weight = packed(matmul, kind, rows, columns, group or columns)
        x = random(count, columns)
        found = matmul.multiply(x, matrix, rounding, threads=2).double()
    finally:
        matmul.set_level(None)

    expected, allowed = twin(x, weight, (group or columns) if matrix.group_size else 0, level, rounding)
    assert bool(((found - expected).abs() <= allowed).all())


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("group", [32, 64])
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    matmul: MatmulKernels, level: Level, group: int, kind: Kind, rounding: Rounding
) -> None:
    matrix, _ = packed(matmul, kind, 20, 1120, group)
    x = random(70, 1120) * torch.exp(2 * random(70, 1121)[:, :1120])  # some far larger than their neighbours
    counts: list[tuple[int, ...]] = [(1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 15), (24, 31, 33, 35, 41, 70)]
    if dense_rows(level, rounding) == math.inf or (level is Level.AVX512 and kind is Kind.BF16):
        counts = [counts[0] + counts[1]]

    for family in counts:
        together = matmul.multiply(x[-family[-1] :], matrix, rounding, threads=2)
        for count in family:
            assert torch.equal(matmul.multiply(x[-count:], matrix, rounding, threads=1), together[-count:])


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("count", [1, 3, 30])
@pytest.mark.parametrize("kind", list(Kind))
def test_a_row_that_is_not_finite_stays_its_own_affair(
    matmul: MatmulKernels, level: Level, kind: Kind, count: int, group: int
) -> None:
    matrix, _ = packed(matmul, kind, 33, 100, group)
    place = min(1, count - 1)
    x = random(count, 100)
    for rounding in Rounding:
        expected = matmul.multiply(x, matrix, rounding, threads=1)
        for value in (torch.nan, torch.inf):
            spoilt = x.clone()
            spoilt[place, 50] = value
            found = matmul.multiply(spoilt, matrix, rounding, threads=1)

            assert not found[place].isfinite().any()
            # and what is left of it in freed memory is not read by the next
            others = [row for row in range(count) if row != place]
            assert torch.equal(found[others], expected[others])
            assert torch.equal(matmul.multiply(x, matrix, rounding, threads=1), expected)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_any_number_of_threads_gives_the_same_bits(matmul: MatmulKernels, level: Level, threads: int) -> None:
    for kind in Kind:
        matrix, _ = packed(matmul, kind, 411, 576, 32)
        x = random(19, 576)  # eight and eleven side by side, prepared in pieces of sixteen
        alone = matmul.multiply(x, matrix, Rounding.ONE_TERM, threads=1)

        assert torch.equal(matmul.multiply(x, matrix, Rounding.ONE_TERM, threads=threads), alone)


def test_two_threads_may_multiply_at_once(matmul: MatmulKernels, level: Level) -> None:
    matrices = [packed(matmul, kind, 80, 576, 32)[0] for kind in Kind]
    inputs = [random(count, 576) for count in (1, 9, 40)]
    expected = [matmul.multiply(x, matrix, Rounding.TWO_TERMS, threads=1) for matrix in matrices for x in inputs]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(5):
            found = [matmul.multiply(x, matrix, Rounding.TWO_TERMS, threads=2) for matrix in matrices for x in inputs]
            wrong.extend(
                index
                for index, (mine, theirs) in enumerate(zip(found, expected, strict=True))
                if not torch.equal(mine, theirs)
            )

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert wrong == []


def test_a_slice_of_wider_rows_and_bfloat16_are_taken_for_what_they_are(matmul: MatmulKernels, level: Level) -> None:
    matrix, _ = packed(matmul, Kind.INT4, 32, 64, 32)
    wide = random(9, 100).bfloat16().float()

    assert torch.equal(
        matmul.multiply(wide[:, 20:84], matrix, Rounding.TWO_TERMS, 1),
        matmul.multiply(wide[:, 20:84].contiguous(), matrix, Rounding.TWO_TERMS, 1),
    )
    assert torch.equal(
        matmul.multiply(wide[:, 20:84].bfloat16(), matrix, Rounding.TWO_TERMS, 1),
        matmul.multiply(wide[:, 20:84], matrix, Rounding.TWO_TERMS, 1),
    )
    assert matmul.multiply(wide[:0, 20:84], matrix, Rounding.TWO_TERMS, 1).shape == (0, 32)


@pytest.mark.parametrize("kind", list(Kind))
def test_rows_are_read_as_they_were_packed(matmul: MatmulKernels, kind: Kind) -> None:
    matrix, weight = packed(matmul, kind, 33, 100, 32)

    rows = torch.tensor([32, 0, 17, 17])
    torch.testing.assert_close(matmul.read_rows(matrix, rows), weight[rows], rtol=1e-6, atol=0)
    assert matmul.read_rows(matrix, rows[:0]).shape == (0, 100)
    for wrong in (-1, 33):
        with pytest.raises(IndexError, match="33"):
            matmul.read_rows(matrix, torch.tensor([wrong]))


@pytest.mark.parametrize("size", [1e-7, 1.0, 3e5])
def test_scales_of_any_size_keep_their_digits(matmul: MatmulKernels, level: Level, size: float) -> None:
    q = torch.randint(0, 16, (16, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([[1.0, -0.5]]).repeat(16, 1) * size
    scale[3] = 0
    quantized = QuantizedTensor(q, scale.bfloat16().float(), (random(16, 2) * size).bfloat16().float(), 32)
    assert quantized.offset is not None
    matrix = matmul.pack_int4(quantized.q, quantized.scale, quantized.offset, 32)

    torch.testing.assert_close(
        matmul.read_rows(matrix, torch.arange(16)), quantized.dequantize(), rtol=1e-5, atol=1e-5 * size
    )
    x = random(5, 64)
    torch.testing.assert_close(
        matmul.multiply(x, matrix, Rounding.TWO_TERMS, 1),
        in_steps(x, 32) @ quantized.dequantize().t(),
        rtol=1e-4,
        atol=1e-3 * size,
    )


def test_a_large_activation_leaves_its_neighbours_their_digits(matmul: MatmulKernels, level: Level) -> None:
    quantized = quantize(random(16, 64) * 0.05, 32)
    matrix = (
        matmul.pack_int4(quantized.q, quantized.scale, quantized.offset, 32) if quantized.offset is not None else None
    )
    assert matrix is not None
    x = random(3, 64)
    x[:, 5] = 60.0
    expected = x @ quantized.dequantize().t()

    def error(rounding: Rounding) -> float:
        found = matmul.multiply(x, matrix, rounding, 1)
        return float(((found - expected).abs() / (x.abs() @ quantized.dequantize().abs().t())).max())

    assert error(Rounding.TWO_TERMS) < 1e-3
    assert level < Level.VNNI or error(Rounding.OUTLIERS) < 0.3 * error(Rounding.ONE_TERM)
    x[:, 6], x[:, 40] = -60.0, 1000.0  # of the same word, and of another block
    expected = x @ quantized.dequantize().t()
    assert level < Level.VNNI or error(Rounding.OUTLIERS) < 0.3 * error(Rounding.ONE_TERM)
    assert level < Level.AVX2 or error(Rounding.ONE_TERM) > 5e-3, "what one term loses"


def test_sums_of_the_longest_groups_fit(matmul: MatmulKernels, level: Level) -> None:
    columns = 2080
    ones = torch.ones(2, columns)
    int8 = matmul.pack_int8(torch.full((16, columns), 127, dtype=torch.int8), torch.ones(16, 1), columns)
    int4 = matmul.pack_int4(
        torch.full((16, columns), 15, dtype=torch.uint8), torch.ones(16, 1), torch.zeros(16, 1), columns
    )

    for rounding in (Rounding.TWO_TERMS, Rounding.OUTLIERS):
        found = matmul.multiply(ones, int8, rounding, 1), matmul.multiply(-ones, int4, rounding, 1)
        for sums, expected in zip(found, (127.0 * columns, -15.0 * columns), strict=True):
            assert torch.allclose(sums, torch.full((2, 16), expected), rtol=1e-5)


def test_activations_next_to_nothing_count_as_none(matmul: MatmulKernels, level: Level) -> None:
    matrix, _ = packed(matmul, Kind.INT4, 16, 64, 32)

    for rounding in (Rounding.TWO_TERMS, Rounding.OUTLIERS):
        for count in (1, 2):
            assert matmul.multiply(torch.full((count, 64), 1e-40), matrix, rounding, 1).abs().max() < 1e-30


def test_zero_points_are_kept_exactly(matmul: MatmulKernels) -> None:
    quantized = quantize(random(16, 128) * 0.02, 64)
    assert quantized.offset is not None
    matrix = matmul.pack_int4(quantized.q, quantized.scale, quantized.offset, 64)

    assert torch.equal(matmul.read_rows(matrix, torch.arange(16)), quantized.dequantize())


def test_packed_weights_take_their_bits_and_four_bytes_a_group(matmul: MatmulKernels) -> None:
    int4, int8, bf16 = (packed(matmul, kind, 64, 1536, 128)[0] for kind in (Kind.INT4, Kind.INT8, Kind.BF16))

    assert int4.nbytes == 64 * 1536 // 2 + 64 * 12 * 4
    assert int8.nbytes == 64 * 1536 + 64 * 12 * 4
    assert bf16.nbytes == 64 * 1536 * 2


def test_levels_go_up_to_the_best_of_the_cpu(matmul: MatmulKernels) -> None:
    best = matmul.level()

    taken = [
        level
        for level in (Level.PORTABLE, Level.AVX2, Level.VNNI, Level.AVX512, Level.AMX)
        if matmul.set_level(level) and matmul.level() is level
    ]
    matmul.set_level(None)

    assert taken == list(Level)[: best + 1]
    assert matmul.level() is best


def test_groups_are_multiples_of_32_or_all_columns() -> None:
    assert [is_group(size, 100) for size in (32, 128, 100, 48, 16)] == [True, True, True, False, False]
