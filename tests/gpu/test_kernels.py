"""The Triton kernels against plain torch in float32, over random shapes."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.triton import attention
from penstock.workers.compute.triton.attention import attend_planned
from penstock.workers.compute.triton.decode import SPLIT_TOKENS
from penstock.workers.compute.triton.plan import FEW_TOKENS
from penstock.workers.compute.triton.store import store
from tests.gpu.cases import DEVICE, NAN, SHORT, TOLERANCE, Case, Shape, make_case, planned, random_shape

SEEDS = range(25 if DEVICE.type == "cpu" else 50)
"""The interpreter takes a second for each."""
NEW_TOKENS = 6
"""Most of one sequence, where each of them is a program for every head."""


def attended(case: Case, exact: bool = False) -> Tensor:
    """Attention of the case by the kernels; the result is on the host."""
    plan = planned(case.batch, case.k_cache.shape[2], exact).plan
    assert plan is not None
    return attend_planned(case.q.to(DEVICE), case.k_cache.to(DEVICE), case.v_cache.to(DEVICE), plan, case.scale).cpu()


def assert_as_expected(result: Tensor, case: Case, shape: Shape) -> None:
    tolerance = TOLERANCE[case.q.dtype]
    assert result.dtype == case.q.dtype
    torch.testing.assert_close(
        result.float(), case.expected, atol=tolerance, rtol=tolerance, msg=lambda message: f"{shape}\n{message}"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_stored_keys_and_values_are_in_their_slots_and_nothing_else_changes(seed: int) -> None:
    shape = random_shape(seed, NEW_TOKENS)
    case = make_case(shape, seed)
    caches = [torch.full_like(case.k_cache, 7.0).to(DEVICE) for _ in range(2)]
    fused = torch.cat((case.k, torch.full_like(case.k, NAN), case.v), dim=1).to(DEVICE)
    heads, size = case.k.shape[1], case.k_cache.shape[2]

    store(fused[:, :heads], fused[:, 2 * heads :], caches[0], caches[1], case.batch.slot_mapping.to(DEVICE))

    slots = case.batch.slot_mapping
    for cache, x in zip(caches, (case.k, case.v), strict=True):
        expected = torch.full_like(case.k_cache, 7.0)
        expected[slots // size, :, slots % size] = x
        assert torch.equal(cache.cpu(), expected), shape


@pytest.mark.parametrize("seed", SEEDS)
def test_single_queries_get_what_textbook_attention_gives(seed: int) -> None:
    shape = random_shape(seed, 1)
    case = make_case(shape, seed)

    assert_as_expected(attended(case), case, shape)


def test_the_random_shapes_cover_what_kernels_get_wrong() -> None:
    shapes = [random_shape(seed, 1) for seed in SEEDS]
    contexts = [(context, shape.block_size) for shape in shapes for context, _ in shape.spans]

    assert {shape.dtype for shape in shapes} == set(TOLERANCE)
    assert {shape.group for shape in shapes} == {1, 2, 3, 4, 7, 8}
    assert {shape.num_kv_heads for shape in shapes} == {1, 2}
    assert {(shape.head_dim, shape.block_size) for shape in shapes} == {(64, 16), (64, 32), (128, 16), (128, 32)}
    assert min(contexts)[0] == 1
    assert sum(context > SPLIT_TOKENS for context, _ in contexts) > 1
    assert any(context % size == 0 for context, size in contexts), "a last block that is full"
    assert any(context % size for context, size in contexts)
    assert any(len(shape.spans) > 1 and shape.spans[-1][0] > SPLIT_TOKENS for shape in shapes), (
        "a short context beside one of several splits"
    )


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_pieces_of_prompts_and_single_queries_get_what_textbook_attention_gives(seed: int) -> None:
    shape = random_shape(seed, SHORT)
    shape = Shape(
        shape.dtype,
        shape.head_dim,
        shape.num_kv_heads,
        shape.group,
        shape.block_size,
        (*shape.spans[:1], (20, 2), (40, 17)),
    )
    case = make_case(shape, seed)
    plan = planned(case.batch, shape.block_size).plan

    assert plan is not None
    assert plan.rows is not None
    assert plan.pieces
    assert_as_expected(attended(case), case, shape)


@pytest.mark.parametrize("bound", [1, 1000])
def test_a_piece_whose_mask_would_be_too_large_is_taken_in_slices_to_the_same_result(
    bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of 17 queries in groups of 3 over 40 tokens: one by one, or 8 at once."""
    shape = Shape(torch.float32, 64, 2, 3, 16, ((40, 17),))
    case = make_case(shape, 6)
    sizes: list[int] = []
    fused = functional.scaled_dot_product_attention

    def measured(*tensors: Tensor, attn_mask: Tensor, scale: float) -> Tensor:
        sizes.append(attn_mask.numel())
        return fused(*tensors, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(attention, "MAX_MASK", bound)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", measured)

    assert_as_expected(attended(case), case, shape)
    assert sizes == ([3 * 40] * 17 if bound == 1 else [8 * 3 * 40] * 2 + [3 * 40])


@pytest.mark.parametrize("head_dim", [80, 96])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_head_dimensions_that_are_no_power_of_two(head_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(dtype, head_dim, 2, 5, 16, ((70, 1), (17, 1), (50, 20)))
    case = make_case(shape, 1)

    assert_as_expected(attended(case), case, shape)


def test_contexts_of_many_splits() -> None:
    contexts = (SPLIT_TOKENS - 1, SPLIT_TOKENS, SPLIT_TOKENS + 1, 5 * SPLIT_TOKENS + 3)
    shape = Shape(torch.float32, 64, 1, 3, 16, tuple((context, 1) for context in contexts))
    case = make_case(shape, 2)

    assert_as_expected(attended(case), case, shape)


def test_large_scores_do_not_overflow() -> None:
    case = make_case(Shape(torch.float32, 64, 1, 2, 16, ((290, 1), (40, 3))), 3)
    larger = Case(300 * case.q, case.k, case.v, case.k_cache, case.v_cache, case.batch, case.expected, case.scale)

    assert attended(larger).isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_row_by_row_a_query_gets_the_same_bits_alone_in_any_batch_and_however_its_chunk_is_cut(
    dtype: torch.dtype,
) -> None:
    spans = ((270, 4), (33, 1), (10, 10))
    together = attended(make_case(Shape(dtype, 64, 1, 2, 16, spans), 4), exact=True)

    first = make_case(Shape(dtype, 64, 1, 2, 16, ((270, 2),)), 4)
    assert torch.equal(attended(first, exact=True), together[4 - 2 : 4])
    assert torch.equal(attended(first), together[4 - 2 : 4]), f"up to {FEW_TOKENS} tokens go row by row anyway"


def test_a_read_of_a_foreign_slot_would_show() -> None:
    case = make_case(Shape(torch.float32, 64, 1, 2, 16, ((40, 1), (60, 20))), 5)
    case.k_cache[case.batch.block_tables[0, 0]] = NAN
    case.v_cache[case.batch.block_tables[1, 0]] = NAN

    assert attended(case).flatten(1).isnan().any(dim=1).all()
